"""Level 4: training with each kind of parallelism, checkpoints and exact resumption, compared with one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from meshwright.comm import simulate
from meshwright.engine import load_checkpoint, save_checkpoint

from ..results.check import Check, NotRun, Target
from ..results.uses import FOUR_PROCESSES, PROCESSES, RESUME, SIMULATED
from .comparison import expect, expect_all_close, expect_all_equal
from .training_programs import (
    Attention,
    Experts,
    Images,
    Perceptron,
    Program,
    Run,
    Words,
    blocks,
    trained,
    trained_alone,
)

TENSOR = {"up": {"weight": 0, "bias": 0}, "down": {"weight": 1}}
SEQUENCES = Program(model=Attention, axes={"cp": 2}, batch={"cp": 1}, shape=(2, 8, 16))
EXPERTS = Program(axes={"ep": 2}, batch={"ep": 0}, axis="ep", shards={"": {"up": 0, "down": 0}})
PIPELINE = Program(model=blocks, axes={"pp": 2}, way=(0, 1))


def _pipeline(schedule: str, *way: int) -> Program:
    options = {"enable": True, "accumulate_steps": 4, "schedule_mode": schedule}
    return replace(PIPELINE, way=way, strategy={"pipeline": options})


BOTH: Mapping[str, Program] = {
    "data parallel": Program(),
    "tensor parallel": Program(axes={"tp": 2}, shards=TENSOR),
    "ZeRO-1": Program(zero=1),
    "ZeRO-2": Program(zero=2),
    "ZeRO-3": Program(zero=3),
    "convolutions with batch norm": Program(model=Images),
    "embedding with a shared weight": Program(model=Words),
    "vocabulary parallel": Program(model=Words, axes={"tp": 2}, shards={"embed": {"weight": 0}}),
    "context parallel by gather": replace(SEQUENCES, context="gather"),
    "context parallel by ring": replace(SEQUENCES, context="ring"),
    "context parallel by ulysses": replace(SEQUENCES, context="ulysses"),
    "sharded experts": replace(EXPERTS, model=partial(Experts, dispatches=False)),
    "dispatched experts": replace(EXPERTS, model=partial(Experts, dispatches=True)),
}
"""Programs of two ranks, eager and static."""
FOUR: Mapping[str, Program] = {
    "data and tensor parallel": Program(axes={"dp": 2, "tp": 2}, shards=TENSOR),
    "ZeRO-3 and tensor parallel": Program(axes={"dp": 2, "tp": 2}, shards=TENSOR, zero=3),
}
"""Programs of four ranks, eager and static."""
STATIC: Mapping[str, Program] = {
    "pipeline GPipe": _pipeline("GPipe", 0, 1),
    "pipeline 1F1B": _pipeline("1F1B", 0, 1),
    "pipeline Interleaved 1F1B": _pipeline("Interleaved 1F1B", 0, 1, 0, 1),
    "pipeline ZB-H1": _pipeline("ZB-H1", 0, 1),
    "pipeline ZB-V": _pipeline("ZB-V", 0, 1, 1, 0),
    "accumulated gradients": Program(strategy={"gradient_merge": {"enable": True, "k_steps": 2, "avg": True}}),
    "recomputation": Program(strategy={"recompute": {"enable": True, "budget": 0.5}}),
}
EAGER: Mapping[str, Program] = {"pipeline without a schedule": PIPELINE}
WIDE: Mapping[str, Program] = {
    **FOUR,
    **{name: replace(program, axes=dict.fromkeys(program.axes, 4)) for name, program in BOTH.items()},
}
"""Programs of four processes, eager and static: those of two ranks have twice as many on their axis."""
WIDE_PIPELINE = replace(_pipeline("1F1B", 0, 1, 2, 3), axes={"pp": 4})
MIXED = (torch.bfloat16, torch.float16)


def _check_close(found: list[Tensor], program: Program, target: Target) -> None:
    expect_all_close(found, trained_alone(program, target.device), "losses and state")


def on_simulated_ranks(program: Program, static: bool, target: Target) -> None:
    """Train on simulated ranks; compare each rank with one device."""
    for found in simulate(trained, program.ranks, program, target.device, static):
        _check_close(found, program, target)


def on_processes(program: Program, static: bool, target: Target) -> None:
    """Train on the ranks of this worker; compare this rank with one device."""
    _check_close(trained(program, target.device, static), program, target)


def mixed_precision(dtype: torch.dtype, target: Target) -> None:
    """Train under autocast on one device and on two ranks; the losses are close, and fall."""
    if dtype not in target.dtypes:
        raise NotRun(f"the device has no {dtype}")
    program = Program(dtype=dtype, axes={"tp": 2}, shards=TENSOR)
    goal = trained_alone(program, target.device)[:2]
    for found in simulate(trained, program.ranks, program, target.device, False):
        for loss, other in zip(found[:2], goal, strict=True):
            expect(
                bool((loss - other).abs() <= 0.05 * other.abs()),
                f"loss {loss.item():.5g} instead of {other.item():.5g}",
            )
        expect(bool(found[1] < found[0]), "the loss does not fall")


# ---- checkpoints ----

DROPPING = Program(model=partial(Perceptron, dropout=0.3))
RESUMED: Mapping[str, Program] = {
    "data parallel": DROPPING,
    "tensor parallel": replace(DROPPING, axes={"tp": 2}, shards=TENSOR),
    "ZeRO-1": replace(DROPPING, zero=1),
    "ZeRO-3": replace(DROPPING, zero=3),
}


def _resumed(program: Program, static: bool, folder: Path, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Return the end of a run, and that of a new run that continues from a checkpoint in its middle."""
    run = Run(program, device, static, on_mesh=True)
    run.train()
    save_checkpoint(folder, 2, run.trained, None if static else run.optimizer)
    goal = run.train()
    again = Run(program, device, static, on_mesh=True, seed=5)
    if static:
        again.train(1)
    load_checkpoint(folder, again.trained, None if static else again.optimizer)
    return again.train(), goal


