"""Expanded gradients, such as that of `sum`, on a rank whose part of a view has no elements.

The views are those among torch's own samples. `contiguous()` leaves an expanded gradient without elements as it is,
and some gradients need a memory order of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import meshwright as mw
from benchmarks._samples import op_samples

RANKS = 4
"""A dim of 1, 2, 3, 5, 6 or 9 elements leaves the last of four ranks without any."""
MESH = mw.ProcessMesh(range(RANKS), ["x"])


@dataclass(frozen=True)
class Call:
    """A call whose first result is a view of its first argument."""

    name: str
    op: Callable[..., Any]
    x: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def gradient(self, dim: int | None) -> Tensor:
        """Return the gradient of the sum of the results, with the argument sharded along `dim`."""
        x = self.x.detach().clone()
        x = (x if dim is None else mw.shard_tensor(x, MESH, [mw.Shard(dim)])).requires_grad_()
        results = [y for y in tree_leaves(self.op(x, *self.args, **self.kwargs)) if y.requires_grad]
        total = sum((y.sum() for y in results[1:]), results[0].sum())
        (total.real if total.is_complex() else total).backward()
        assert x.grad is not None
        return mw.unshard_dtensor(x.grad) if dim is not None else x.grad


def view_calls() -> Iterator[Call]:
    for entry in op_samples.op_db:
        for dtype in {torch.float32, torch.complex64} & entry.supported_dtypes("cpu"):
            if not entry.supports_autograd or entry.name in ("as_strided", "cartesian_prod"):
                continue
            sample = next(iter(entry.sample_inputs("cpu", dtype, requires_grad=False)))
            if isinstance(sample.input, Tensor) and _is_view(entry, sample):
                yield Call(entry.name, entry.op, sample.input, sample.args, sample.kwargs)


def _leaves_none(size: int) -> bool:
    """True if the last rank's part of a dim of this size has no elements."""
    part = max(1, ceil(size / RANKS))
    return part * (RANKS - 1) >= size


def _is_view(entry: Any, sample: Any) -> bool:
    try:
        found = entry.op(sample.input, *sample.args, **sample.kwargs)
    except Exception:  # torch refuses some of its own samples, with various errors
        return False
    return any(isinstance(y, Tensor) and y is not sample.input and y._base is sample.input for y in tree_leaves(found))


@pytest.mark.filterwarnings("ignore")
def test_a_view_without_elements_on_a_rank_takes_an_expanded_gradient() -> None:
    with torch.random.fork_rng(devices=[]):
        calls = list(view_calls())
    assert len(calls) > 50

    cases = [
        (call, dim, call.gradient(None))
        for call in calls
        for dim, size in enumerate(call.x.shape)
        if _leaves_none(size)
    ]
    assert len(cases) > 150

    def on_rank() -> list[str]:
        return [f"{c.name}, Shard({d})" for c, d, wanted in cases if not torch.equal(c.gradient(d), wanted)]

    assert mw.simulate(on_rank, RANKS) == [[]] * RANKS


def test_the_gradient_of_weights_of_a_bag_is_right_with_fewer_columns_than_ranks() -> None:
    torch.manual_seed(0)
    table, ids, scale = torch.randn(10, 2), torch.randint(10, (9,)), torch.randn(9)

    def gradients(mark: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        weight, factors = mark(table.clone(), 1).requires_grad_(), mark(scale.clone(), 0).requires_grad_()
        bags = F.embedding_bag(ids, weight, torch.tensor([0, 4]), mode="sum", per_sample_weights=factors)
        bags.square().sum().backward()
        assert weight.grad is not None
        assert factors.grad is not None
        return [weight.grad, factors.grad]

    def on_rank() -> list[Tensor]:
        found = gradients(lambda t, dim: mw.shard_tensor(t, MESH, [mw.Shard(dim)]))
        return [mw.unshard_dtensor(g) for g in found]

    want = gradients(lambda t, _: t)
    for found in mw.simulate(on_rank, RANKS):
        torch.testing.assert_close(found, want)


def test_a_view_whose_gradient_is_undefined_has_no_gradient() -> None:
    class Unused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x + w

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, grads[0]

    def gradients(mark: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x, w = (mark(torch.ones(2, 3)).requires_grad_() for _ in range(2))
        out = Unused.apply(x.view(2, 3, 1)[..., 0], w)
        assert isinstance(out, Tensor)
        (out.sum() + x.sum()).backward()
        assert x.grad is not None
        assert w.grad is not None
        return [x.grad, w.grad]

    def on_rank() -> list[Tensor]:
        return [mw.unshard_dtensor(g) for g in gradients(lambda t: mw.shard_tensor(t, MESH, [mw.Shard(0)]))]

    want = gradients(lambda t: t)
    for found in mw.simulate(on_rank, RANKS):
        torch.testing.assert_close(found, want)
