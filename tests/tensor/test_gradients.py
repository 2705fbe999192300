"""Gradients of leaves: in every layout, and accumulated over several backward passes, they are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.tensor import OperationError, local_parts

MESH = mw.ProcessMesh(range(2), ["x"])
PROGRAMS = [
    lambda x: (x * 2).sum(),
    lambda x: x.sum() * 3,
    lambda x: (x * x).sum(),
    lambda x: x.exp().sum(),
    lambda x: (x * torch.arange(3.0)).sum(),
    lambda x: x.amax(),
]


def _leaf(value: Tensor, placement: Any) -> Tensor:
    return mw.shard_tensor(value, MESH, [placement]).detach().requires_grad_()


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("value", [torch.ones(3), torch.tensor([-1.0, 0.5, 2.0])], ids=["equal", "different"])
def test_the_gradient_of_a_pending_leaf_is_that_of_one_device(op: Any, value: Tensor) -> None:
    def gradients() -> list[Any]:
        found: list[Any] = []
        for program in PROGRAMS:
            x, y = _leaf(value, mw.Partial(op)), _leaf(value, mw.Partial(op))
            program(x).backward()
            assert x.grad is not None
            found += [x.grad.tolist(), torch.autograd.grad(program(y), y)[0].tolist()]
        return found

    wanted: list[Any] = []
    for program in PROGRAMS:
        x = value.clone().requires_grad_()
        program(x).backward()
        assert x.grad is not None
        wanted += [x.grad.tolist()] * 2
    assert mw.simulate(gradients, 2) == [wanted] * 2


def test_the_gradient_of_a_pending_product_is_refused() -> None:
    def program() -> None:
        x = _leaf(torch.ones(3), mw.Partial("prod"))
        (x * 2).sum().backward()
        assert x.grad is not None

    with pytest.raises(OperationError, match=r"pending product"):
        mw.simulate(program, 2)


def test_a_second_backward_pass_adds_to_the_gradient_that_the_program_holds() -> None:
    """The gradient is a sum over ranks, which is reduced late; a tensor that was read before gets it all the same."""

    def program() -> tuple[Any, ...]:
        w = mw.shard_tensor(torch.ones(4), MESH, [mw.Replicate()]).requires_grad_()
        x = mw.shard_tensor(torch.ones(2, 4), MESH, [mw.Shard(0)])
        (w * x).sum().backward()
        held = w.grad
        assert held is not None
        part = held[:2]
        (w * x).sum().backward()
        return held.tolist(), part.tolist(), w.grad is held

    assert mw.simulate(program, 2) == [([4.0] * 4, [4.0] * 2, True)] * 2


def test_a_gradient_in_another_memory_order_is_converted_once() -> None:
    """A write to it is not lost."""

    def on_rank() -> Tensor:
        x = mw.shard_tensor(torch.ones(4, 6), mw.ProcessMesh([0, 1], ["a"]), [mw.Shard(0)]).requires_grad_()
        with local_parts():
            x.grad = torch.ones(6, 2).t()
        assert x.grad is not None
        x.grad.mul_(3)
        return mw.unshard_dtensor(x.grad)

    for found in mw.simulate(on_rank, 2):
        torch.testing.assert_close(found, torch.full((4, 6), 3.0))


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_a_joined_extremum_may_be_written_to(op: Any) -> None:
    def gradient() -> list[float]:
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        y = mw.reshard(mw.dtensor_from_local(x, MESH, [mw.Partial(op)]), MESH, [mw.Replicate()])
        y.mul_(3).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    terms = torch.tensor([1.0, 2.0, 3.0]).repeat(2, 1).requires_grad_()
    joined = terms.prod(0) if op == "prod" else getattr(terms, f"a{op}")(0)
    (joined * 3).sum().backward()
    assert terms.grad is not None
    assert mw.simulate(gradient, 2) == terms.grad.tolist()
