"""Autograd attributes of a view: the same values as on one device, before and after its use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm import current_communicator

MESH = mw.ProcessMesh(range(2), ["x"])
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda x: x[1],
    "slice": lambda x: x[1:3],
    "transposed and cut": lambda x: x.t()[:, 1:],
    "view of a view": lambda x: x[1:][1],
    "inner view": lambda x: x[1:, 1:],
    "flat": lambda x: x.view(-1)[3:],
    "detached": lambda x: x[1].detach(),
    "detached base": lambda x: x.detach()[1],
    "data": lambda x: x[1].data,
    "halves": lambda x: x.view(torch.float16)[1],
    "row of halves": lambda x: x[1].view(torch.float16),
    "integers": lambda x: x.view(torch.int32)[1],
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nothing": lambda x, w: None,
    "copy": lambda x, w: x.copy_(w),
    "add": lambda x, w: x.add_(w * w),
    "set": lambda x, w: x.__setitem__(1, w[0]),
    "view": lambda x, w: x[1:].mul_(w[1:]),
    "no_grad": lambda x, w: torch.no_grad()(x.copy_)(w),
    "data": lambda x, w: x.data.copy_(w),
    "numbers": lambda x, w: x.fill_(2.0),
    "requires_grad_": lambda x, w: x.requires_grad_(),
    "requires_grad_ and a write": lambda x, w: torch.no_grad()(x.requires_grad_().copy_)(w),
}
QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "requires_grad": lambda v: v.requires_grad,
    "grad_fn": lambda v: v.grad_fn is not None,
    "is_leaf": lambda v: v.is_leaf,
    "output_nr": lambda v: v.output_nr,
    "requires_grad by call": torch.Tensor.requires_grad.__get__,  # pyright: ignore[reportAttributeAccessIssue]
}


def _answers(view: str, write: str, used: Callable[[Tensor], Any], mark: Callable[[Tensor], Tensor]) -> list[Any]:
    """Return the value of each attribute, read first after a write."""
    found: list[Any] = []
    for question in QUESTIONS.values():
        x, w = mark(torch.zeros(4, 3)), mark(torch.ones(4, 3)).requires_grad_()
        v = VIEWS[view](x)
        WRITES[write](x, w)
        used(v)
        found.append(question(v))
    return found


@pytest.mark.parametrize("view", VIEWS)
def test_attributes_of_a_view_equal_one_device_before_its_use(view: str) -> None:
    uses: list[Callable[[Tensor], Any]] = [lambda v: None, lambda v: v + 1, lambda v: torch.no_grad()(v.add)(1)]

    def all_answers(mark: Callable[[Tensor], Tensor]) -> list[Any]:
        return [(write, _answers(view, write, used, mark)) for write in WRITES for used in uses]

    want = all_answers(torch.Tensor.clone)
    for found in mw.simulate(lambda: all_answers(lambda t: mw.shard_tensor(t, MESH, [mw.Shard(0)])), 2):
        assert found == want


def test_one_rank_alone_may_read_requires_grad_of_a_view() -> None:
    def program() -> bool | None:
        x, w = (mw.shard_tensor(torch.ones(4, 3), MESH, [mw.Shard(0)]) for _ in range(2))
        row = x[1]
        x.copy_(w.requires_grad_())
        return row.requires_grad if current_communicator().rank == 0 else None

    assert mw.simulate(program, 2) == [True, None]


@pytest.mark.parametrize("write", ["nothing", "copy", "requires_grad_"])
def test_a_view_made_without_grad_requires_grad_as_its_base_does(write: str) -> None:
    def answers(mark: Callable[[Tensor], Tensor]) -> list[bool]:
        x, w = mark(torch.zeros(4, 3)), mark(torch.ones(4, 3)).requires_grad_()
        outer = x[1:]
        with torch.no_grad():
            views = [x[1], outer[1], x[2:][1], x[1:, 1:], x[1].detach()]
        WRITES[write](x, w)
        return [v.requires_grad for v in views]

    want = answers(torch.Tensor.clone)
    assert mw.simulate(lambda: answers(lambda t: mw.shard_tensor(t, MESH, [mw.Shard(0)])), 2) == [want, want]
