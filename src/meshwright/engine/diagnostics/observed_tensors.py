"""Record what a model computes in one pass: inputs and outputs of its modules, and their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.layout import Spec, TorchValue
from meshwright.tensor import DistTensor, map_tensors, tensors_in

INPUT, OUTPUT, LOSS = "input", "output", "loss"
OF_OUTPUT, OF_INPUT, OF_PARAMETER = "gradient of the output", "gradient of the input", "gradient"
Key = tuple[str, str, int]
"""The kind of the tensor, the path of its module or parameter, and the number of earlier tensors with both."""


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a tensor, and its spec (None for a plain tensor)."""

    spec: Spec | None
    local: Tensor

    @staticmethod
    def of(x: Tensor) -> Part:
        with torch.no_grad():
            if not isinstance(x, DistTensor):
                return Part(None, x.detach().clone())
            return Part(x.spec, x.to_local().clone())


@dataclass
class Observed:
    """The recorded tensors, in order."""

    parts: dict[Key, Part] = field(default_factory=dict[Key, Part])
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def note(self, what: str, path: str, x: Tensor) -> None:
        at = self._counts[what, path]
        self._counts[what, path] += 1
        self.parts[what, path, at] = Part.of(x)


def observe(model: nn.Module, batch: Sequence[Any], loss: Callable[..., Any] | None) -> dict[Key, Part]:
    """Run a forward and a backward pass, and return the parts of all tensors; the hooks stay on the model.

    So pass a copy of the model. The loss is `loss(result, last part of the batch)`, or without `loss` the sum of the
    model's results.
    """
    seen = Observed()
    for path, module in model.named_modules():
        _watch(seen, path, module)
    given = map_tensors(lambda x: x.detach().clone().requires_grad_(x.requires_grad), tuple(batch))
    out = model(*given) if loss is None else loss(model(*given[:-1]), given[-1])
    terms = [x.sum() for x in tensors_in(out) if x.is_floating_point() or x.is_complex()]
    if not terms:
        return seen.parts
    total = sum(terms[1:], terms[0])
    seen.note(LOSS, "", total)
    if total.requires_grad:
        total.backward()
    for name, p in reversed(list(model.named_parameters())):
        if p.grad is not None:
            seen.note(OF_PARAMETER, name, p.grad)
    return seen.parts


def _watch(seen: Observed, path: str, module: nn.Module) -> None:
    def before(_: nn.Module, args: TorchValue, kwargs: TorchValue) -> TorchValue:
        def watched(x: Tensor) -> Tensor:
            seen.note(INPUT, path, x)
            if not (x.requires_grad and torch.is_grad_enabled()):
                return x
            own = x.view_as(x)  # a node of its own: its gradient excludes other uses of x
            own.register_hook(lambda grad: seen.note(OF_INPUT, path, grad))
            return own

        return map_tensors(watched, args), map_tensors(watched, kwargs)

    def behind(_: nn.Module, inputs: object, out: TorchValue) -> None:
        for x in tensors_in(out):
            seen.note(OUTPUT, path, x)
            if x.requires_grad and torch.is_grad_enabled():
                x.register_hook(lambda grad: seen.note(OF_OUTPUT, path, grad))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(behind)
