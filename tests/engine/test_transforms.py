"""`torch.func` on distributed tensors: the results of one device, with all kinds of inputs and captured tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import meshwright as mw
from meshwright.graph import CaptureError
from meshwright.tensor import OperationError

from .oracle import STYLES, Lay, Style, check
from .static_oracle import Base, laid, numbers

Fn = Callable[[nn.Module, Tensor], Any]


def per_sample(net: nn.Module, x: Tensor) -> Any:
    def loss(state: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(net, state, (row,)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(dict(net.named_parameters()), x)
    return sum(g.square().sum() for g in found.values())


def pulled_back(net: nn.Module, x: Tensor) -> Any:
    out, pull = vjp(lambda z: net(z).tanh(), x)
    return out.sum() + pull(net(x) * 2)[0].square().sum()


def after_assigned_gradients(net: nn.Module, x: Tensor) -> Any:
    """Use gradients per sample again after `p.grad = g`: on some meshes, `p.grad` is then a view of `g`."""
    state = {name: p.detach() for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        loss = vmap(grad(lambda state, row: functional_call(net, state, (row,)).square().sum()), (None, 0))
        p.grad = loss(state, x.detach())[name].mean(0)
        p.grad.mul_(2)
    return net(x).square().sum() + sum((p * p.grad).sum() for p in net.parameters())


def of_shared_memory(net: nn.Module, x: Tensor) -> Any:
    """Use a parameter in a transform after a write to the tensor whose memory it shares."""
    base = x.detach()[0, :4].clone()
    net.bias.data = base
    base.add_(1)
    return vmap(grad(lambda row: net(row).square().sum()))(x.detach()).sum() + net(x).square().sum()


PROGRAMS: dict[str, Fn] = {
    "vmap": lambda net, x: vmap(lambda row: net(row).tanh().sum())(x).square().sum() + net(x).sum(),
    "vmap of what is used beside": lambda net, x: vmap(lambda row: x)(x).square().sum(),
    "grad": lambda net, x: vmap(grad(lambda row: net(row).tanh().sum()))(x).square().sum(),
    "jacrev": lambda net, x: vmap(jacrev(lambda row: net(row).tanh()))(x).square().sum() * net(x).mean(),
    "per sample": per_sample,
    "after assigned gradients": after_assigned_gradients,
    "of shared memory": of_shared_memory,
    "vjp": pulled_back,
    "beside parts": lambda net, x: (vmap(lambda row: net(row).tanh())(x) * net(x)).square().mean(),
}


def program(fn: Fn) -> Callable[[Lay], Any]:
    def run(lay: Lay) -> Any:
        net, x = lay.module(nn.Linear(6, 4)), lay(torch.randn(5, 6), grad=True)
        fn(net, x).backward()
        return fn(net, x), x.grad, [p.grad for p in net.parameters()]

    return run


@pytest.mark.filterwarnings("ignore:torch.func runs on whole tensors")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_transforms(name: str, style: str) -> None:
    check(program(PROGRAMS[name]), STYLES[style], rtol=1e-5, atol=1e-5)


FORWARD = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
"""Torch's own decompositions for forward mode."""


@FORWARD
@pytest.mark.parametrize("make", [jacfwd, hessian])
def test_forward_mode_of_replicated_tensors(make: Any) -> None:
    def run(lay: Lay) -> Any:
        net = lay.module(nn.Linear(6, 4))
        return make(lambda x: net(x).tanh().sum())(torch.randn(6))

    check(run, Style((1,), (mw.Shard(0),)), rtol=1e-5, atol=1e-5)


@FORWARD
def test_forward_mode_of_distributed_arguments() -> None:
    check(lambda lay: jvp(torch.sin, (lay(torch.ones(4, 4)),), (lay(torch.ones(4, 4)),)), STYLES["rows"])


