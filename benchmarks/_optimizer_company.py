"""Programs around an optimizer's step, such as clipping, scaling and averaging, on distributed parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

import meshwright as mw

from ._optimizer_cases import S0, S1, Layer, R, Setting, numbers
from ._samples import differ


def differentiated(kind: Any, options: dict[str, Any], setting: Setting, layer: Layer) -> list[list[Tensor]]:
    """Return the results of one differentiable step from parameters and gradients, and their gradients."""
    leaves = [x.detach().requires_grad_() for x in setting.make(layer)]
    params = [x.clone() for x in leaves]
    grads: list[Tensor] = []
    for k, p in enumerate(params):
        grad = layer.shard(numbers(*p.shape, seed=k), *[mw.Replicate()] * 2).requires_grad_()
        grads.append(grad)
        p.grad = grad.clone()
    kind(params, **options).step()
    torch.stack([(p**2).sum() for p in params]).sum().backward()
    return [[_kept(x) for x in (*params, *[x.grad for x in (*leaves, *grads) if x.grad is not None])]]


def _kept(x: Tensor) -> Tensor:
    x = mw.unshard_dtensor(x) if isinstance(x, mw.DistTensor) else x
    return x.detach().clone()


PROGRAMS: dict[str, Callable[[Layer], Any]] = {}
"""Name of a program → the program, which returns the values to compare."""


def program(fn: Callable[[Layer], Any]) -> Callable[[Layer], Any]:
    PROGRAMS[fn.__name__] = fn
    return fn


def failures() -> Iterator[tuple[str, str]]:
    """Yield the programs that give other numbers than one device."""
    for name, program in PROGRAMS.items():
        message = failure_of(program)
        if message is not None:
            yield name, message


def failure_of(program: Callable[[Layer], Any]) -> str | None:
    wanted = _numbers(program, Layer(None))
    found = mw.simulate(lambda: _numbers(program, Layer((2, 2))), 4)
    return next((m for rank in found if (m := differ(rank, wanted)) is not None), None)


def _numbers(program: Callable[[Layer], Any], layer: Layer) -> list[Any]:
    return [_kept(x) if isinstance(x, Tensor) else x for x in program(layer)]


class Net(nn.Module):
    """A model of two layers, a norm with buffers, and a parameter made of a computed value."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.first = nn.Parameter(layer.shard(numbers(5, 6), S0, R))
        self.second = nn.Parameter(layer.shard(numbers(3, 5), R, S1))
        self.scale = nn.Parameter(self.first.detach().norm(dim=1, keepdim=True))
        self.norm = nn.BatchNorm1d(5, dtype=torch.float64)
        nn.init.constant_(self.norm.bias, 0.5)  # at zero its gradient is rounding error alone

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(x @ self.first.t()) * self.scale.reshape(-1)) @ self.second.t()


def backward(net: nn.Module, layer: Layer, step: int) -> None:
    net(layer.shard(numbers(8, 6, seed=step), S0, R)).pow(2).mean().backward()


def values(net: nn.Module) -> list[Tensor]:
    return [*net.parameters(), *net.buffers()]


def gradients(layer: Layer) -> Net:
    net = Net(layer)
    backward(net, layer, 0)
    return net


def clipping(norm_type: float, foreach: bool | None) -> None:
    def clip(layer: Layer) -> list[Any]:
        net = gradients(layer)
        total = nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm_type, foreach=foreach)
        return [total, *[p.grad for p in net.parameters()]]

    PROGRAMS[f"clip_grad_norm_, norm {norm_type}, foreach={foreach}"] = clip


for norm_type in (2.0, 1.0, 3.0, float("inf")):
    for foreach in (None, True, False):
        clipping(norm_type, foreach)


@program
def clip_grad_value(layer: Layer) -> list[Any]:
    net = gradients(layer)
    nn.utils.clip_grad_value_(net.parameters(), 0.01, foreach=True)
    return [p.grad for p in net.parameters()]


@program
def vector_of_parameters(layer: Layer) -> list[Any]:
    net = Net(layer)
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(vector * 2 + 1, net.parameters())
    return [vector, *net.parameters()]


