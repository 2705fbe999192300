"""Cost model: median error of predicted peak memory, against published runs and this machine's allocator.

Published: complete rows that give the memory in use on a device. Rows with the allocator's own peak are counted apart
from rows of other tools. Here: programs of small models on processes. The prediction counts the values in memory at
each node before they run. The measurement counts what operators allocate and free.
"""

from __future__ import annotations

import json
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright as mw
from meshwright.comm import init_process, launch
from meshwright.graph import Conversion, LiveMemory, Node, live_memory
from meshwright.models import Llama, LlamaConfig
from meshwright.reshard import AllReduce
from meshwright.search import hold
from meshwright.tensor import local_parts

from ._published import Run, runs
from ._static_models import OPTIMIZERS, STYLES, SUBJECTS, Style, Subject, mark
from .laws import published_runs_that_do_not_fit

MEDIAN, LOW, HIGH, HERE = 0.03, 0.03, 0.05, 0.03
OFTEN = 0.1
"""Largest share of the runs that may be more than `HIGH` too high."""
ALLOCATED = ("allocated peak GiB", "max_memory_allocated", "peak GB")
BESIDE = {"nvidia-smi GB, max node": 4.7 * 2**30}
"""Bytes that a tool counts beside tensors: the driver's context, communicator buffers, the allocator's reserve."""


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the median error over all complete rows."""
    rows = [r for r in runs() if r.memory and r.is_complete]
    errors = {r.name: in_use(r) / (r.memory or 1.0) - 1 for r in rows}
    exact = [abs(errors[r.name]) for r in rows if r.row["measured"]["memory_kind"] in ALLOCATED]
    here = {name: predicted / measured - 1 for name, predicted, measured in small_plans(4 if quick else 20)}
    every = [abs(e) for e in errors.values()]
    low = {name: round(e, 4) for name, e in errors.items() if e < -LOW}
    high = {name: round(e, 4) for name, e in errors.items() if e > HIGH}
    too_large = list(published_runs_that_do_not_fit())
    within = median(every) <= MEDIAN and not low and len(high) <= OFTEN * len(every)
    worst = max(map(abs, here.values()))
    return {
        "name": "memory",
        "value": round(median(every), 4),
        "goal": f"<= {MEDIAN} over {len(every)} runs, none more than {LOW} too low, at most {100 * OFTEN:g} % more than"
        f" {HIGH} too high; all published runs fit; here <= {HERE} for each of {len(here)} small plans",
        "ok": within and not too_large and worst <= HERE,
        "details": {
            "mean": round(mean(every), 4),
            "median of the allocator's": round(median(exact), 4),
            "too low": low,
            "too high": high,
            "do not fit": too_large,
            "sources": {s: _summary(s, rows, errors) for s in {r.source: None for r in rows}},
            "here": {name: round(e, 4) for name, e in here.items()},
        },
    }


def in_use(run: Run) -> float:
    """Return the predicted bytes in use, as the row's tool counts them."""
    seen = BESIDE.get(run.row["measured"]["memory_kind"], 0.0)
    return float(np.asarray(hold(run.model, run.plan, run.software).nbytes)) + seen


def _summary(source: str, rows: Sequence[Run], errors: dict[str, float]) -> dict[str, Any]:
    own = [errors[r.name] for r in rows if r.source == source]
    return {"rows": len(own), "median": round(median(map(abs, own)), 4), "bias": round(mean(own), 4)}


def small_plans(count: int) -> Iterator[tuple[str, int, int]]:
    """Yield a name, the counted and the measured bytes of rank 0, for a Llama on several meshes of real processes."""
    cases = [(width, at) for width in (128, 192) for at in range(len(STYLES))][:count]
    sizes = sorted({STYLES[at].ranks for _, at in cases})
    with tempfile.TemporaryDirectory() as directory:
        for ranks in sizes:
            path = Path(directory) / f"{ranks}.json"
            own = [f"{width},{at}" for width, at in cases if STYLES[at].ranks == ranks]
            if launch(["-m", "benchmarks.memory", str(path), *own], ranks, timeout=600) != 0:
                raise RuntimeError(f"the processes of the plans {' '.join(own)} failed")
            yield from json.loads(path.read_text())


def process(path: str, cases: Sequence[str]) -> None:
    """Run one of the processes."""
    torch.set_num_threads(1)
    communicator = init_process(backend="gloo")
    found: list[tuple[str, int, int]] = []
    for case in cases:
        width, at = map(int, case.split(","))
        found.append((f"{width} {STYLES[at]}", *counted_and_measured(llama(width), STYLES[at])))
    if communicator.rank == 0:
        Path(path).write_text(json.dumps(found))


def llama(width: int) -> Subject:
    """Return a Llama with two layers and texts of 48 words."""

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        return torch.randint(256, (12, 48), generator=g), torch.randint(256, (12, 48), generator=g)

    config = LlamaConfig(vocab=256, hidden=width, layers=2, heads=4, kv_heads=2, feed_forward=5 * width // 2)
    return replace(SUBJECTS["llama"], make=lambda: Llama(config), batch=batch)


def counted_and_measured(subject: Subject, style: Style) -> tuple[int, int]:
    """Return the bytes at the peak of a training step, as counted from its program and as measured."""
    torch.manual_seed(0)
    model = subject.make()
    mark(model, subject, style)
    step = mw.to_static(model, None, subject.loss, OPTIMIZERS["Adam"](model.parameters()))
    for seed in range(2):
        step(*subject.batch(seed))
    memory, batch = live_memory(step.program), list(subject.batch(2))
    found = step._latest  # pyright: ignore[reportPrivateUsage] - the function of a program has no public name
    assert found is not None
    given = [fetch(batch) for fetch in found.fetch]
    with local_parts(), torch.no_grad(), Allocations() as seen:
        found.run(*given)
    return counted(memory), memory.held + seen.peak


def counted(memory: LiveMemory) -> int:
    """Return the peak, with the flat copy that a collective other than an all-reduce makes while it runs."""

    def copied(node: Node) -> int:
        op = node.op
        if not isinstance(op, Conversion) or not op.communicates or isinstance(op.step, AllReduce):
            return 0
        return max(sum(v.nbytes for v in node.ins), sum(v.nbytes for v in node.outs))

    return max(live + copied(node) for live, node in zip(memory.live, memory.program.nodes, strict=True))


class Allocations(TorchDispatchMode):
    """A mode that counts memory allocated by operators of this thread, from allocation until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and id(t.untyped_storage()) not in given:
                self._took(t.untyped_storage())
        return out

    def _took(self, storage: Any) -> None:
        if id(storage) in self._known:
            return
        nbytes = storage.nbytes()
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        self._known[id(storage)] = weakref.finalize(storage, self._gave_back, id(storage), nbytes)

    def _gave_back(self, name: int, nbytes: int) -> None:
        self.now -= nbytes
        del self._known[name]


if __name__ == "__main__":
    process(sys.argv[1], sys.argv[2:])
