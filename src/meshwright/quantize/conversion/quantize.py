"""`quantize`: turn the linear layers and the experts of a model into quantized ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from meshwright.layout import TorchValue
from meshwright.tensor import DistTensor, distribute_as

from .._errors import CalibrationError
from .._rounding import relative_error, scales_of, to_codes
from .._scheme import Scheme, scheme_of
from .._stored_weight import Stored, placed_like, store
from ..calibration.calibration import Calibration
from ..layers.linear_layers import Layers, check_module, convert_layers
from ..layers.quantized_experts import StoredExperts
from ..layers.quantized_linear import QuantizedLinear
from .conv1d import conv1d_as_linear
from .experts import Experts, convert_experts, round_experts
from .selection import check_selection, select


@torch.no_grad()
def quantize(
    model: nn.Module,
    scheme: Scheme | str = "int8",
    calibration: Iterable[TorchValue] | None = None,
    *,
    progress: Callable[[str], None] | None = None,
    resume: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Turn the linear layers and the experts of a model into quantized ones, and return the model.

    They stay the same modules, with their hooks. Experts are parameters [experts, rows, columns]; they are rounded to
    the nearest numbers, by calibrated schemes only if a target names them. `scheme` is a Scheme or the name of a
    preset. The model is plain, or distributed: then every rank makes the call, and gets its part of the very same codes
    and scales as one device. `calibration` yields batches: tensors, tuples of positional arguments, or dicts of keyword
    arguments. Every rank gets the same batches. `progress` gets a line for each block that is calibrated, with the
    relative error of its outputs; without calibration data, one for each layer, with the relative error of its weight.
    Experts have such lines too.

    With `resume`, a folder, the results of each calibrated block are written there. A later call with the same model,
    scheme and data reads them, on any mesh and any number of ranks, and calibrates the other blocks. The model becomes
    the very same one as without the interruption.

    Raises:
        QuantizeError: the scheme does not exist or does not fit a layer. The model is unchanged.
        CalibrationError: calibration data is missing, too small, not finite, or not the same on every rank, or the
            model fails with a batch. With `resume`: the folder has results of another model, of another scheme or other
            data, or damaged ones, or the scheme is not calibrated. The model is unchanged.
        CheckpointError: the results of a block cannot be written to `resume`. The model is unchanged.

    >>> model = quantize(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), "int8-dynamic")
    >>> model[2]
    QuantizedLinear(in_features=4, out_features=2, bias=True, weights int8, channel; inputs int8, token, dynamic)
    """
    chosen = scheme_of(scheme)
    check_module(model)
    with conv1d_as_linear(model):
        selection = select(model, chosen)
        check_selection(selection, chosen)
        show = progress or (lambda text: None)
        if chosen.is_calibrated:
            new, parameters = _calibrated(model, selection.layers, chosen, show, calibration, resume)
        else:
            _refuse_folder(chosen, resume)
            new, parameters = _nearest_layers(selection.layers, chosen, show), {}
        stored = _nearest_experts(selection.experts, chosen, show)
        _fill(model, parameters)
        convert_experts(selection.experts, stored)
        return convert_layers(model, new)


def _calibrated(
    model: nn.Module,
    layers: Layers,
    scheme: Scheme,
    progress: Callable[[str], None],
    calibration: Iterable[TorchValue] | None,
    resume: str | os.PathLike[str] | None,
) -> tuple[dict[str, QuantizedLinear], dict[str, Tensor]]:
    """Return the new layers, and the parameters of norms that smoothing changed, whole."""
    if calibration is None:
        raise _no_calibration(scheme)
    work = Calibration(model, layers, scheme, progress, resume)
    return work.run(calibration), work.parameters


def _fill(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Write whole values into parameters of a model."""
    for name, whole in parameters.items():
        parameter = model.get_parameter(name)
        is_distributed = isinstance(parameter, DistTensor)
        parameter.copy_(distribute_as(whole, parameter.mesh, parameter.spec.layout) if is_distributed else whole)


def _nearest_layers(layers: Layers, scheme: Scheme, progress: Callable[[str], None]) -> dict[str, QuantizedLinear]:
    found: dict[str, QuantizedLinear] = {}
    for name, layer in layers.items():
        found[name] = nearest_layer(layer, scheme)
        progress(f"{name or 'the model'}: relative error {found[name].error:.2g}")
    return found


def _nearest_experts(
    experts: Mapping[str, Experts], scheme: Scheme, progress: Callable[[str], None]
) -> dict[str, tuple[StoredExperts, Stored]]:
    found: dict[str, tuple[StoredExperts, Stored]] = {}
    for name, each in experts.items():
        found[name] = round_experts(each, scheme)
        progress(f"{name}: relative error {found[name][0].error:.2g}")
    return found


def _refuse_folder(scheme: Scheme, resume: object) -> None:
    """Raise CalibrationError for a folder of finished stages if nothing is calibrated."""
    if resume is not None:
        raise CalibrationError(
            f"quantize by {scheme!r} with resume={resume!r}",
            "a scheme without calibration",
            "it has no stages that could be finished, and takes little time",
            "leave out resume=",
        )


def _no_calibration(scheme: Scheme) -> CalibrationError:
    return CalibrationError(
        f"quantize by {scheme!r}",
        "no calibration data",
        "the method chooses numbers by the inputs of each layer",
        "pass calibration=[batch, ...], or use method='nearest' and dynamic inputs",
    )


def nearest_layer(layer: nn.Linear, scheme: Scheme) -> QuantizedLinear:
    """Return the quantized layer with the weight rounded to the nearest numbers."""
    weight = layer.weight.detach().contiguous()
    scale, zero = scales_of(weight, scheme.weights)
    stored = store(to_codes(weight, scale, zero, scheme.weights), scale, zero, scheme)
    placed = placed_like(weight, stored)
    new = QuantizedLinear((layer.out_features, layer.in_features), scheme, placed, layer.bias)
    new.error = relative_error(weight, new.dequantized())
    return new
