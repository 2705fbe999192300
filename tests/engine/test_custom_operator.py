"""A user-defined operator gets a rule in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.tensor import RAN_WHOLE

from .oracle import STYLES, Lay, check


@torch.library.custom_op("meshwright_own::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    s = gate.sigmoid()
    return grad * up * s * (1 + gate * (1 - s)), grad * gate * s


swiglu.register_autograd(_gradient, setup_context=_saved)


@torch.library.custom_op("meshwright_own::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Cube(torch.autograd.Function):
    """A function with its own backward pass, in the kernel of an operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grads[0]


LIBRARY = torch.library.Library("meshwright_own", "FRAGMENT")
LIBRARY.define("cube(Tensor x) -> Tensor")


def _cube(x: Tensor) -> Tensor:
    found: Any = Cube.apply(x + 0)
    return found


LIBRARY.impl("cube", _cube, "CompositeImplicitAutograd")


class Cubes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.meshwright_own.cube(x * self.gain).sum()


def test_a_function_inside_an_operator_is_part_of_its_node() -> None:
    """In a program too: the tensors between the operator and the function are unknown there."""
    x = torch.arange(3.0)

    def go() -> tuple[float, Tensor]:
        net = Cubes()
        step = mw.to_static(net, None, None, torch.optim.SGD(net.parameters(), lr=0.1))
        return step(x).item(), net.gain.detach()

    ((loss, gain),) = mw.simulate(go, 1)
    assert loss == 9
    torch.testing.assert_close(gain, 1 - 0.1 * 3 * x**3)


@pytest.fixture
def ruled() -> Iterator[None]:
    from meshwright.spmd.rules.rule_table import RULES

    mw.register_rule("meshwright_own.swiglu", "..., ... -> ...")
    yield
    del RULES["meshwright_own.swiglu"]


def with_gradients(lay: Lay) -> Any:
    gate, up = lay(torch.randn(5, 6), grad=True), lay(torch.randn(5, 6), grad=True)
    out = swiglu(gate, up)
    out.square().mean().backward()
    return out, gate.grad, up.grad


@pytest.mark.usefixtures("ruled")
@pytest.mark.parametrize("style", STYLES)
def test_a_sharded_run_equals_one_device(style: str) -> None:
    check(with_gradients, STYLES[style])


@pytest.mark.usefixtures("ruled")
def test_the_rule_keeps_shards_without_communication() -> None:
    def go() -> Any:
        lay = mw.shard_tensor(torch.ones(4, 6), mw.ProcessMesh([0, 1], ["x"]), [mw.Shard(0)])
        return mw.explain(lambda: swiglu(lay, lay))

    assert [(str(e.result.spec), e.received) for e in mw.simulate(go, 2)] == [("f32[4@x, 6]", 0)] * 2


@pytest.mark.parametrize("style", STYLES)
def test_without_a_rule_it_runs_whole_and_the_warning_names_it(style: str) -> None:
    RAN_WHOLE.pop("twice", None)
    check(lambda lay: twice(lay(torch.randn(5, 6))), STYLES[style])
    assert [name for name in RAN_WHOLE if "twice" in name]


def of_the_first_rank(call: Any, x: Tensor, *_: Any) -> Tensor:
    """Return the form that reads the rank in Python."""
    return x * (3 if call.index(0, 0) == 0 else 2)


def of_each_rank(call: Any, x: Tensor, *_: Any) -> Tensor:
    """Return the form that reads the rank from a tensor."""
    return x * torch.where(torch.arange(1) - call.index(0, 0) == 0, 3, 2)


def test_a_rule_applies_from_the_next_call_on() -> None:
    from meshwright.spmd.rules.rule_table import RULES

    def spec() -> str:
        x = mw.shard_tensor(torch.ones(4), mw.ProcessMesh([0, 1], ["x"]), [mw.Shard(0)])
        return str(twice(x).spec)

    assert mw.simulate(spec, 2) == ["f32[4]"] * 2
    mw.register_rule("meshwright_own.twice", "... -> ...")
    try:
        assert mw.simulate(spec, 2) == ["f32[4@x]"] * 2
    finally:
        del RULES["meshwright_own.twice"]


@pytest.mark.parametrize("form", [of_the_first_rank, of_each_rank], ids=lambda form: form.__name__)
def test_a_program_takes_the_same_branch_on_all_ranks(form: Any) -> None:
    from meshwright.graph import CaptureError
    from meshwright.spmd import Rule
    from meshwright.spmd.rules.rule_table import RULES

    class Twice(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return twice(x)

    def go() -> Any:
        x = mw.shard_tensor(torch.ones(4), mw.ProcessMesh([0, 1], ["x"]), [mw.Shard(0)])
        if form is of_each_rank:
            return mw.to_static(Twice())(x).tolist()
        with pytest.raises(CaptureError, match="false on rank"):
            mw.to_static(Twice())(x)
        return None

    mw.register_rule("meshwright_own.twice", Rule("n -> n", forms={"n": form}))
    try:
        assert mw.simulate(go, 2) == [[3.0, 3.0, 2.0, 2.0] if form is of_each_rank else None] * 2
    finally:
        del RULES["meshwright_own.twice"]
