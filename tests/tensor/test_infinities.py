"""Reductions of infinities and NaN where some ranks have no elements, and pending sums of large terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import meshwright as mw
from meshwright.comm import current_communicator

LINE, FLAT = mw.ProcessMesh([0, 1, 2, 3], ["x"]), mw.ProcessMesh([[0, 1, 2, 3]], ["one", "x"])
SQUARE = mw.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
VALUES = {
    "lowest": [-inf] * 6,
    "highest": [inf] * 6,
    "mixed": [-inf, 1.0, inf, 2.0, -3.0, 0.0],
    "not a number": [nan, 1.0, -inf, 2.0, nan, 0.0],
    "mostly lowest": [-inf, -inf, 1.0, -inf, -inf, -inf],
    "negative": [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
}
SHAPES = ((1,), (6,), (2, 3), (1, 6))
Reduction = Callable[[Tensor, int], Any]
REDUCTIONS: dict[str, Reduction] = {
    **{n: lambda x, d, n=n: getattr(torch, n)(x, d) for n in (
        "amax", "amin", "max", "min", "argmax", "argmin", "logsumexp", "softmax", "log_softmax", "cummax", "cummin",
        "cumsum", "cumprod", "logcumsumexp", "sum", "nansum", "mean", "nanmean", "prod", "any", "all", "median",
        "nanmedian", "sort", "mode", "var", "std", "count_nonzero",
    )},
    **{f"{n} of all": lambda x, d, n=n: getattr(torch, n)(x) for n in ("max", "min", "argmax", "argmin", "prod")},
    **{f"norm {p}": lambda x, d, p=p: torch.linalg.vector_norm(x, p, d) for p in (inf, -inf, 0, 1, 2, 3, -1, 0.5)},
}  # fmt: skip
ONE_DEVICE_HAS_NONE = {
    "prod",
    "prod of all",
    "cumprod",
    "logsumexp",
    "var",
    "std",
    "norm 2",
    "norm 3",
    "norm -1",
    "norm 0.5",
}
"""Reductions whose gradients at infinities contain NaN, in other places on a mesh than on one device."""


def layouts(ndim: int) -> Iterator[tuple[mw.ProcessMesh, Sequence[mw.Placement]]]:
    for d in range(ndim):
        yield LINE, [mw.Shard(d)]
        yield FLAT, [mw.Shard(0), mw.Shard(d)]
    yield SQUARE, [mw.Shard(0), mw.Shard(ndim - 1)]


def results(reduce: Reduction, x: Tensor, dim: int) -> list[Tensor]:
    """Return the results, and the gradient of a weighted sum of the differentiable results."""
    found = [t for t in tree_leaves(reduce(x, dim)) if isinstance(t, Tensor)]
    total: Any = 0
    for t in found:
        if t.requires_grad:
            total = total + (t * torch.arange(1.0, 1 + t.numel()).reshape(t.shape)).sum()
    if isinstance(total, Tensor):
        total.backward()
    return [mw.unshard_dtensor(t.detach()) for t in [*found, *([x.grad] if x.grad is not None else [])]]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")  # for one element; one device warns too
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_an_empty_part_does_not_change_a_reduction(name: str, values: str) -> None:
    """An empty part contributes the lowest number to a maximum, which must not count as an element."""
    reduce = REDUCTIONS[name]
    cases = [
        (torch.tensor(VALUES[values])[: torch.Size(shape).numel()].reshape(shape), d)
        for shape in SHAPES
        for d in range(len(shape))
    ]
    wanted = [results(reduce, x.clone().requires_grad_(), d) for x, d in cases]

    def on_rank() -> list[list[list[Tensor]]]:
        return [
            [results(reduce, mw.shard_tensor(x.clone().requires_grad_(), *how), d) for how in layouts(x.dim())]
            for x, d in cases
        ]

    for each, goal in zip(mw.simulate(on_rank, 4)[0], wanted, strict=True):
        for found in each:
            count = len(goal) - (name in ONE_DEVICE_HAS_NONE and len(goal) > 1)
            torch.testing.assert_close(found[:count], goal[:count], equal_nan=True)


TERMS = [torch.tensor([[3.0, -2.0, 1.0], [1e33, 0.0, 5.0]]), torch.tensor([[-1.0, 2.0, 0.0], [-1e33, -4.0, -5.0]])]
OTHER = torch.tensor([[inf, nan, 0.0], [0.0, -inf, 2.0]])
PAIR = mw.ProcessMesh([0, 1], ["x"])
USES: dict[str, Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    **{f"times {c}": lambda x, lay, c=c: x * c for c in (inf, -inf, nan, 10.0, 10, -1.0, 0.5, 0.0)},
    **{f"divided by {c}": lambda x, lay, c=c: x / c for c in (0.0, 0, inf, 0.1, 2.0, nan)},
    "times a tensor": lambda x, lay: x * lay(OTHER),
    "times a plain tensor": lambda x, lay: OTHER * x,
    "times a tensor without dims": lambda x, lay: x * torch.tensor(inf),
    "divided by a tensor": lambda x, lay: x / lay(OTHER),
    "in place": lambda x, lay: x.clone().mul_(10.0).div_(0.0),
    "in place by a tensor": lambda x, lay: x.clone().mul_(lay(OTHER)),
    "times a matrix": lambda x, lay: x @ lay(OTHER.mT),
    "in an einsum": lambda x, lay: torch.einsum("ij,kj->ik", x, lay(OTHER)),
    "added with a factor": lambda x, lay: torch.add(lay(OTHER), x, alpha=10),
    "added with an infinite factor": lambda x, lay: torch.add(x, lay(torch.ones(2, 3)), alpha=inf),
    "a product added": lambda x, lay: torch.addcmul(x, lay(OTHER), lay(torch.zeros(2, 3))),
    "between": lambda x, lay: torch.lerp(x, lay(OTHER), 0.5)[0],
    "far from": lambda x, lay: torch.lerp(x, lay(OTHER), 10.0),
    "as degrees": lambda x, lay: x.rad2deg(),
    "times a mask": lambda x, lay: x * lay(OTHER > 0),
    "where": lambda x, lay: torch.where(lay(OTHER > 0), x, 0.0),
    "masked": lambda x, lay: x.masked_fill(lay(OTHER > 0), -inf),
    "a bias": lambda x, lay: torch.addmm(lay(torch.ones(2, 2)), x, lay(OTHER.mT), beta=0.5),
}


@pytest.mark.parametrize("name", USES)
def test_a_pending_sum_gives_the_numbers_of_the_sum(name: str) -> None:
    use, total = USES[name], TERMS[0] + TERMS[1]
    wanted = use(total.clone(), lambda x: x.clone())

    def on_rank() -> Tensor:
        x = mw.dtensor_from_local(TERMS[current_communicator().rank].clone(), PAIR, [mw.Partial("sum")])
        return mw.unshard_dtensor(use(x, lambda y: mw.shard_tensor(y.clone(), PAIR, [mw.Replicate()])))

    for found in mw.simulate(on_rank, 2):
        torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "prod"])
@pytest.mark.parametrize("special", [inf, -inf, nan])
def test_non_finite_terms_are_reduced_as_in_torch(op: str, special: float) -> None:
    terms = torch.tensor([[special, 1.0, special, 0.0], [2.0, special, special, 0.0]])
    joins = {
        "sum": terms.sum(0),
        "avg": terms.mean(0),
        "max": terms.amax(0),
        "min": terms.amin(0),
        "prod": terms.prod(0),
    }

    def on_rank() -> Tensor:
        return mw.unshard_dtensor(
            mw.dtensor_from_local(terms[current_communicator().rank].clone(), PAIR, [mw.Partial(op)])
        )

    for found in mw.simulate(on_rank, 2):
        torch.testing.assert_close(found, joins[op], equal_nan=True)
