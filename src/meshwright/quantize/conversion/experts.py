"""Experts in one parameter [experts, rows, columns]: which of them a scheme quantizes, and their rounding.

Methods with calibration data need the inputs of each expert, which the code of a model does not show. So experts are
rounded to the nearest numbers, and their inputs stay exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._patterns import TARGETS, matches
from .._rounding import relative_error, scales_of, to_codes
from .._scheme import Scheme
from .._stored_weight import Stored, placed_like, store, values_in
from ..layers.quantized_experts import StoredExperts, store_experts

WORD = "expert"
"""A module with this word in its name, or in that of its class, has experts."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A parameter of three dims, with a matrix for each expert: `key` of the module with the name `owner`."""

    owner: str
    key: str
    module: nn.Module

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.key}" if self.owner else self.key

    @property
    def is_transposed(self) -> bool:
        """True if the inputs of an expert are the second dim; experts of transformers say so."""
        return getattr(self.module, "is_transposed", False) is True

    @property
    def parameter(self) -> Tensor:
        return self.module.get_parameter(self.key).detach()

    @property
    def weight(self) -> Tensor:
        """Return the weight [experts, rows, columns], with a row for each output feature."""
        return self.parameter.transpose(-2, -1) if self.is_transposed else self.parameter

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        rows, columns = self.weight.shape[1:]
        return rows, columns

    def is_in(self, patterns: Iterable[str]) -> bool:
        """True if a pattern is for the parameter, its module, or the class of the module."""
        every = tuple(patterns)
        return matches(self.name, self.module, every) or matches(self.owner, self.module, every)

    def told(self, scheme: Scheme, error: float | None = None) -> StoredExperts:
        experts, rows, columns = self.weight.shape
        return StoredExperts(scheme, (experts, rows, columns), self.parameter.dtype, self.is_transposed, error)


def experts_in(model: nn.Module) -> Iterator[Experts]:
    """Yield the parameters that hold several matrices, of experts or of others."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
            for key, x in module._parameters.items():
                if x is not None and not is_lazy(x) and x.dim() == 3 and min(x.shape) > 1:
                    yield Experts(name, key, module)


def why_exact(experts: Experts, scheme: Scheme, shared: set[int]) -> str | None:
    """Return the reason why a scheme leaves experts as they are; None if it quantizes them."""
    if id(experts.module._parameters[experts.key]) in shared:
        return "another module uses it"
    if experts.is_in(scheme.ignore):
        return "the scheme leaves it out"
    if experts.name in scheme.targets:
        return None
    if not any(WORD in name.lower() for name in (experts.owner, type(experts.module).__name__)):
        return "a tensor with several matrices, which may be no experts; it is quantized if a target is its name"
    if experts.is_in(scheme.targets):
        return None
    if not set(TARGETS) & set(scheme.targets):
        return "the scheme leaves it out"
    if scheme.is_calibrated:
        return "experts are not calibrated; they are rounded to the nearest numbers if a target names them"
    return None


def numbers_of(scheme: Scheme) -> Scheme:
    """Return the scheme of experts: the numbers of the weights."""
    return Scheme(scheme.weights)


def round_experts(experts: Experts, scheme: Scheme) -> tuple[StoredExperts, Stored]:
    """Return the tensors that hold experts rounded to the nearest numbers, in layouts that follow from theirs."""
    numbers, weight = numbers_of(scheme), experts.weight.contiguous()
    scale, zero = scales_of(weight, numbers.weights)
    stored = placed_like(weight, store(to_codes(weight, scale, zero, numbers.weights), scale, zero, numbers))
    error = relative_error(weight, values_in(stored, numbers, weight.shape[-1]))
    return experts.told(numbers, error), stored


def convert_experts(experts: Mapping[str, Experts], new: Mapping[str, tuple[StoredExperts, Stored]]) -> None:
    """Replace the parameters of experts by the tensors that hold their numbers, in place."""
    for name, (told, stored) in new.items():
        store_experts(experts[name].module, experts[name].key, told, stored)
