"""Recorded training steps, and programs run on simulated ranks with the same inputs before and after a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import Program, runner
from meshwright.models import Llama, LlamaConfig, mark
from meshwright.tensor import local_parts

SMALL = LlamaConfig(vocab=32, hidden=32, layers=2, heads=2, kv_heads=1, feed_forward=48)


def plain(**how: Any) -> mw.Strategy:
    """Return a strategy with the given passes only."""
    alone = mw.Strategy(inplace=False, foreach=False, **how)
    off = {name: replace(getattr(alone, name), enable=False) for name in ("dp_optimization", "mp_optimization")}
    return replace(alone, **off)


@dataclass(frozen=True)
class Step:
    """The program of one training step on each rank, and its inputs."""

    programs: tuple[Program, ...]
    inputs: tuple[tuple[Any, ...], ...]

    def run(self, programs: Sequence[Program] | None = None) -> list[tuple[Any, list[Tensor], list[Any]]]:
        """Return for each rank: outputs, written values, and inputs afterwards; the stored inputs are not changed."""
        ranks = programs or self.programs
        runs = {id(p): runner(p) for p in ranks}

        def rank() -> tuple[Any, list[Tensor], list[Any]]:
            me = mw.get_rank()
            given = [copied(x) for x in self.inputs[me]]
            with local_parts(), torch.no_grad():
                outputs, written = runs[id(ranks[me])](*given)
                written = [v.clone() for v in written]
                left = [x.clone() if isinstance(x, Tensor) else x for x in given]
            return outputs, written, left

        return mw.simulate(rank, len(ranks))

    def changed(self, change: Callable[[Program], Program]) -> list[Program]:
        """Return the program of each rank after a pass."""
        made = {id(p): change(p) for p in {id(p): p for p in self.programs}.values()}
        return [made[id(p)] for p in self.programs]

    @cached_property
    def results(self) -> list[tuple[Any, list[Tensor], list[Any]]]:
        """Return the results of the programs of the step."""
        return self.run()


def copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def numbers(results: Any) -> list[Tensor]:
    """Return all tensors in results, in order."""
    if isinstance(results, Tensor):
        return [results]
    items = results.values() if isinstance(results, dict) else results if isinstance(results, (list, tuple)) else ()
    return [t for item in items for t in numbers(item)]


def assert_same(step: Step, programs: Sequence[Program], exactly: bool = True) -> None:
    """Check that the programs have the results of the step, to the bit if `exactly`."""
    for (out, written, _), (out2, written2, _) in zip(step.results, step.run(programs), strict=True):
        for a, b in zip(numbers((out, written)), numbers((out2, written2)), strict=True):
            if exactly:
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b)


@cache
def llama_step(shape: tuple[int, int, int] = (1, 2, 2), optimizer: str = "AdamW", batch: int = 16) -> Step:
    """Return the second step of a small Llama on a mesh of (pp, dp, tp)."""

    def model() -> nn.Module:
        m = Llama(SMALL, 0)
        mark(m, mw.ProcessMesh(np.arange(int(np.prod(shape))).reshape(shape), ["pp", "dp", "tp"]))
        return m

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SMALL.vocab, (batch, 9), generator=generator)
    return recorded(model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), int(np.prod(shape)), optimizer)


def recorded(
    model: Callable[[], nn.Module],
    batch: tuple[Any, ...],
    ranks: int,
    optimizer: str = "AdamW",
    steps: int = 2,
    **how: Any,
) -> Step:
    """Return the last of some steps of a model whose output is its loss; earlier steps are eager."""

    def rank() -> tuple[Program, tuple[Any, ...]]:
        torch.manual_seed(0)
        m = model()
        opt = getattr(torch.optim, optimizer)(m.parameters(), lr=1e-2, **how)
        for _ in range(steps - 1):
            m(*batch).backward()
            opt.step()
            opt.zero_grad()
        dist = mw.to_static(m, None, None, opt, strategy=plain())
        dist(*batch)
        found = dist._latest
        assert found is not None
        return found.program, tuple(copied(fetch(batch)) for fetch in found.fetch)

    found = mw.simulate(rank, ranks)
    return Step(tuple(p for p, _ in found), tuple(x for _, x in found))