def scheduling(name: str, make: Callable[[Any], Any], **options: Any) -> None:
    def schedule(layer: Layer) -> list[Any]:
        net = Net(layer)
        optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.05), **options)
        scheduler = make(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            backward(net, layer, step)
            optimizer.step()
            scheduler.step()
        return [*values(net), optimizer.param_groups[0]["lr"]]

    PROGRAMS[f"{name}, tensor lr, {options}"] = schedule


for more in ({}, {"foreach": False}, {"fused": True}):
    scheduling("ExponentialLR", lambda of: lr_scheduler.ExponentialLR(of, 0.5), **more)
    scheduling("OneCycleLR", lambda of: lr_scheduler.OneCycleLR(of, 0.1, total_steps=6), **more)
    scheduling("CosineAnnealingLR", lambda of: lr_scheduler.CosineAnnealingLR(of, 4), **more)


def averaging(name: str, **how: Any) -> None:
    def average(layer: Layer) -> list[Any]:
        net = Net(layer)
        averaged = swa_utils.AveragedModel(net, **how)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            backward(net, layer, step)
            optimizer.step()
            averaged.update_parameters(net)
        return [*values(averaged), *values(net)]

    PROGRAMS[f"AveragedModel, {name}"] = average


averaging("mean")
averaging("mean of lists", multi_avg_fn=swa_utils.get_swa_multi_avg_fn())
averaging("exponential", multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
averaging("exponential, one by one", avg_fn=swa_utils.get_ema_avg_fn(0.9))


@program
def exponential_average_of_lists(layer: Layer) -> list[Any]:
    net = Net(layer)
    shadow = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05, fused=True)
    for step in range(3):
        optimizer.zero_grad()
        backward(net, layer, step)
        optimizer.step()
        torch._foreach_mul_(shadow, 0.9)
        torch._foreach_add_(shadow, [p.detach() for p in net.parameters()], alpha=0.1)
        torch._foreach_lerp_(shadow, [p.detach() for p in net.parameters()], 0.05)
    return shadow


def scaling(**options: Any) -> None:
    def scale(layer: Layer) -> list[Any]:
        net = Net(layer)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            x = numbers(8, 6, seed=step)
            x[7] *= 1e30 if step == 1 else 1.0
            scaler.scale(net(layer.shard(x, S0, R)).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return [*net.parameters(), scaler.get_scale()]

    PROGRAMS[f"GradScaler, {options}"] = scale


for more in ({}, {"foreach": True}, {"fused": True}):
    scaling(**more)


@program
def lists_of_views(layer: Layer) -> list[Any]:
    """Update one list with the same tensor twice, views that are local, and views that are copies."""
    x = layer.shard(numbers(6, 5), S0, R)
    torch._foreach_add_([x, x, x[1:3], x.t(), x[:, 2]], [1.0, 2.0, 3.0, 4.0, 5.0])
    torch._foreach_mul_([x[0:4], x], [x[2:6] + 1, x * 0.5])
    return [x]


@program
def fused_step_of_one_tensor_twice(layer: Layer) -> list[Any]:
    p, g = layer.shard(numbers(6, 5), S0, R), layer.shard(numbers(6, 5, seed=1), R, S1)
    how = {"weight_decay": 0.1, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch.ops.aten._fused_sgd_([p, p], [g, g], [], is_first_step=True, **how)
    return [p, g]


@program
def view_of_a_fused_parameter(layer: Layer) -> list[Any]:
    """Return a parameter after fused steps, and a view of it that is a copy."""
    p = nn.Parameter(layer.shard(numbers(6, 5), S0, R))
    view = p.detach()[1:4]
    optimizer = torch.optim.Adam([p], lr=0.1, fused=True)
    for step in range(3):
        p.grad = layer.shard(numbers(6, 5, seed=step), S0, R)
        optimizer.step()
    return [p, view]


@program
def penalty_on_gradients(layer: Layer) -> list[Any]:
    net = Net(layer)
    loss = net(layer.shard(numbers(8, 6), S0, R)).pow(2).mean()
    grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True, allow_unused=True)
    norms = torch._foreach_norm([g for g in grads if g is not None])
    torch.stack(list(norms)).sum().backward()
    return [p.grad for p in net.parameters()]


@program
def callback_of_numbers(layer: Layer) -> list[Any]:
    """Return the results of `apply_` and `map_`, which call Python functions with numbers."""
    x, y = layer.shard(numbers(6, 5), S0, R), layer.shard(numbers(6, 5, seed=1), R, S1)
    return [x.apply_(lambda v: v * v), y.map_(x, lambda a, b: a - b)]
