"""Conj and neg bits are those of one device in every layout: `x.conj()` copies nothing, and `resolve_conj` copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "conj": lambda x: x.conj(),
    "conj twice": lambda x: x.conj().conj(),
    "mH": lambda x: x.mH,
    "transposed conj": lambda x: x.t().conj(),
    "rows of conj": lambda x: x.conj()[1:],
    "column of conj": lambda x: x.conj()[:, 1],
    "conj of rows": lambda x: x[1:].conj(),
    "one row": lambda x: x[:1].mH,
    "flat": lambda x: x.conj().reshape(-1),
    "imag of conj": lambda x: x.conj().imag,
    "real of conj": lambda x: x.conj().real,
    "rows of imag": lambda x: x.conj().imag[1:],
    "imag of a column": lambda x: x.mH[1:].imag,
    "unsqueezed": lambda x: x.conj().unsqueeze(0)[0],
    "piece": lambda x: x.conj().split(1)[0],
    "copied": lambda x: x.conj().clone(),
    "physical": lambda x: x.conj().conj_physical(),
    "contiguous": lambda x: x.conj().t().contiguous(),
    "product": lambda x: x.conj() * 2,
    "detached": lambda x: x.conj()[1:].detach(),
}
LAYOUTS: list[tuple[tuple[int, int], int, Any]] = [
    ((3, 2), 2, mw.Shard(0)),
    ((3, 2), 2, mw.Shard(1)),
    ((2, 3), 3, mw.Shard(0)),
    ((1, 2), 2, mw.Shard(0)),
    ((3, 2), 2, mw.Partial()),
    ((3, 2), 2, mw.Replicate()),
    ((3, 2), 1, mw.Shard(0)),
    ((0, 2), 2, mw.Shard(0)),
]


def _numbers(shape: tuple[int, int]) -> Tensor:
    count = shape[0] * shape[1]
    return torch.complex(torch.arange(1.0, 1 + count), torch.arange(2.0, 2 + count)).view(shape)


def _bits(view: Callable[[Tensor], Tensor], lay: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> list[Any]:
    v = view(lay(_numbers(shape)))
    found: list[Any] = [v.is_conj(), v.is_neg(), torch.is_conj(v), v.tolist()]
    for resolve in (torch.Tensor.resolve_conj, torch.resolve_neg):
        done = resolve(v)
        found += [done is v, done.is_conj(), done.is_neg(), tuple(done.shape), done.tolist()]
        v = done
    return found


def _written(view: Callable[[Tensor], Tensor], lay: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> list[Any]:
    """Write to the base, to the view and to resolved copies, which are no views."""
    x = lay(_numbers(shape))
    v = view(x)
    x.mul_(1 + 2j)
    found = [v.tolist(), v.is_conj(), v.is_neg()]
    v.add_(3)
    found += [x.tolist(), v.tolist()]
    if v.is_conj() or v.is_neg():
        v.resolve_conj().resolve_neg().fill_(0)
    return [*found, x.tolist(), v.tolist()]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("shape", "ranks", "placement"), LAYOUTS)
@pytest.mark.parametrize("program", [_bits, _written])
def test_conj_and_neg_bits_are_those_of_one_device(
    shape: tuple[int, int], ranks: int, placement: Any, view: str, program: Callable[..., list[Any]]
) -> None:
    def on(lay: Callable[[Tensor], Tensor]) -> Any:
        try:
            return program(VIEWS[view], lay, shape)
        except (RuntimeError, IndexError) as error:
            return isinstance(error, RuntimeError)

    def sharded() -> Any:
        mesh = mw.ProcessMesh(range(ranks), ["x"])
        return on(lambda x: mw.shard_tensor(x, mesh, [placement]))

    want = on(lambda x: x)
    assert mw.simulate(sharded, ranks) == [want] * ranks


@pytest.mark.parametrize("view", ["conj", "mH", "rows of conj", "imag of conj", "rows of imag"])
def test_the_gradient_through_resolved_bits_is_that_of_one_device(view: str) -> None:
    def gradient(lay: Callable[[Tensor], Tensor]) -> list[Any]:
        x = lay(_numbers((3, 2))).requires_grad_()
        v = VIEWS[view](x).resolve_conj().resolve_neg()
        (v * v).abs().sum().backward()
        assert x.grad is not None
        return torch.view_as_real(x.grad.resolve_conj()).tolist()

    mesh = mw.ProcessMesh(range(2), ["x"])
    want = torch.tensor(gradient(lambda x: x))
    for found in mw.simulate(lambda: gradient(lambda x: mw.shard_tensor(x, mesh, [mw.Shard(0)])), 2):
        torch.testing.assert_close(torch.tensor(found), want)
