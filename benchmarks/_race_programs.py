"""The training programs of `python -m benchmarks races`: every kind of parallelism, in each way of running a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.passes import OverlapSchedule, SplitProducts
from meshwright.tensor.conversion import gradient_buckets
from tests.device.communicator import run_on_devices
from tests.device.training import Training, train

from ._left_out_waits import RANKS

Options = tuple[tuple[str, Any], ...]
KINDS = ("dp", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tp", "pp", "cp", "ep")
UNBUCKETED = ("dp_optimization", {"fuse_grad_size_in_MB": 0})
OVERLAPPED: Options = (("passes", (OverlapSchedule(),)), UNBUCKETED)
RELEASED: Options = (*OVERLAPPED, ("release", True))
COMPILED: Options = (*OVERLAPPED, ("compiler", "inductor"))
PASSES: Options = (
    ("passes", (SplitProducts(2, least=0), OverlapSchedule())),
    UNBUCKETED,
    ("recompute", {"enable": True, "budget": 0.5}),
    ("fused_passes", {"enable": True}),
)
PIPELINE: Options = (("pipeline", {"enable": True, "accumulate_steps": 2, "schedule_mode": "1F1B"}),)
SMALL = 1024
"""Bytes of a small bucket: a step has more than one."""
PROMPTS = [[3, 4, 5], [6], [7, 8], [2, 2]]


@dataclass(frozen=True, slots=True)
class Case:
    """One training program: a kind of parallelism, eager or static, and the options of a static step.

    `between` is what happens after each step: a checkpoint is saved, or tokens are generated. `bucket` is the size of
    buckets of eager data parallelism in bytes, which start during the backward pass.
    """

    kind: str
    static: bool = False
    options: Options = ()
    between: Literal["", "saves", "generation"] = ""
    bucket: int = gradient_buckets.BUCKET_BYTES

    @property
    def strategy(self) -> mw.Strategy | None:
        pipeline = PIPELINE if self.static and self.kind.startswith("pp") else ()
        options = dict((*self.options, *pipeline))
        return mw.Strategy.of(**options) if options else None

    @property
    def is_compiled(self) -> bool:
        return ("compiler", "inductor") in self.options

    def run(self, on_devices: bool, ranks: int = RANKS) -> list[list[Tensor]]:
        """Return the numbers of each rank, on the CPU or on a test device for each rank."""
        with TemporaryDirectory() as folder:
            between = _between(self.between, Path(folder))

            def numbers(device: torch.device | str) -> list[Tensor]:
                return train(self.kind, self.static, device, strategy=self.strategy, between=between)[0]

            return mw.simulate(run_on_devices(numbers) if on_devices else lambda: numbers("cpu"), ranks)

    def training(self, device: torch.device) -> Training:
        return Training(self.kind, self.static, device, strategy=self.strategy)

    def __str__(self) -> str:
        named = ((OVERLAPPED, "overlapped"), (RELEASED, "early updates"), (COMPILED, "Inductor"), ((), ""))
        options = next((name for each, name in named if each == self.options), "all passes")
        buckets = "small buckets" if self.bucket == SMALL else ""
        parts = [self.kind, "static" if self.static else "eager", options, self.between, buckets]
        return ", ".join(part for part in parts if part)


def _between(name: str, folder: Path) -> Callable[[Training], list[Tensor]]:
    """Return what a program does after each step, and whose results are compared."""
    if name == "saves":
        return lambda training: _saved(training, folder)
    if name == "generation":
        return _generated
    return lambda training: []


def _saved(training: Training, folder: Path) -> list[Tensor]:
    """Save a checkpoint in the background, make a step, and return to the checkpoint."""
    place = folder / str(len(list(folder.iterdir())))
    current_communicator().barrier(tuple(range(RANKS)))
    saving = mw.save_checkpoint(place, 1, training.model, training.optimizer, async_save=True)
    training.step()
    saving.wait()
    after = [x.clone() for x in training.parameters()]
    mw.load_checkpoint(place, training.model, training.optimizer)
    return after


def _generated(training: Training) -> list[Tensor]:
    found = mw.sampler(training.model).generate(PROMPTS, 4, seed=1)
    return [found.tokens.cpu(), found.log_probs.cpu()]


CASES = (
    *(Case(kind) for kind in KINDS),
    *(Case(kind, bucket=SMALL) for kind in ("dp", "dp x tp", "ZeRO-1")),
    *(Case(kind, True) for kind in KINDS),
    *(Case(kind, True, PASSES if kind in ("pp", "ep") else (*PASSES, ("release", True))) for kind in KINDS),
    *(Case(kind, True, COMPILED) for kind in KINDS),
    Case("dp", between="saves"),
    Case("ZeRO-3", between="saves"),
    Case("tp", between="saves"),
    Case("ZeRO-1", between="saves"),
    Case("words, tp", between="generation"),
    Case("words, ZeRO-3", between="generation"),
    Case("dp x tp"),
    Case("dp x cp"),
    Case("dp x ep"),
    Case("pp x dp", True),
)
QUICK = (Case("ZeRO-3"), Case("pp"), Case("ep"), Case("dp", True, OVERLAPPED), Case("words, tp", between="generation"))
