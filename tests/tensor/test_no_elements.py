"""Operators on tensors without elements give one device's results if another dim is sharded.

The operators are those of torch's own samples. In a sample, every dim of one size loses its elements, and all dims of
another size are sharded. Calls that one device refuses are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import ReductionOpInfo
from torch.utils._pytree import tree_leaves, tree_map

import meshwright as mw
from benchmarks import _samples

RANKS = 2
MESH = mw.ProcessMesh(range(RANKS), ["x"])


@dataclass(frozen=True)
class Case:
    """A call, the size that becomes 0, and the size whose dims are sharded."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    emptied: int
    sharded: int

    def run(self, is_whole: bool) -> list[Any]:
        """Return the results and the gradients."""
        leaves: list[Tensor] = []

        def argument(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            new = x.detach()[tuple(slice(0 if n == self.emptied else n) for n in x.shape)].clone()
            if not is_whole:
                at = next((d for d, n in enumerate(new.shape) if n == self.sharded), None)
                new = mw.shard_tensor(new, MESH, [mw.Replicate() if at is None else mw.Shard(at)])
            if x.requires_grad:
                leaves.append(new.requires_grad_())
            return new

        torch.manual_seed(0)
        out = self.op(*tree_map(argument, self.args), **tree_map(argument, self.kwargs))
        results = tree_leaves(out)
        wanted = [x for x in results if isinstance(x, Tensor) and x.requires_grad and x.is_floating_point()]
        if wanted:
            sum((x.sum() for x in wanted[1:]), wanted[0].sum()).backward()
        found = [*results, *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)]
        return [mw.unshard_dtensor(x.detach()) if isinstance(x, Tensor) else x for x in found]


def sizes_of(value: Any) -> list[int]:
    return list(dict.fromkeys(n for x in tree_leaves(value) if isinstance(x, Tensor) for n in x.shape))


def cases(entry: Any, samples: int) -> Iterator[Case]:
    found = entry.op.sample_inputs("cpu", torch.float32, requires_grad=entry.differentiable)
    for sample in islice(found, samples):
        args = (sample.input, *sample.args)
        sizes = [n for n in sizes_of((args, sample.kwargs)) if n > 1]
        yield from (Case(entry.op, args, sample.kwargs, a, b) for a in sizes for b in sizes if a != b)


def check(entry: Any, samples: int = 3) -> Iterator[str]:
    """Return the differences of an operator's results from those of one device."""
    accepted: list[tuple[Case, list[Any]]] = []
    for case in cases(entry, samples):
        try:
            accepted.append((case, case.run(True)))
        except Exception:  # one device refuses such a call, with various errors
            continue
    got = mw.simulate(lambda: [case.run(False) for case, _ in accepted], RANKS) if accepted else []
    for results in got:
        for mine, (case, goal) in zip(results, accepted, strict=True):
            try:
                torch.testing.assert_close(mine, goal, equal_nan=True)
            except AssertionError as error:
                yield f"{entry.name}, size {case.emptied} empty, {case.sharded} sharded: {error}; {mine} not {goal}"


CRASHES = ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
"""Operators whose gradient on one device divides integers by zero."""
UNINITIALISED = ("nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss")
"""Losses for which one device returns uninitialised memory."""
WORDS = ("loss", "norm", "entropy", "softmax", "kl_div", "std", "var", "attention", "cum", "logsumexp", "median")


def is_reduction(entry: Any) -> bool:
    """True for reductions, losses and normalisations."""
    name = entry.op.name
    if name in (*CRASHES, *UNINITIALISED) or entry.name in _samples.LEFT_OUT or entry.dtype != torch.float32:
        return False
    return isinstance(entry.op, ReductionOpInfo) or any(word in name for word in WORDS)


ENTRIES = [entry for entry in _samples.entries(("function",)) if is_reduction(entry)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_tensor_without_elements_gives_one_devices_numbers(entry: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        wrong = list(check(entry, 2))
    assert not wrong, "\n".join(wrong[:5])
