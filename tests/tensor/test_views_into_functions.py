"""A view with memory of its own is updated before autograd gets it, and a function's writes to it are kept."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.tensor.conversion import saved_operands

Lay = Callable[[Tensor], Tensor]


class Square(torch.autograd.Function):
    """A function that saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 3 * grads[0] * ctx.saved_tensors[0]


class Same(torch.autograd.Function):
    """A function that returns a view of its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class Doubled(torch.autograd.Function):
    """A function that writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


def hooked(x: Tensor) -> Tensor:
    net = nn.Identity()
    net.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 3,))
    return net(x)


USERS: dict[str, Callable[[Tensor], Any]] = {
    "an operator": torch.sin,
    "a function that saves": Square.apply,
    "a function that returns a view": Same.apply,
    "a function that writes": Doubled.apply,
    "a hook on a module": hooked,
    "a reentrant checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    "a checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "b[::2]": lambda b: b[::2],
    "b[1]": lambda b: b[1],
    "b[:2][:, 1]": lambda b: b[:2][:, 1],
    "b.t()": lambda b: b.t(),
}
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a column": lambda b, x: b[:, 1].zero_(),
    "a product": lambda b, x: b.mul_(3),
    "all": lambda b, x: b.copy_(x * x),
    "none": lambda b, x: None,
}


def after_a_write(lay: Lay, use: Callable[[Tensor], Any], view: str, write: str) -> Any:
    x = lay(torch.arange(1.0, 9.0).view(4, 2)).requires_grad_()
    b = torch.zeros_like(x) if write == "all" else x * 1
    v = VIEWS[view](b)
    WRITES[write](b, x)
    y = use(v)
    (y.sum() + (b * b).sum()).backward()
    assert x.grad is not None
    return y.requires_grad, y.tolist(), b.tolist(), x.grad.tolist()


def on_two_ranks(run: Callable[[Lay], Any]) -> list[Any]:
    mesh = mw.ProcessMesh([0, 1], ["a"])
    return mw.simulate(lambda: run(lambda t: mw.shard_tensor(t, mesh, [mw.Shard(0)])), 2)


@pytest.mark.parametrize("user", USERS)
def test_a_write_to_the_base_reaches_the_view(user: str) -> None:
    def run(lay: Lay) -> dict[str, Any]:
        return {f"{v}, {w}": after_a_write(lay, USERS[user], v, w) for v, w in product(VIEWS, WRITES)}

    wanted = run(lambda t: t)
    for found in on_two_ranks(run):
        assert {name: value for name, value in found.items() if value != wanted[name]} == {}


def after_saving(lay: Lay, first: str, use: Callable[[Tensor], Any], data: bool) -> Any:
    """Return the gradient of the tensor that `use` saved of a view, or the error, after another write to the base."""
    x = lay(torch.arange(1.0, 9.0).view(4, 2)).requires_grad_()
    b = x * 1
    v = b[::2]
    if first == "base":
        b.mul_(2)
    elif first == "view":
        v.mul_(2)
    y = use(v)
    with torch.no_grad():
        (b.data if data else b).mul_(2)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return None if x.grad is None else x.grad.tolist()


@pytest.mark.parametrize("data", [False, True], ids=["b.mul_", "b.data.mul_"])
def test_a_write_after_a_view_was_saved_is_detected(data: bool) -> None:
    """The view may have been updated, or written to, before autograd saved it."""

    def run(lay: Lay) -> dict[str, Any]:
        users: list[Callable[[Tensor], Any]] = [Square.apply, torch.square]
        return {f"{f}, {u}": after_saving(lay, f, users[u], data) for f in ("", "base", "view") for u in (0, 1)}

    wanted = run(lambda t: t)
    assert on_two_ranks(run) == [wanted] * 2


def test_a_view_that_is_updated_in_each_step_is_recorded_once() -> None:
    def run() -> int:
        b = mw.shard_tensor(torch.ones(4, 2), mw.ProcessMesh([0, 1], ["a"]), [mw.Shard(0)])
        v = b[::2]
        notes = []
        for _ in range(3):
            b.mul_(2)
            v.sum()
            notes.append(len(saved_operands._state.notes))
        return notes[-1] - notes[0]

    assert mw.simulate(run, 2) == [0, 0]


@pytest.mark.parametrize("first", [False, True], ids=["as made", "read again"])
def test_a_saved_view_with_new_memory_keeps_it(first: bool) -> None:
    def run(lay: Lay) -> Any:
        x, b = lay(torch.arange(8.0).view(4, 2)).requires_grad_(), lay(torch.ones(4, 2))
        v = b[::2]
        if first:
            b.mul_(2)
            v.sum()
        y = (x[::2] * v).sum()
        v.data = lay(torch.full((2, 2), 7.0))
        b.data.mul_(5)
        y.backward()
        assert x.grad is not None
        return v.tolist(), x.grad.tolist(), b.tolist()

    assert on_two_ranks(run) == [run(lambda t: t)] * 2