@FORWARD
@pytest.mark.parametrize("style", STYLES)
def test_forward_mode_of_captured_tensors(style: str) -> None:
    def run(lay: Lay) -> Any:
        w = lay(torch.randn(4, 4))
        return jvp(lambda x: w @ x, (torch.randn(4),), (torch.randn(4),))

    check(run, STYLES[style], rtol=1e-5, atol=1e-5)


def test_ranks_may_leave_forward_mode_at_different_times() -> None:
    mesh = mw.ProcessMesh([0, 1], ["x"])

    def run() -> Tensor:
        x, tangents = mw.shard_tensor(torch.ones(4), mesh, [mw.Shard(0)]), []
        for factor in (2.0, 3.0):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, torch.full((4,), factor))
                total = mw.reshard(dual, mesh, [])
                tangents.append(mw.unshard_dtensor(forward_ad.unpack_dual(total).tangent).clone())
            assert forward_ad._current_level == -1
        return torch.stack(tangents)

    for found in mw.simulate(run, 2):
        assert found.tolist() == [[2.0] * 4, [3.0] * 4]


def test_a_level_of_forward_mode_without_communication_may_precede_one_with_it() -> None:
    def run() -> tuple[Tensor, Tensor]:
        x = mw.shard_tensor(torch.ones(5, 4), mw.ProcessMesh([0, 1, 2], ["x"]), [mw.Shard(0)])
        alone = jacfwd(torch.sin)(torch.ones(3))
        return alone, jacfwd(lambda w: (x @ w).sum())(torch.ones(4, 3))

    for alone, found in mw.simulate(run, 3):
        assert torch.equal(alone, torch.ones(3).cos().diag())
        assert torch.equal(found, torch.full((4, 3), 5.0))


def test_an_error_inside_forward_mode_is_raised_unchanged() -> None:
    mesh = mw.ProcessMesh([0, 1], ["x"])

    def run() -> None:
        with forward_ad.dual_level():
            mw.unshard_dtensor(mw.shard_tensor(torch.ones(4), mesh, [mw.Shard(0)]))
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        mw.simulate(run, 2)
    with forward_ad.dual_level():  # possible, because the simulation closed its level
        pass


def test_writes_that_a_transform_would_lose_are_refused() -> None:
    def run() -> None:
        seen = mw.shard_tensor(torch.ones(4, 4), STYLES["rows"].mesh, [mw.Shard(0)])
        vmap(lambda x: seen.add_(1).sum() + x)(torch.ones(4))

    with pytest.raises(OperationError, match="a write to the copy is lost"):
        mw.simulate(run, 4)


class Transformed(Base):
    def between(self, x: Tensor) -> Tensor:
        return vmap(grad(lambda row: self.b(row.tanh()).square().sum()))(x)


def test_transforms_in_programs_are_refused() -> None:
    def run() -> None:
        mw.to_static(laid(Transformed(), STYLES["rows"]))(*numbers(0))

    with pytest.raises(CaptureError, match=r"torch\.func"):
        mw.simulate(run, 4)


@pytest.mark.filterwarnings("ignore:torch.func runs on whole tensors")
@pytest.mark.parametrize("name", ["vmap", "grad", "jacrev", "per sample", "beside parts"])
def test_parameters_gathered_inside_a_transform(name: str) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))

    def gradients(laid: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net, mesh, batch = nn.Linear(6, 4), mw.ProcessMesh([0, 1], ["dp"]), x
        if laid:
            mw.shard_layer(net, mesh)
            mw.shard_optimizer(torch.optim.SGD(net.parameters()), mw.ShardingStage3("dp", net, least=1))
            batch = mw.shard_tensor(x, mesh, [mw.Shard(0)])
        PROGRAMS[name](net, batch).backward()
        return [mw.unshard_dtensor(p.grad) for p in net.parameters()]

    for found in mw.simulate(lambda: gradients(True), 2):
        torch.testing.assert_close(found, gradients(False))
