"""What people do beside an optimizer's step, on one device and on distributed parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import meshwright as mw

from ._optimizer_cases import Layer, Setting, numbers
from ._samples import differ


def differentiated(kind: Any, options: dict[str, Any], setting: Setting, layer: Layer) -> list[list[Tensor]]:
    """One differentiable step from parameters and gradients, and the gradients of what it gives."""
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


def failures() -> Iterator[tuple[str, str]]:
    """The programs that give other numbers than one device."""
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
