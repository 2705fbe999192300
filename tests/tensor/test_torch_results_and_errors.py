"""Results and errors of torch that depend on a history, a mode or the other operand: the same as on one device."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw

Lay = Callable[[Tensor], Tensor]
PLACEMENTS = [mw.Shard(0), mw.Shard(1), mw.Partial(), mw.Replicate()]


def matrix(lay: Lay, grad: bool = False) -> Tensor:
    return lay(torch.arange(1.0, 17.0).view(4, 4).clone()).requires_grad_(grad)


def outcome(run: Callable[[], Any]) -> Any:
    """Return the result as numbers, or the kind of error that one device raises."""
    try:
        found = run()
    except (RuntimeError, NotImplementedError):
        return "RuntimeError"
    except (TypeError, ValueError, IndexError) as error:
        return type(error).__name__
    return found.tolist() if isinstance(found, Tensor) else found


def check(run: Callable[[Lay], Any], placements: Any = PLACEMENTS) -> None:
    wanted, mesh = run(lambda t: t), mw.ProcessMesh([0, 1], ["a"])
    for placement in placements:
        found = mw.simulate(lambda p=placement: run(lambda t: mw.shard_tensor(t, mesh, [p])), 2)
        assert found == [wanted] * 2, placement


OPERATORS = [
    "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_",
    "or_", "xor", "lshift", "rshift", "contains",
]  # fmt: skip
OTHERS: list[Any] = [None, "a", [1], [None], (), {}, Ellipsis, slice(1), print, 1.5]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_with_another_kind_of_operand(name: str) -> None:
    """torch returns NotImplemented for `x == None`, and Python then compares the objects."""

    def run(lay: Lay) -> Any:
        x, call = matrix(lay), getattr(operator, name)
        return [(outcome(lambda o=o: call(x, o)), outcome(lambda o=o: call(o, x))) for o in OTHERS]

    check(run, PLACEMENTS[:1])


def test_a_tensor_that_is_no_leaf_has_no_deep_copy() -> None:
    def run(lay: Lay) -> Any:
        x = matrix(lay, grad=True)
        with torch.no_grad():
            view = x[::2]
        tensors = (x * 2, x[:2], x[:, 1], x, x.detach()[1:])
        return [outcome(lambda t=t: copy.deepcopy(t)) for t in tensors], copy.deepcopy(view.detach()).tolist()

    check(run)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "b[:2]": lambda b: b[:2],
    "b[:, 1]": lambda b: b[:, 1],
    "b[:, 1:][::2]": lambda b: b[:, 1:][::2],
    "b.t()[1]": lambda b: b.t()[1],
    "b.view(-1)": lambda b: b.view(-1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_view_that_requires_grad_does_not(view: str) -> None:
    def run(lay: Lay) -> Any:
        v = VIEWS[view](matrix(lay))
        u, later = v[::2], v[:1]
        v.requires_grad_()
        return u.requires_grad, (u * 3).requires_grad, v.requires_grad, later.requires_grad, v.is_leaf

    check(run)


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_written_base_is_no_leaf(view: str) -> None:
    """`v.requires_grad_()` and `v.retain_grad()` act on the history that the write gave the view."""

    def run(lay: Lay) -> Any:
        x, found = matrix(lay, grad=True), list[Any]()
        for change in (lambda t: t.requires_grad_(), lambda t: t.retain_grad()):
            b = torch.zeros_like(x)
            v = VIEWS[view](b)
            b.copy_(x)
            change(v)
            assert v.requires_grad
            found += [v.is_leaf, outcome(lambda v=v: v.requires_grad_(False)), outcome(lambda v=v: freed(v))]
        v = VIEWS[view](b)
        b.copy_(x)
        v.retain_grad()
        (v * v).sum().backward()
        assert v.grad is not None
        assert x.grad is not None
        return found, v.grad.tolist(), x.grad.tolist()

    check(run, PLACEMENTS[:2])


def freed(v: Tensor) -> None:
    v.requires_grad = False


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_made_without_gradients_is_written_without_gradients(view: str) -> None:
    def run(lay: Lay) -> Any:
        found: list[Any] = []
        for grad in (False, True):
            z, other = matrix(lay, grad) * 1, matrix(lay, grad=True).sum()
            with torch.no_grad():
                v, w = VIEWS[view](z), VIEWS[view](z)
            found += [outcome(lambda v=v: v.mul_(2)), outcome(lambda v=v, other=other: v.mul_(other))]
            with torch.no_grad():
                w.mul_(2)
            found.append(z.tolist())
        return found

    check(run)


def test_setting_a_tensor_to_its_own_memory_is_no_write() -> None:
    """The ranks agreed on no write: their counters of the same memory began at different numbers."""

    def run(lay: Lay) -> Any:
        x = matrix(lay)
        v = x.view_as(x)
        v.data = v.data
        v.add_(1)
        w = x[::2]
        w.data = w.data
        x.add_(1)
        return v.tolist(), x.tolist(), w.tolist()

    check(run)


INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "x": lambda x: x.view(torch.int64),
    "rows": lambda x: x[::2].view(torch.int64),
    "a column of rows": lambda x: x[::2].view(torch.int64)[:, 1],
    "numbers of integers": lambda x: x[1:].view(torch.int64)[::2].view(torch.float64),
}


@pytest.mark.parametrize("view", INTEGERS)
def test_a_leaf_is_written_through_integers(view: str) -> None:
    """Autograd does not record a view as another dtype, so the leaf may require grad."""

    def run(lay: Lay) -> Any:
        x = lay(torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4).clone()).requires_grad_()
        bits = INTEGERS[view](x)
        bits.zero_()
        y = (x * x).sum()
        y.backward()
        assert x.grad is not None
        return x.tolist(), bits.requires_grad, x.grad.tolist(), x._version

    check(run, [mw.Shard(0), mw.Replicate()])
