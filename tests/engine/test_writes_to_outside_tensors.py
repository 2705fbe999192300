"""Tensors of Python objects that a step writes in place: each step writes them once, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

from .static_oracle import step_of

STEPS = 4
Kept = list[Tensor]


class Net(nn.Module):
    """A layer that calls `act` with its output."""

    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(5, 3), act

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        factor = self.act(y.detach())
        return y if factor is None else y * factor


class Loss(nn.Module):
    """A mean squared error that keeps a running mean as a buffer."""

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", kept)

    def forward(self, y: Tensor, wanted: Tensor) -> Tensor:
        loss = F.mse_loss(y, wanted)
        self.mean.mul_(0.5).add_(loss.detach())
        return loss


class Rate(torch.optim.Optimizer):
    """Gradient descent with a rate that falls with a step count in an attribute."""

    def __init__(self, parameters: Any, kept: Tensor) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kept, self.seen = kept, torch.zeros(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.kept.add_(1)
        self.seen[1] = self.kept[0]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad * 0.1 / self.seen[1])


def _through_views(kept: Tensor) -> Callable[[Tensor], Any]:
    def act(y: Tensor) -> Tensor:
        kept[1:].add_(y.mean())
        kept.view(1, 2)[0].mul_(0.5)
        return kept[1]

    return act


def _by_out(kept: Tensor) -> Callable[[Tensor], Any]:
    def act(y: Tensor) -> Tensor:
        torch.add(kept, y.mean(), out=kept)
        return kept.sum()

    return act


def _item(kept: Tensor, at: int, value: Tensor) -> None:
    kept[at] = value


def _add(kept: Tensor, value: Tensor) -> None:
    kept.add_(value)


FORWARD: dict[str, Callable[[Tensor], Callable[[Tensor], Any]]] = {
    "of constants alone": lambda kept: lambda y: kept.mul_(0.5).mean(),
    "of the output": lambda kept: lambda y: kept.mul_(0.5).add_(y.mean()).mean(),
    "by data": lambda kept: lambda y: _add(kept.data, y.mean(0)[:2]),
    "by copy": lambda kept: lambda y: kept.copy_(y.mean(0)[:2]).mean() * 0,
    "by setitem": lambda kept: lambda y: _item(kept, 1, y.max()),
    "by lerp": lambda kept: lambda y: kept.lerp_(y.mean(0)[1:], 0.25).sum(),
    "through views": _through_views,
    "by out": _by_out,
}


def _nothing(y: Tensor) -> None:
    return None


def _of_forward(name: str) -> Callable[[Tensor], tuple[nn.Module, Any, Any]]:
    return lambda kept: (Net(FORWARD[name](kept)), F.mse_loss, None)


def _of_forward_hook(kept: Tensor) -> tuple[nn.Module, Any, Any]:
    net = Net(_nothing)
    net.layer.register_forward_hook(lambda layer, given, out: _add(kept, out.detach().mean()))
    return net, F.mse_loss, None


def _of_tensor_hook(kept: Tensor) -> tuple[nn.Module, Any, Any]:
    net = Net(_nothing)

    def hook(grad: Tensor) -> Tensor:
        kept.add_(1)
        return grad * 2

    net.layer.bias.register_hook(hook)
    return net, F.mse_loss, None


def _of_step_hook(kept: Tensor) -> tuple[nn.Module, Any, Any]:
    net = Net(_nothing)

    def hook(optimizer: Any, *_: Any) -> None:
        grad: Any = net.layer.bias.grad
        kept.mul_(0.5).add_(grad.detach()[:2])
        grad.add_(kept[0])

    return net, F.mse_loss, hook


PLACES: dict[str, Callable[[Tensor], tuple[nn.Module, Any, Any]]] = {
    **{f"forward {name}": _of_forward(name) for name in FORWARD},
    "loss": lambda kept: (Net(_nothing), Loss(kept), None),
    "forward hook": _of_forward_hook,
    "tensor hook": _of_tensor_hook,
    "step hook": _of_step_hook,
    "optimizer": lambda kept: (Net(_nothing), F.mse_loss, lambda parameters: Rate(parameters, kept)),
}


def _batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(8, 5, generator=g), torch.randn(8, 3, generator=g)


def _optimizer(net: nn.Module, how: Any) -> torch.optim.Optimizer:
    if how is not None and how.__code__.co_argcount == 1 and not how.__code__.co_flags & 4:
        return how(list(net.parameters()))
    made = torch.optim.SGD(net.parameters(), lr=0.1)
    if how is not None:
        made.register_step_pre_hook(how)
    return made


def _trained(place: str, mesh: mw.ProcessMesh | None) -> list[float]:
    """Return the losses, and the written tensors after each step; the last step is recorded again."""
    torch.manual_seed(0)
    kept, found = torch.ones(2), list[float]()
    net, loss, how = PLACES[place](kept)
    x, y = _batch()
    if mesh is not None:
        mw.shard_layer(net, mesh)
        x, y = (mw.shard_tensor(t, mesh, [mw.Shard(0)]) for t in (x, y))
    optimizer = _optimizer(net, how)
    step = step_of(net, loss, optimizer, static=mesh is not None)
    for at in range(STEPS):
        net.get_parameter("layer.weight").requires_grad_(at < STEPS - 1)
        found += [step(x, y).item(), *kept.tolist()]
    return found


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_each_step_writes_tensors_of_python_objects_once(place: str, ranks: int) -> None:
    mesh = mw.ProcessMesh(list(range(ranks)), ["dp"])
    for found in mw.simulate(_trained, ranks, place, mesh):
        torch.testing.assert_close(found, _trained(place, None), rtol=1e-5, atol=1e-6)


def _saved(folder: str) -> None:
    kept = torch.ones(2)
    net, loss, _ = PLACES["forward of the output"](kept)
    step = mw.to_static(net, None, loss, torch.optim.SGD(net.parameters(), lr=0.1))
    step(*_batch())
    step.save(folder)


def test_a_program_with_such_writes_is_not_saved(tmp_path: Any) -> None:
    with pytest.raises(mw.MeshwrightError, match="no program that holds a whole step"):
        mw.simulate(_saved, 1, str(tmp_path))


def _written_by_a_stage() -> None:
    net = nn.Sequential(Net(FORWARD["of the output"](torch.ones(2))), nn.Linear(3, 3))
    for at, part in enumerate(net):
        mw.shard_layer(part, mw.ProcessMesh([at], ["dp"]))
    strategy = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 2})
    step = mw.to_static(net, None, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), strategy)
    step(*_batch())


def test_such_writes_in_a_pipeline_stage_are_refused() -> None:
    with pytest.raises(mw.MeshwrightError, match="a write to an outside tensor"):
        mw.simulate(_written_by_a_stage, 2)
