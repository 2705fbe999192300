"""User-defined autograd functions get whole tensors, forward and backward, also if saved-tensor hooks are active."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.tensor.autograd import torch_hooks
from tests.engine.oracle import STYLES, check


class Product(torch.autograd.Function):
    """A user-defined function that saves its arguments; its gradients differ from those of its operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] @ w.t(), 2 * x.t() @ grads[0], None


class Sums(torch.autograd.Function):
    """A user-defined function of two results, with a setup of its own."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cumsum(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x.cos() + 3 * grads[1].flip(0).cumsum(0).flip(0)


def of_own_functions(lay: Any) -> Any:
    g = torch.Generator().manual_seed(0)
    x, w = lay(torch.randn(5, 6, generator=g), grad=True), lay(torch.randn(6, 4, generator=g), grad=True)
    y, z = Sums.apply(Product.apply(x.sin(), w, 3.0))
    (y * z.tanh()).mean().backward()
    return y, z, x.grad, w.grad


@pytest.mark.parametrize("style", STYLES)
def test_a_user_defined_function_has_the_gradients_of_one_device(style: str) -> None:
    check(of_own_functions, STYLES[style])


class Exp(torch.autograd.Function):
    """A user-defined function that saves only its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y, None)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, _ = ctx.saved_tensors
        return grads[0] * y


class Turns(torch.autograd.Function):
    """A user-defined function that returns its argument; the gradient has the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


class TurnsInTwo(Turns):
    """The same in two steps, with another result."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x, x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[1] - grads[0]


class Doubles(torch.autograd.Function):
    """A user-defined function that writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.mul_(2))
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


def saved_by_hooks(fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return fn(x, w)


def saved_elsewhere(fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    with save_on_cpu():
        return fn(x, w)


def checkpointed(fn: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(fn, x, w, use_reentrant=False)


@pytest.mark.parametrize("watched", [saved_by_hooks, saved_elsewhere, checkpointed])
@pytest.mark.parametrize("style", STYLES)
def test_saved_tensor_hooks_work_with_user_defined_functions(style: str, watched: Any) -> None:
    def go(lay: Any) -> Any:
        g = torch.Generator().manual_seed(0)
        x, w = lay(torch.randn(5, 6, generator=g), grad=True), lay(torch.randn(6, 4, generator=g), grad=True)
        y = watched(lambda x, w: Sums.apply(Exp.apply(Product.apply(x.sin(), w, 0.3)))[0], x, w)
        y.square().mean().backward()
        return y, x.grad, w.grad

    check(go, STYLES[style])


@pytest.mark.parametrize("style", STYLES)
def test_a_user_defined_function_may_return_an_argument(style: str) -> None:
    def go(lay: Any) -> Any:
        x = lay(torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), grad=True)
        y = TurnsInTwo.apply(Turns.apply(x.sin()))
        z = Doubles.apply(y[0] * 1) * y[1]
        z.mean().backward()
        return y, z, x.grad

    check(go, STYLES[style])


class SavesParts(torch.autograd.Function):
    """A user-defined function that saves a plain tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.to_local())
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 2 * x


class GivesPlain(SavesParts):
    """A user-defined function whose gradient is a plain tensor."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.ones(grads[0].shape)


@pytest.mark.parametrize("function", [SavesParts, GivesPlain])
@pytest.mark.parametrize("style", STYLES)
def test_a_plain_tensor_in_a_user_defined_backward_pass_is_refused(style: str, function: Any) -> None:
    from meshwright.tensor import PlainInBackwardError
    from tests.engine.oracle import LayOut

    def go() -> None:
        x = LayOut(STYLES[style])(torch.randn(5, 6), grad=True)
        function.apply(x).sum().backward()

    with pytest.raises(PlainInBackwardError, match="local_map"):
        mw.simulate(go, STYLES[style].ranks)


def zero_a_slice(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[1:3] = 0
    return grad


def write_numbers_by_mask_and_list(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[grad > 1] = 0.5
    grad[[0, 3]] = 2
    grad[:, [[1]]] *= 3
    return grad


@pytest.mark.parametrize("hook", [zero_a_slice, write_numbers_by_mask_and_list, lambda grad: grad[[4, 3, 2, 1, 0]]])
@pytest.mark.parametrize("style", STYLES)
def test_numbers_and_lists_in_a_hook_are_whole(style: str, hook: Any) -> None:
    from tests.engine.oracle import LayOut

    def gradient(x: Tensor) -> Any:
        y = x * 2
        y.register_hook(hook)
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    x = torch.arange(-1.5, 1.5, 0.1).view(5, 6)
    wanted = gradient(x.clone().requires_grad_())
    for found in mw.simulate(lambda: gradient(LayOut(STYLES[style])(x, grad=True)), STYLES[style].ranks):
        assert found == wanted


class SavesArguments(torch.autograd.Function):
    """A user-defined function of any tensors, whose backward pass reads its saved arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, scale)
        return x @ w * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, w, scale), g = ctx.saved_tensors, grads[0]
        return g @ w.T * scale, x.T @ g * scale, (g * (x @ w)).sum()


