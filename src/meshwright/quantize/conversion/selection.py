"""The layers and experts of a model that a scheme quantizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from .._scheme import Scheme
from ..layers.linear_layers import (
    Layers,
    check_groups,
    check_layers,
    check_numbers,
    no_layer,
    select_layers,
    shared_weights,
)
from .experts import Experts, experts_in, why_exact


@dataclass(frozen=True, slots=True)
class Selection:
    """The linear layers and the experts that a scheme quantizes, by name, and why other experts stay."""

    layers: Layers
    experts: dict[str, Experts]
    exact_experts: dict[str, str]


def select(model: nn.Module, scheme: Scheme) -> Selection:
    """Return the layers and experts that a scheme quantizes; their weights may be on the meta device.

    Raises:
        QuantizeError: there is none, or none for which calibration data are needed; the model is quantized already, a
            pattern matches nothing, or rows do not fit.
    """
    every = {each.name: each for each in experts_in(model)}
    shared = shared_weights(model)
    reasons = {name: why_exact(each, scheme, shared) for name, each in every.items()}
    layers = select_layers(model, scheme, _modules_by_pattern(every))
    experts = {name: each for name, each in every.items() if reasons[name] is None}
    if not layers and (scheme.is_calibrated or not experts):
        raise no_layer(model, scheme.targets, scheme.ignore)
    check_groups(_shapes(layers, experts), scheme)
    return Selection(layers, experts, {name: reason for name, reason in reasons.items() if reason is not None})


def _modules_by_pattern(experts: Mapping[str, Experts]) -> dict[str, nn.Module]:
    """Return the modules of experts, by the names of the modules and of the parameters."""
    owners = {each.owner: each.module for each in experts.values()}
    return owners | {name: each.module for name, each in experts.items()}


def _shapes(layers: Layers, experts: Mapping[str, Experts]) -> dict[str, tuple[int, int]]:
    """Return the number of rows and columns of each layer, and of one expert."""
    found = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
    return found | {name: each.rows_and_columns for name, each in experts.items()}


def check_selection(selection: Selection, scheme: Scheme) -> None:
    """Raise QuantizeError if a layer was trained for other numbers, or a weight has no finite numbers."""
    check_layers(selection.layers, scheme)
    for name, experts in selection.experts.items():
        check_numbers(name, experts.parameter)
