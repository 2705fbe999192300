"""A distributed tensor behaves as the whole tensor: each program below gives the same on every mesh and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.tensor import DistTensor
from tests.engine.oracle import STYLES, Lay, Program, check

PROGRAMS: dict[str, Program] = {}


def program(fn: Program) -> Program:
    PROGRAMS[fn.__name__] = fn
    return fn


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(shape)


# --- views and writing through them ------------------------------------------------------------------------------


@program
def writes_through_a_slice(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    x[1:3].mul_(2)
    return x


@program
def writes_through_a_transpose(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    x.t()[0].zero_()
    x.transpose(0, 1)[2:4].add_(1)
    return x


@program
def writes_through_a_flat_view(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    x.view(-1)[3:17] = 1
    return x


@program
def writes_through_a_view_of_a_view(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    rows = x[1:4]
    rows[:, 2].fill_(7)
    return x, rows


@program
def a_view_sees_what_is_written_to_its_base(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    rows, column = x[1:4], x[:, 2]
    x.add_(1)
    return rows, column


@program
def two_views_of_one_base(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    upper, left = x[:3], x[:, :2]
    upper.zero_()
    left += 5
    return x, upper, left


@program
def pieces(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    return x.unbind(0)[3], x.split([1, 4], 0)[1], x.chunk(4, 1)[2], x.tensor_split(3)[0]


@program
def writes_through_pieces(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    x.unbind(0)[1].mul_(3)
    x.chunk(2, 1)[1].sub_(1)
    return x


@program
def in_place_with_a_gradient(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6), grad=True)
    y = x * 2
    y[1:3] = 0
    y.t()[4].mul_(3)
    y.square().sum().backward()
    return y, x.grad


@program
def shapes(lay: Lay) -> Any:
    x = lay(random_tensor(4, 6))
    return (
        x.reshape(2, 2, 6),
        x.view(4, 2, 3),
        x.flatten(),
        x.unsqueeze(1),
        x.t().contiguous(),
        x.expand(3, 4, 6),
        x.repeat(2, 1),
        x.flip(0),
        x.roll(1, 1),
        x.movedim(0, 1),
        x.unflatten(1, (3, -1)),
        x[..., None].squeeze(-1),
    )


# --- indexing ----------------------------------------------------------------------------------------------------


@program
def reads_by_index(lay: Lay) -> Any:
    x, rows = lay(random_tensor(5, 6)), torch.tensor([4, 0, 0, 2])
    return x[2], x[-1, 3], x[1:4, ::2], x[..., 0], x[None], x[rows], x[:, rows], x[rows, rows], x[[0, 3]]


@program
def reads_by_mask(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    return x[x > 0], x.masked_fill(x > 0, 0.0), torch.where(x > 0, x, -x), x.masked_select(x < 0), x[x[:, 0] > 0]


@program
def writes_by_index(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    x[2] = 5
    x[:, 1] = torch.arange(5.0)
    x[1:3, ::2] = x[3:5, ::2]
    x[torch.tensor([0, 4])] = lay(random_tensor(2, 6))
    x[-1, -1] = x[0, 0]
    return x


@program
def writes_by_mask(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    x[x > 0.5] = 0
    x[x < -0.5] *= 2
    x.masked_fill_(x == 0, -1)
    return x


@program
def index_gradients(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6), grad=True)
    (x[torch.tensor([4, 0, 0])].sum() * 2 + x[1:3, 2].square().sum() + x[2, 2]).backward()
    return x.grad


# --- numbers, plain tensors, dtypes --------------------------------------------------------------------------------


@program
def scalars(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    return 2 * x, x + 1, 1 - x, x / 3, 3 / (x + 9), x**2, 2**x, x // 0.5, x % 0.3, -x, abs(x), x > 0, x == x


@program
def plain_tensors_mix_in(lay: Lay) -> Any:
    x, plain, row = lay(random_tensor(5, 6)), random_tensor(5, 6), random_tensor(6)
    return x + plain, plain - x, plain * row + x, plain.t() @ x, torch.cat([x, plain]), torch.stack([plain, x], 1)


@program
def plain_tensors_that_want_gradients(lay: Lay) -> Any:
    x, weight = lay(random_tensor(5, 6)), random_tensor(6, 3).requires_grad_()
    (x @ weight).square().mean().backward()
    return weight.grad


@program
def plain_parameters_get_gradients(lay: Lay) -> Any:
    x, linear = lay(random_tensor(5, 6)), torch.nn.Linear(6, 3)
    linear(x).square().mean().backward()
    return [p.grad for p in linear.parameters()]


@program
def dtypes(lay: Lay) -> Any:
    x, n = lay(random_tensor(5, 6)), lay(torch.arange(30).reshape(5, 6))
    return (
        n + 1.5,
        n / 2,
        n + x,
        x.double() + x,
        x.bfloat16() * x,
        (x > 0) + n,
        n.float(),
        x.int(),
        x.to(torch.float64),
        n.to(x.dtype),
        n.sum(),
        n.to(torch.int8).sum(),
        n.float().mean(),
        torch.result_type(n, 1.5),
        x.type(torch.float16),
    )


@program
def reductions(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    return (
        x.sum(),
        x.mean(0),
        x.mean(),
        x.var(1),
        x.std(),
        x.amax(1),
        x.max(),
        x.min(0),
        x.argmax(),
        x.argmax(1),
        x.norm(),
        x.prod(1),
        x.logsumexp(0),
        x.cumsum(0),
        x.softmax(1),
        x.sort(0),
        x.topk(2, 0),
        x.any(),
        x.median(),
        (x > 0).all(1),
    )


@program
def losses_are_means_over_uneven_parts(lay: Lay) -> Any:
    x, y = lay(random_tensor(5, 6), grad=True), lay(random_tensor(5, 6))
    (F.mse_loss(x, y) + F.huber_loss(x, y) + F.cross_entropy(x, torch.tensor([0, 5, 2, 1, 1]))).backward()
    return x.grad


# --- values --------------------------------------------------------------------------------------------------------


@program
def python_values(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    one = x.sum()
    return (
        one.item(),
        float(one),
        int(one),
        bool(one > 100),
        x.tolist(),
        len(x),
        x.shape == (5, 6),
        x.size(1),
        x.numel(),
        x.dim(),
        x.ndim,
        f"{one:.4f}",
        str(x.dtype),
        bool((x == x).all()),
        torch.equal(x, x),
        x.stride(),
        3 in x.int() * 0 + 3,
    )


@program
def iteration(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    return [row.sum() for row in x], [float(v) for v in x[2]], max(x[:, 0].tolist())


@program
def branches_on_values(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    steps = 0
    while x.norm() > 1:
        x, steps = x / 2, steps + 1
    return x, steps


# --- gradients -----------------------------------------------------------------------------------------------------


@program
def no_grad(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6), grad=True)
    with torch.no_grad():
        y = x * 2
    z = x.detach() * 2
    return y, z, y.requires_grad, z.requires_grad, (x * 2).requires_grad, x.is_leaf, (x * 2).is_leaf


@program
def inference_mode(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6))
    with torch.inference_mode():
        return (x @ x.t()).relu()


@program
def gradients_by_autograd_grad(lay: Lay) -> Any:
    x, w = lay(random_tensor(5, 6), grad=True), lay(random_tensor(6, 4), grad=True)
    y = torch.tanh(x @ w)
    return torch.autograd.grad(y, [x, w], grad_outputs=lay(random_tensor(5, 4)))


@program
def gradient_of_a_tensor_with_a_seed(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6), grad=True)
    (x * x).backward(random_tensor(5, 6))
    return x.grad


@program
def double_backward(lay: Lay) -> Any:
    x, w = lay(random_tensor(5, 6), grad=True), lay(random_tensor(6, 4), grad=True)
    y = torch.tanh(x @ w).square().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (g.square().sum() + y).backward()
    return x.grad, w.grad


@program
def third_derivative(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6), grad=True)
    y = (x**4).sum()
    for _ in range(3):
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        y = g.sum()
    return g


@program
def two_backward_passes_add_up(lay: Lay) -> Any:
    x, w = lay(random_tensor(5, 6)), lay(random_tensor(6, 4), grad=True)
    for scale in (1, 2):
        (x @ w * scale).square().mean().backward()
    return w.grad


@program
def retained_graph(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6), grad=True)
    y = x.exp()
    y.retain_grad()
    loss = y.sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad, y.grad


@program
def gradients_of_chosen_inputs(lay: Lay) -> Any:
    x, w = lay(random_tensor(5, 6), grad=True), lay(random_tensor(6, 4), grad=True)
    (x @ w).sum().backward(inputs=[w])
    return x.grad, w.grad


@program
def gradients_can_be_set_and_dropped(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6), grad=True)
    x.square().sum().backward()
    x.grad = x.grad * 2
    x.square().sum().backward()
    before = x.grad.clone()
    x.grad = None
    return before, x.grad


@program
def tensor_hooks(lay: Lay) -> Any:
    x, seen = lay(random_tensor(5, 6), grad=True), []
    y = x * 3
    y.register_hook(lambda g: seen.append(g.sum()))
    y.register_hook(lambda g: g * 2)
    x.register_hook(lambda g: g + 1)
    y.square().mean().backward()
    return x.grad, seen


@program
def hooks_after_accumulation(lay: Lay) -> Any:
    x, seen = lay(random_tensor(5, 6), grad=True), []
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x.square().mean().backward()
    return seen, x.grad


class SquareOfParts(torch.autograd.Function):
    """A user-defined function that saves local parts, in which the local part of a gradient has its usual meaning."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 2 * x


@program
def a_function_of_local_parts(lay: Lay) -> Any:
    x = lay(random_tensor(5, 6), grad=True)
    if isinstance(x, DistTensor):
        spread = x if not x.spec.layout.partial else mw.reshard(x)
        y = mw.local_map(SquareOfParts.apply, [spread.placements], out_shapes=[spread.shape])(spread)
    else:
        y = SquareOfParts.apply(x)
    y.mean().backward()
    return y, x.grad


@program
def autocast(lay: Lay) -> Any:
    x, w = lay(random_tensor(5, 6), grad=True), lay(random_tensor(6, 4), grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ w
        z = F.softmax(y.float(), dim=-1) + 1
        loss = z.square().mean()
    loss.backward()
    return y.dtype, z.dtype, x.grad.dtype, z, x.grad, w.grad


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_behaves_as_the_whole_tensor(name: str, style: str) -> None:
    close = {"rtol": 3e-2, "atol": 3e-3} if name == "autocast" else {}
    check(PROGRAMS[name], STYLES[style], **close)