@pytest.mark.parametrize("plain", [(0,), (1,), (2,), (0, 2), (1, 2)])
@pytest.mark.parametrize("style", STYLES)
def test_a_saved_plain_argument_is_whole_in_the_backward_pass(style: str, plain: tuple[int, ...]) -> None:
    from tests.engine.oracle import LayOut

    def gradients(lay: Any) -> list[Tensor]:
        torch.manual_seed(0)
        values = [torch.randn(5, 4), torch.randn(4, 3), torch.tensor(0.5)]
        given = [v.requires_grad_() if k in plain else lay(v, grad=True) for k, v in enumerate(values)]
        y = SavesArguments.apply(*given)
        assert isinstance(y, Tensor)
        (first,) = torch.autograd.grad(y.square().sum(), given[0], create_graph=True)
        (y.sum() + first.square().sum()).backward()
        return [mw.unshard_dtensor(x.grad) if isinstance(x.grad, mw.DistTensor) else x.grad for x in given]

    def plainly(value: Tensor, grad: bool) -> Tensor:
        return value.requires_grad_(grad)

    for found in mw.simulate(lambda: gradients(LayOut(STYLES[style])), STYLES[style].ranks):
        torch.testing.assert_close(found, gradients(plainly))


class Sorted(torch.autograd.Function):
    """A user-defined function that is called in the backward pass of another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.gather(-1, order.expand(x.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (order,) = ctx.saved_tensors
        return grads[0].gather(-1, order.argsort(-1).expand(grads[0].shape)), None


class Reversible(torch.autograd.Function):
    """A layer that computes its input again in the backward pass, with tables that are computed there."""

    @staticmethod
    def _layer(x: Tensor, w: Tensor) -> Tensor:
        order = torch.arange(x.shape[-1] - 1, -1, -1).unsqueeze(0)
        scale = (order % 3).float() + 1
        return Sorted.apply(torch.tanh(x @ w) * scale, order)  # pyright: ignore[reportReturnType]

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        out = x + Reversible._layer(x[:1].expand_as(x), w)
        ctx.save_for_backward(out.detach(), x[:1].detach(), w)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        out, first, w = ctx.saved_tensors
        with torch.enable_grad():
            first, w = first.detach().requires_grad_(), w.detach().requires_grad_()
            again = Reversible._layer(first.expand_as(out), w)
            again.backward(grads[0])
        with torch.no_grad():
            ones = torch.ones(out.shape[-1]) + torch.arange(out.shape[-1]) * 0
            late = torch.cat([first.grad, torch.zeros_like(out[1:])])
            return grads[0] * ones + late, w.grad


@pytest.mark.parametrize("style", STYLES)
def test_a_backward_pass_may_make_plain_tensors(style: str) -> None:
    def go(lay: Any) -> Any:
        x, w = lay(torch.randn(5, 6), grad=True), lay(torch.randn(6, 6), grad=True)
        y = Reversible.apply(Reversible.apply(x, w), w)
        assert isinstance(y, Tensor)
        y.square().mean().backward()
        return y, x.grad, w.grad

    check(go, STYLES[style])


class SavesMade(torch.autograd.Function):
    """A user-defined function that saves plain tensors that it made: one with the values of a distributed tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        largest = torch.full((x.shape[0],), -9.0)
        largest.copy_(x.amax(-1))
        ctx.save_for_backward(x, largest)
        ctx.scale = torch.arange(x.shape[1]).float()
        return (x * largest[:, None] * ctx.scale).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, largest = ctx.saved_tensors
        is_first = torch.arange(x.shape[1]) == 0
        return grads[0][:, None] * largest[:, None] * ctx.scale * (is_first.float() + 1)