def resume_simulated(name: str, static: bool, target: Target) -> None:
    """Resume on simulated ranks, with dropout: all bits are those of a run without a stop."""
    program = RESUMED[name]
    folder = target.folder / f"simulated {name} {static}"
    for found, goal in simulate(_resumed, 2, program, static, folder, target.device):
        expect_all_equal(found, goal, "losses and state after the checkpoint")


def resume_on_processes(name: str, static: bool, target: Target) -> None:
    """Resume on the ranks of this worker, with dropout: all bits are those of a run without a stop."""
    found, goal = _resumed(RESUMED[name], static, target.folder / f"{name} {static}", target.device)
    expect_all_equal(found, goal, "losses and state after the checkpoint")


def other_meshes(target: Target) -> None:
    """A checkpoint of each kind of parallelism is loaded on each other kind, and on one device."""
    kinds = {name: replace(program, model=Perceptron) for name, program in RESUMED.items()}

    def saved(name: str) -> list[Tensor]:
        run = Run(kinds[name], target.device, False, on_mesh=True)
        run.train(1)
        save_checkpoint(target.folder / f"meshes {name}", 1, run.model, run.optimizer)
        return run.state()

    def loaded(name: str, source: str, on_mesh: bool = True) -> list[Tensor]:
        run = Run(kinds[name], target.device, False, on_mesh=on_mesh, seed=7)
        load_checkpoint(target.folder / f"meshes {source}", run.model, run.optimizer)
        return run.state()

    for source in kinds:
        goal = simulate(saved, 2, source)[0]
        expect_all_equal(loaded(source, source, on_mesh=False), goal, f"{source} on one device")
        for name in kinds:
            expect_all_equal(simulate(loaded, 2, name, source)[1], goal, f"{source} as {name}")


def _modes(static: bool) -> str:
    return "static" if static else "eager"


def _programs() -> Iterator[tuple[str, bool, Program]]:
    for static in (False, True):
        for name, program in {**BOTH, **(STATIC if static else EAGER)}.items():
            yield f"{name}, {_modes(static)}", static, program


def _checks() -> Iterator[Check]:
    yield from _simulated_checks()
    yield from _checks_of_processes()


def _simulated_checks() -> Iterator[Check]:
    for name, static, program in _programs():
        yield _check(f"{SIMULATED}: {name}", partial(on_simulated_ranks, program, static))
    for name, program in FOUR.items():
        for static in (False, True):
            yield _check(f"{SIMULATED}: {name}, {_modes(static)}", partial(on_simulated_ranks, program, static))
    for dtype in MIXED:
        yield _check(f"{SIMULATED}: mixed precision, {dtype}", partial(mixed_precision, dtype))
    for name in RESUMED:
        for static in (False, True):
            yield _check(f"{SIMULATED}: {RESUME} {name}, {_modes(static)}", partial(resume_simulated, name, static))
    yield _check(f"{SIMULATED}: {RESUME} on other meshes", other_meshes)


def _checks_of_processes() -> Iterator[Check]:
    for name, static, program in _programs():
        yield _check(f"{PROCESSES}: {name}", partial(on_processes, program, static), 2)
    for name in RESUMED:
        for static in (False, True):
            run = partial(resume_on_processes, name, static)
            yield _check(f"{PROCESSES}: {RESUME} {name}, {_modes(static)}", run, 2)
    for name, program in WIDE.items():
        for static in (False, True):
            run = partial(on_processes, program, static)
            yield _check(f"{FOUR_PROCESSES}: {name}, {_modes(static)}", run, 4)
    run = partial(on_processes, WIDE_PIPELINE, True)
    yield _check(f"{FOUR_PROCESSES}: pipeline 1F1B, {_modes(static=True)}", run, 4)


def _check(name: str, run: Callable[[Target], None], processes: int = 1) -> Check:
    return Check(4, name, run, processes, limit=120.0)


TRAINING = tuple(_checks())
