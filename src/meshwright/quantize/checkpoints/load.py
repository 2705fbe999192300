"""Load quantized checkpoints in several forms: config.json says which, and the loader of checkpoints reads the tensors.

Each rank reads its slices, for any mesh and layout. Tensors in other forms are converted by operators with rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint import Catalogue, HeldTensor, difference_of, load, open_together
from meshwright.layout import InputError, JsonValue, read_file, read_json

from .._errors import QuantizeError
from .._scheme import Scheme
from .._stored_weight import placed_like
from ..conversion import conv1d_as_linear
from ..layers.linear_layers import convert_layers, quantized_module
from ..layers.quantized_linear import QuantizedLinear
from .awq_form import AwqForm
from .bitsandbytes_form import BitsandbytesForm
from .compressed_tensors_form import METHOD, OWN, CompressedTensorsForm, read_group
from .experts_form import experts_to_fill, read_experts
from .file_tensor import CONFIG, Form, check_rows, held, refused
from .gptq_form import GptqForm

FORMS: dict[str, Callable[[Mapping[str, Any], str], Form]] = {
    OWN: CompressedTensorsForm.read,
    METHOD: CompressedTensorsForm.read,
    "gptq": GptqForm.read,
    "awq": AwqForm.read,
    "bitsandbytes": BitsandbytesForm.read,
}
"""The `quant_method` of a configuration, or its `format` if it has none → the form that it describes."""
Layers = dict[str, tuple[nn.Linear, Scheme, dict[str, Tensor]]]
"""Name → the layer, its scheme, and its tensors in the files."""


@torch.no_grad()
def load_quantized(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Fill a model with a quantized checkpoint, and return the model.

    The checkpoint has the form of `mw.save_quantized`, compressed-tensors, GPTQ, AWQ (gemm) or bitsandbytes (nf4).
    `model` is the model before its quantization, plain or distributed; its weights may be on the meta device if the
    checkpoint has them quantized. Every rank makes the call, and reads the slices that it holds. Quantized layers are
    those that the config.json names, or those for which the files have codes.

    Raises:
        QuantizeError: the folder has no such checkpoint, or one with numbers that this package does not have; nothing
            was loaded, and the model is unchanged.
        CheckpointError: the model does not fit; nothing was loaded, and the model is unchanged.
    """
    folder = Path(path)
    _refuse_quantized(model, folder)
    told = _quantization_in(_read(folder / CONFIG), str(folder))
    form, experts = _form_of(told, str(folder)), read_experts(told, str(folder), read_group)
    catalogue = open_together(folder)
    with conv1d_as_linear(model):
        layers = dict(_layers_in(model, form, catalogue))
    with conv1d_as_linear(model, layers), experts_to_fill(model, experts, catalogue):
        return _loaded(model, form, catalogue, layers)


def _loaded(model: nn.Module, form: Form, catalogue: Catalogue, layers: Layers) -> nn.Module:
    """Read the tensors of a model, and convert its layers."""
    scratch = {f"{name}.{key}": held(x) for name, (_, _, files) in layers.items() for key, x in files.items()}
    inside = tuple(f"{name}." for name in layers)
    load(
        catalogue,
        dict(_others(model, layers, catalogue)),
        whole=lambda name: name.startswith(inside) and name not in scratch,
        others=_mismatches(catalogue, scratch),
        scratch=scratch,
        accept=lambda: _check(form, layers, scratch),
    )
    scratch.clear()
    return convert_layers(model, {name: _converted(form, *layers.pop(name)) for name in list(layers)})


def _refuse_quantized(model: nn.Module, folder: Path) -> None:
    name = quantized_module(model)
    if name is not None:
        raise QuantizeError(
            f"load quantized weights from {folder}",
            f"{name or 'the model'} is quantized already",
            "the checkpoint says which layers are quantized, and to which numbers",
            "pass the model as it is before its quantization, or load mw.save_state_dict(...) by mw.load_state_dict",
        )


def _quantization_in(config: JsonValue, where: str) -> Mapping[str, Any]:
    """Return the quantization_config of a checkpoint. Raises QuantizeError if there is none."""
    told = config.get("quantization_config") if isinstance(config, Mapping) else None
    if not isinstance(told, Mapping):
        raise refused(where, "no quantization_config", "config.json does not describe quantized layers")
    return told


def _form_of(told: Mapping[str, Any], where: str) -> Form:
    """Return the form of a checkpoint. Raises QuantizeError if it is unknown."""
    method = told.get("quant_method", told.get("format"))
    if not isinstance(method, str) or method not in FORMS:
        raise refused(where, f"quant_method {method!r}", "this form is unknown")
    return FORMS[method](told, where)


def _read(path: Path) -> JsonValue:
    try:
        return read_json(read_file(path))
    except InputError as error:
        raise QuantizeError(
            f"load quantized weights from {path.parent}",
            f"{path.name}: {error.found}",
            error.why,
            "pass the folder that mw.save_quantized wrote, or one with config.json and safetensors files",
        ) from error


def _layers_in(
    model: nn.Module, form: Form, catalogue: Catalogue
) -> Iterator[tuple[str, tuple[nn.Linear, Scheme, dict[str, Tensor]]]]:
    """Yield each quantized layer with empty tensors for what is read."""
    for name, layer, scheme in form.layers_of(model, catalogue):
        check_rows(name, layer.in_features, scheme)
        files = form.files_of(name, layer, scheme, catalogue)
        yield name, (layer, scheme, {key: file.zeros(layer.weight) for key, file in files.items()})


def _mismatches(catalogue: Catalogue, scratch: Mapping[str, HeldTensor]) -> dict[str, str]:
    """Return the difference of each tensor of a layer that is not in the files as it should be."""
    found = {
        name: difference_of(catalogue, name, x) if name in catalogue.entries else "no such tensor in the checkpoint"
        for name, x in scratch.items()
    }
    return {name: difference for name, difference in found.items() if difference}


def _check(form: Form, layers: Layers, scratch: Mapping[str, HeldTensor]) -> None:
    for name, (layer, scheme, files) in layers.items():
        form.check(name, layer, scheme, {key: scratch[f"{name}.{key}"].part for key in files})


def _converted(form: Form, layer: nn.Linear, scheme: Scheme, files: dict[str, Tensor]) -> QuantizedLinear:
    stored = placed_like(layer.weight, form.stored(layer, scheme, files))
    return QuantizedLinear((layer.out_features, layer.in_features), scheme, stored, layer.bias)


def _others(model: nn.Module, layers: Layers, catalogue: Catalogue) -> Iterator[tuple[str, HeldTensor]]:
    """Yield the state that stays as it is: that of other layers, and the biases of quantized ones.

    A tensor with several names is read under one that was saved.
    """
    names: dict[int, list[tuple[str, Tensor]]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        layer, _, key = name.rpartition(".")
        if isinstance(x, Tensor) and (layer not in layers or key == "bias"):
            names.setdefault(id(x), []).append((name, x))
    for same in names.values():
        name, x = next(((n, x) for n, x in same if n in catalogue.entries), same[0])
        if x.is_meta:
            raise QuantizeError(
                f"load {name}",
                "a tensor on the meta device",
                "it has no memory, and the checkpoint does not have it quantized",
                "call mw.materialize(model) first",
            )
        yield name, held(x)