class WritesToBuffers(torch.autograd.Function):
    """A user-defined function whose result and gradients are plain tensors that it made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], w.shape[1])
        torch.mm(x, w, out=out)
        ctx.save_for_backward(x, w)
        return out.tanh()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        slope = torch.empty(x.shape[0], w.shape[1])
        slope.copy_(grads[0] * (1 - (x @ w).tanh().square()))
        return torch.mm(slope, w.t(), out=torch.empty(x.shape)), torch.zeros(w.shape).addmm_(x.t(), slope)


@pytest.mark.parametrize("style", STYLES)
def test_plain_tensors_that_a_function_made_are_whole(style: str) -> None:
    def go(lay: Any) -> Any:
        x = lay(torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), grad=True)
        w = lay(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)), grad=True)
        y = SavesMade.apply(WritesToBuffers.apply(x.sin(), w) * 2)
        assert isinstance(y, Tensor)
        (SavesMade.apply(x) * y).sum().backward()
        return mw.shard_tensor(y, x.mesh, [mw.Replicate()] * x.mesh.ndim) if hasattr(x, "mesh") else y, x.grad, w.grad

    check(go, STYLES[style])


NAMED_BEFORE = """
import torch

class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), 3 * x.t() @ g

triple = Triple.apply
in_c = not hasattr(triple, "__func__")

import meshwright as mw

def trained(how):
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 6)
    net.forward = lambda x: triple(x, net.weight).tanh().square().mean()
    x = torch.randn(5, 6)
    if how != "one device":
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        mw.shard_layer(net, mesh)
        x = mw.shard_tensor(x, mesh, [mw.Shard(0)])
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    if how == "static":
        mw.to_static(net, None, None, optimizer)(x)
    else:
        net(x).backward()
        optimizer.step()
    return mw.unshard_dtensor(net.weight.detach())

wanted = trained("one device")
for how in ("eager", "static"):
    try:
        found = mw.simulate(lambda: trained(how), 2)
    except mw.MeshwrightError:
        assert in_c
    else:
        assert not in_c
        torch.testing.assert_close(found, [wanted] * 2)
compiled = torch.compile(triple, backend="eager", fullgraph=True)
x, w = torch.ones(2, 6), torch.ones(6, 4, requires_grad=True)
compiled(x, w).sum().backward()
assert w.grad.eq(6).all()
"""


def test_a_user_defined_function_may_exist_before_the_import_of_the_library() -> None:
    """If torch has `apply` in C, no calls through that name are reported: they are refused."""
    subprocess.run([sys.executable, "-c", NAMED_BEFORE], check=True, timeout=300)


def test_a_forward_function_reports_unreported_calls() -> None:
    """If torch has `apply` in C, `F.apply` itself reports them, and an earlier name does not."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    told: list[Any] = []
    forward = torch_hooks._forward_of(Doubled, Doubled.forward, told.append).__func__
    assert forward(None, torch.ones(2)).tolist() == [2.0, 2.0]
    assert told == [Doubled]
    torch_hooks._apply_reported(staticmethod(forward), Doubled)(None, torch.ones(2))
    assert told == [Doubled]


class Checkpointed(torch.autograd.Function):
    """A hand-written checkpoint: the backward pass runs the forward pass again."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], x: Tensor, w: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x, w)
        with torch.no_grad():
            return run(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = ctx.run(x, w)
        return None, *torch.autograd.grad(y, [x, w], grads[0])


PLACEMENTS = [mw.Shard(0), mw.Shard(1), mw.Replicate(), mw.Partial()]


@pytest.mark.parametrize("of_w", PLACEMENTS, ids=str)
@pytest.mark.parametrize("of_x", PLACEMENTS, ids=str)
def test_a_backward_pass_may_compute_gradients(of_x: Any, of_w: Any) -> None:
    """The outer pass keeps the terms of gradients until they are read; the inner one must return its gradients now."""

    def run(lay: Callable[[Tensor, Any], Tensor]) -> Any:
        x, w = (lay(torch.arange(1.0, 13.0).view(s), p).requires_grad_() for s, p in (((3, 4), of_x), ((4, 3), of_w)))
        Checkpointed.apply(torch.matmul, x * 1, w).sum().backward()
        Checkpointed.apply(torch.matmul, x, w).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        return x.grad.tolist(), w.grad.tolist()

    mesh = mw.ProcessMesh([0, 1], ["a"])
    found = mw.simulate(lambda: run(lambda t, p: mw.shard_tensor(t, mesh, [p])), 2)
    assert found == [run(lambda t, p: t)] * 2
