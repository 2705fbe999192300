"""Quantized experts: a module whose parameters [experts, rows, columns] are stored with few bits.

The class of the experts stays, with its `forward`. A class that is made of it computes the numbers of a parameter when
the attribute is read. So any code that multiplies by the parameter runs as before, on one device and on every mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .._scheme import Scheme
from .._stored_weight import WEIGHT, stored_shapes, values_in


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """A parameter [experts, rows, columns] that is stored with few bits: its numbers, its shape, and its dtype.

    It is `transposed` if the module takes [experts, columns, rows]. `error` is the relative error of its numbers; None
    if it was loaded.
    """

    scheme: Scheme
    shape: tuple[int, int, int]
    dtype: torch.dtype
    transposed: bool
    error: float | None = None

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that hold the parameter."""
        experts, rows, columns = self.shape
        return stored_shapes(rows, columns, self.scheme, (experts,))

    def __repr__(self) -> str:
        return f"{list(self.shape)}, {self.scheme!r}"


class QuantizedExperts(nn.Module):
    """Experts with quantized parameters. Their class is a subclass of this one, and of the class that they had.

    `stored_experts` has the parameters by name, and buffers hold their tensors. An attribute with the name of a
    parameter computes its numbers, in the dtype of the scales; those of floats of 4 bits have the dtype that the
    parameter had. A call of `forward` computes them once, and keeps them until it ends.
    """

    stored_experts: dict[str, StoredExperts]
    _numbers: dict[str, Tensor] | None

    def __getattr__(self, name: str) -> Any:
        told = vars(self).get("stored_experts", {})
        if name not in told:
            return super().__getattr__(name)
        numbers = vars(self)["_numbers"]
        if numbers is None:
            return self._dequantized(name, told[name])
        if name not in numbers:
            numbers[name] = self._dequantized(name, told[name])
        return numbers[name]

    def _dequantized(self, name: str, told: StoredExperts) -> Tensor:
        """Return a parameter as numbers."""
        stored = {each: self.get_buffer(buffer_name(name, each)) for each in told.stored_shapes()}
        values = values_in(stored, told.scheme, told.shape[-1])
        values = values.to(told.dtype) if told.scheme.weights.is_float4 else values
        return values.transpose(-2, -1) if told.transposed else values

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = self._numbers
        self._numbers = {}
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._numbers = before

    def extra_repr(self) -> str:
        lines = [super().extra_repr(), *(f"{name}: {told!r}" for name, told in self.stored_experts.items())]
        return "\n".join(line for line in lines if line)

    def __reduce_ex__(self, protocol: Any) -> Any:
        exact = type(self).__bases__[1]  # the class of this module has no name by which it is found
        return _blank, (exact,), dict(vars(self))


def store_experts(module: nn.Module, name: str, told: StoredExperts, stored: Mapping[str, Tensor]) -> None:
    """Replace a parameter of a module by the tensors that hold its numbers, in place."""
    if not isinstance(module, QuantizedExperts):
        module.__class__ = _quantized_class(type(module))
        vars(module).update(stored_experts={}, _numbers=None)
    assert isinstance(module, QuantizedExperts)
    del module._parameters[name]
    module.stored_experts[name] = told
    for each, tensor in stored.items():
        module.register_buffer(buffer_name(name, each), tensor)


def buffer_name(name: str, stored: str) -> str:
    """Return the name of the buffer that holds a stored tensor of a parameter.

    >>> buffer_name("down_proj", "weight_packed"), buffer_name("down_proj", "weight")
    ('down_proj_packed', 'down_proj_codes')
    """
    return f"{name}_codes" if stored == WEIGHT else f"{name}_{stored.removeprefix('weight_')}"


@lru_cache(maxsize=64)
def _quantized_class(exact: type[nn.Module]) -> type[nn.Module]:
    """Return the class of quantized experts, of a class of experts."""
    return type(exact.__name__, (QuantizedExperts, exact), {"__module__": exact.__module__})


def _blank(exact: type[nn.Module]) -> nn.Module:
    kind = _quantized_class(exact)
    return kind.__new__(kind)
