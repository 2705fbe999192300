"""Training with equal numbers in static mode, in eager mode and on one device: five models, meshes of 1 to 3 axes.

    python -m benchmarks.static_equals_eager                 every case
    python -m benchmarks.static_equals_eager --only moe tp=2  cases whose names have these words

Each case makes five training steps three times: on one device, eagerly on simulated ranks, and as a static program.
Losses, gradients, states, parameters and buffers are compared with one device as whole tensors, and between static and
eager part by part.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from benchmarks._static_models import OPTIMIZERS, STYLES, SUBJECTS, Style, Subject, mark
from meshwright.comm import init_process, launch

GOAL = 1e-5
STEPS = 5
TINY = 1e-6
"""Lower bound of the scale: differences are relative to the largest element of a tensor."""

PROCESSES = 4
IN_PROCESSES = ("mlp dp=2 tp=2", "llama dp=2 tp=2 sequence", "cnn zero=4", "moe tp=4")


@dataclass(frozen=True)
class Case:
    """A model on a mesh, with an optimizer."""

    model: str
    style: Style
    optimizer: str

    @property
    def subject(self) -> Subject:
        return SUBJECTS[self.model]

    def __str__(self) -> str:
        return f"{self.model} {self.style} {self.optimizer}"


def cases() -> list[Case]:
    """Return every model in every style; optimizers alternate, so that each model is trained with all of them."""
    kinds = list(OPTIMIZERS)
    return [
        Case(model, style, kinds[(i + j) % len(kinds)])
        for i, model in enumerate(SUBJECTS)
        for j, style in enumerate(STYLES)
    ]


Outcome = dict[str, Any]


def train(case: Case, how: str) -> Outcome:
    """Return losses, and by name the last gradients, states, parameters and buffers after five steps."""
    torch.manual_seed(0)
    subject = case.subject
    model = subject.make()
    if how != "one device":
        mark(model, subject, case.style)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    optimizer.register_step_post_hook(_keep_gradients)
    step = mw.to_static(model, None, subject.loss, optimizer) if how == "static" else _eager(model, subject, optimizer)
    losses = [step(*subject.batch(seed)).item() for seed in range(STEPS)]
    names = {p: name for name, p in model.named_parameters()}
    states = {f"{names[p]}: {key}": v for p, state in optimizer.state.items() for key, v in state.items()}
    return {"losses": torch.tensor(losses), "drawn": torch.rand(3), **states, **model.state_dict()}


def _keep_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Store each parameter's last gradient among its states, so that it can be compared."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                optimizer.state[p]["gradient"] = p.grad.clone()


def _eager(model: torch.nn.Module, subject: Subject, optimizer: torch.optim.Optimizer) -> Any:
    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(*batch) if subject.loss is None else subject.loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@dataclass(frozen=True)
class Found:
    """Distance of a case from one device, its place, and whether static and eager are equal to the bit."""

    worst: float
    where: str
    same: bool


def compare(case: Case, wanted: Outcome) -> Found:
    """Return the comparison of one rank; every rank has to call it."""
    eager, static = train(case, "eager"), train(case, "static")
    if list(eager) != list(static):
        raise KeyError(f"eager has {sorted(set(eager) ^ set(static))} or static has")
    same = all(torch.equal(_part(eager[k]), _part(static[k])) for k in eager)
    found = {k: _difference(_whole(static[k]), wanted[k]) for k in wanted}
    where = max(found, key=lambda k: found[k])
    return Found(found[where], where, same)


def _part(x: Any) -> Tensor:
    return x.to_local() if isinstance(x, mw.DistTensor) else torch.as_tensor(0 if x is None else x)


def _whole(x: Any) -> Any:
    return mw.unshard_dtensor(x) if isinstance(x, Tensor) else x


def _difference(found: Any, wanted: Any) -> float:
    if not isinstance(wanted, Tensor):
        return 0.0 if found == wanted else float("inf")
    if not wanted.numel():
        return 0.0
    a, b = found.detach().double(), wanted.detach().double()
    return float((a - b).abs().max() / max(float(b.abs().max()), TINY))


def check(case: Case) -> Found:
    """Return the worst comparison of all simulated ranks."""
    found = mw.simulate(compare, case.style.ranks, case, train(case, "one device"))
    worst = max(found, key=lambda f: f.worst)
    return Found(worst.worst, worst.where, all(f.same for f in found))


def in_processes(chosen: Sequence[Case]) -> dict[str, Any]:
    """Return the same on real processes: name → result of rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "found.json"
        status = launch(
            ["-m", "benchmarks.static_equals_eager", "--processes", str(path), *map(str, chosen)],
            PROCESSES,
            timeout=600,
        )
        return json.loads(path.read_text()) if status == 0 and path.exists() else {}


def process(path: str, names: Sequence[str]) -> None:
    """Run one of the processes."""
    communicator = init_process(backend="gloo")
    found: dict[str, Any] = {}
    for case in cases():
        if str(case) in names:
            result = compare(case, train(case, "one device"))
            found[f"{case} in processes"] = [result.worst, result.where, result.same]
    if communicator.rank == 0:
        Path(path).write_text(json.dumps(found))


def sweep(chosen: Sequence[Case], progress: bool = False) -> Iterator[tuple[str, Found | str]]:
    """Yield each case's name, and its result or the error."""
    for case in chosen:
        start = time.perf_counter()
        try:
            found: Found | str = check(case)
        except Exception as error:
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if progress:
            print(f"# {case}: {found} {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        yield str(case), found


def run(quick: bool = False, words: Sequence[str] = (), progress: bool = False) -> dict[str, Any]:
    """Return the figure: the number of cases that are right."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    chosen = [c for c in cases() if all(w in str(c).split() for w in words)]
    chosen = chosen[:: len(STYLES) // 3] if quick else chosen
    found: dict[str, Found | str] = dict(sweep(chosen, progress))
    real = [] if quick or words else [c for c in cases() if str(c).rpartition(" ")[0] in IN_PROCESSES]
    if real:
        results: Mapping[str, Any] = in_processes(real)
        found |= {f"{c} in processes": "no result" for c in real}
        found |= {name: Found(*values) for name, values in results.items()}
    return _figure(found, time.perf_counter() - start)


def _figure(found: Mapping[str, Found | str], seconds: float) -> dict[str, Any]:
    done = {name: f for name, f in found.items() if isinstance(f, Found)}
    right = [name for name, f in done.items() if f.worst <= GOAL]
    worst = max(done, key=lambda name: done[name].worst, default="")
    wrong = {name: f if isinstance(f, str) else f"{f.worst:.1e} at {f.where}" for name, f in found.items()}
    return {
        "name": "static_equals_eager",
        "value": len(right),
        "goal": len(found),
        "ok": len(right) == len(found),
        "details": {
            "steps": STEPS,
            "worst relative difference of static and one device": done[worst].worst if worst else None,
            "worst case": f"{worst} at {done[worst].where}" if worst else None,
            "static equals eager to the bit": sum(f.same for f in done.values()),
            "not to the bit": [name for name, f in done.items() if not f.same],
            "failures": {name: why for name, why in wrong.items() if name not in right},
            "seconds": round(seconds),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument("--only", nargs="+", default=[], help="words that the names of cases must have")
    parser.add_argument("--processes", nargs="+", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.processes:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        process(settings.processes[0], settings.processes[1:])
    else:
        print(json.dumps(run(settings.quick, settings.only, progress=True)))


if __name__ == "__main__":
    main()
