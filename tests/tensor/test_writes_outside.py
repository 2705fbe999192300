"""Writes to tensors on a rank outside their mesh: the same parameters get gradients there as on the mesh's ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import meshwright as mw


def _write_to_view_of_view(y: Tensor, w: Tensor) -> None:
    y.t()[0].view(4).copy_(w[0])


def _add_to_rows(y: Tensor, w: Tensor) -> None:
    y[:2] += w[:2]


def _write_to_all_rows(y: Tensor, w: Tensor) -> None:
    for row in range(4):
        y.select(0, row).mul_(w[row])


def _set_slice(y: Tensor, w: Tensor) -> None:
    y[..., 0::2] = w[:, :2]


def _set_row(y: Tensor, w: Tensor) -> None:
    y[1] = w[0]


def _set_by_index(y: Tensor, w: Tensor) -> None:
    y[torch.tensor([0, 2])] = w[:2]


def _set_in_steps(y: Tensor, w: Tensor) -> None:
    for t in range(4):
        y[:, t] = y[:, t - 1].clone() * w[:, t]


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda y, w: y.add_(w),
    "out=": lambda y, w: torch.mul(w.detach(), 2, out=y).add_(w),
    "index_add_": lambda y, w: y.index_add_(0, torch.tensor([0, 2]), w[:2]),
    "index_put_": lambda y, w: y.index_put_((torch.tensor([0]),), w[:1]),
    "masked_scatter_": lambda y, w: y.masked_scatter_(torch.ones(4, 4, dtype=torch.bool), w),
    "scatter_": lambda y, w: y.scatter_(0, torch.zeros(4, 4, dtype=torch.long), w),
    "diagonal": lambda y, w: y.diagonal().copy_(w[0]),
    "narrow": lambda y, w: y.narrow(1, 0, 2).copy_(w[:, :2]),
    "rows": _add_to_rows,
    "select": _write_to_all_rows,
    "view of a view": _write_to_view_of_view,
    "a row": _set_row,
    "a slice": _set_slice,
    "an index": _set_by_index,
    "steps": _set_in_steps,
}


@pytest.mark.parametrize("name", WRITES)
def test_parameters_get_gradients_on_all_ranks(name: str) -> None:
    def gradient(place: Callable[[Tensor], Tensor]) -> Tensor | None:
        w = place(torch.arange(1.0, 17.0).view(4, 4)).requires_grad_()
        y = place(torch.ones(4, 4)) * 1.0
        WRITES[name](y, w * 2)
        y.square().sum().backward()
        return w.grad

    def program() -> Tensor | None:
        mesh = mw.ProcessMesh([0], ["x"])
        found = gradient(lambda x: mw.shard_tensor(x, mesh, [mw.Replicate()]))
        return None if found is None else mw.unshard_dtensor(found)

    expected = gradient(lambda x: x)
    for found in mw.simulate(program, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
