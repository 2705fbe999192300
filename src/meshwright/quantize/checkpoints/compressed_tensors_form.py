"""The form of compressed-tensors: schemes as the `quantization_config` of config.json, and the tensors of a layer.

Layers hold their tensors in this form, so they are read as they are. Other libraries do not know quantized layers of
the class Conv1D, and not our quantized experts. They would fill them with random numbers. So a checkpoint with them has
no `quant_method`, which transformers refuses, and its `format` is `OWN`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshwright.checkpoint import Catalogue
from meshwright.tensor import DistTensor

from .._errors import QuantizeError
from .._patterns import matches
from .._scheme import NumberFormat, Scheme, Strategy
from .._stored_weight import GROUP_OF, SCALE, Stored, stored_dtypes, stored_form, stored_layouts, stored_shapes
from ..conversion import Conv1D, QuantizedConv1D, is_conv1d
from ..layers.linear_layers import is_linear
from ..layers.quantized_experts import StoredExperts
from ..layers.quantized_linear import QuantizedLinear
from .experts_form import EXPERTS, quantized_experts
from .file_tensor import FileTensor, check_groups, float_dtype, refused

METHOD = "compressed-tensors"
OWN = "meshwright"
"""The `format` of a checkpoint that only this package reads."""
GROUP_ORDER = ("group", "dynamic")
"""The values of `actorder` with which groups are not neighbours, so that the files have the group of each column."""
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "token")


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the `quantization_config` of a model with quantized layers.

    Raises:
        QuantizeError: there is none, or compressed-tensors does not know the numbers of a layer.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    experts = quantized_experts(model)
    if not layers and not experts:
        raise QuantizeError(
            f"save a {type(model).__name__} in the form of compressed-tensors",
            "no quantized layer",
            "the form describes quantized layers and experts",
            "call mw.quantize(model, ...) first, or mw.save_state_dict(model.state_dict(), path)",
        )
    groups = _names_by_numbers(layers)
    is_own = bool(experts) or any(isinstance(layer, QuantizedConv1D) for layer in layers.values())
    return {
        **({"format": OWN, EXPERTS: _experts_json(experts)} if is_own else _method_json(groups)),
        "quantization_status": "compressed",
        "config_groups": _groups_json(groups),
        "ignore": [name for name, module in model.named_modules() if is_linear(module) or is_conv1d(module)],
        "kv_cache_scheme": None,
    }


def _experts_json(experts: Mapping[str, StoredExperts]) -> dict[str, Any]:
    """Return the groups of experts, by their numbers."""
    groups: dict[Numbers, list[str]] = {}
    for name, told in experts.items():
        _check_known(name, told.scheme)
        groups.setdefault((told.scheme, None), []).append(name)
    return {f"group_{i}": _group_json(numbers, names) for i, (numbers, names) in enumerate(groups.items())}


def _method_json(numbers: Iterable[Numbers]) -> dict[str, Any]:
    """Return the part of the configuration that names the form of compressed-tensors."""
    forms = {stored_form(scheme) for scheme, _ in numbers}
    return {"quant_method": METHOD, "format": forms.pop() if len(forms) == 1 else "mixed-precision"}


Numbers = tuple[Scheme, str | None]
"""A scheme without its method, and the order of its groups: None if they are neighbours in the order of the columns."""


def _names_by_numbers(layers: Mapping[str, QuantizedLinear]) -> dict[Numbers, list[str]]:
    """Return the names of the layers for each kind of numbers, if compressed-tensors knows them all."""
    groups: dict[Numbers, list[str]] = {}
    for name, layer in layers.items():
        _check_known(name, layer.scheme)
        order = "group" if GROUP_OF in layer._buffers else "static" if layer.scheme.act_order else None
        groups.setdefault((_numbers_of(layer.scheme), order), []).append(name)
    return groups


def _check_known(name: str, scheme: Scheme) -> None:
    if scheme.weights.type == "nf":
        raise QuantizeError(
            f"save {name} in the form of compressed-tensors",
            f"weights {scheme.weights!r}",
            "compressed-tensors has no nf4",
            "save it with mw.save_state_dict(model.state_dict(), path), and load it into a model quantized alike",
        )


def _numbers_of(scheme: Scheme) -> Scheme:
    """Return the scheme without the method: the part that a checkpoint describes."""
    return Scheme(scheme.weights, scheme.input_activations)


def _groups_json(groups: Mapping[Numbers, Sequence[str]]) -> dict[str, Any]:
    """Return the groups of layers; a single one is that of all linear layers."""
    all_linear = ["Linear"] if len(groups) == 1 else None
    return {
        f"group_{i}": _group_json(numbers, all_linear or names) for i, (numbers, names) in enumerate(groups.items())
    }


def _group_json(numbers: Numbers, targets: Sequence[str]) -> dict[str, Any]:
    scheme, order = numbers
    inputs = scheme.input_activations
    return {
        "targets": list(targets),
        "weights": _numbers_json(scheme.weights) | ({} if order is None else {"actorder": order}),
        "input_activations": None if inputs is None else _numbers_json(inputs),
        "output_activations": None,
    }


def _numbers_json(numbers: NumberFormat) -> dict[str, Any]:
    float4 = {"group": "torch.uint8", "tensor_group": "torch.float8_e4m3fn"}
    scale_dtype = {"scale_dtype": float4[numbers.strategy]} if numbers.is_float4 else {}
    return {
        "num_bits": numbers.num_bits,
        "type": numbers.type,
        "symmetric": numbers.symmetric,
        "strategy": numbers.strategy,
        "group_size": numbers.group_size,
        "dynamic": numbers.dynamic,
        **scale_dtype,
    }


@dataclass(frozen=True, slots=True)
class CompressedTensorsForm:
    """The schemes of a checkpoint, the layers that it leaves out, and whether it has the form `OWN`."""

    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]
    is_own: bool = False

    @classmethod
    def read(cls, told: Mapping[str, Any], where: str) -> CompressedTensorsForm:
        """Return the form that a `quantization_config` describes.

        Raises:
            QuantizeError: it describes numbers that this package does not have.
        """
        groups: Any = told.get("config_groups")
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            raise refused(where, f"config_groups {groups!r}", "each group of layers must be described by an object")
        schemes = tuple(read_group(group, where) for group in groups.values())
        return cls(schemes, _read_patterns(told.get("ignore"), where), told.get("format") == OWN)

    def layers_of(self, model: nn.Module, catalogue: Catalogue) -> Iterator[tuple[str, nn.Linear, Scheme]]:
        for name, module in model.named_modules():
            is_foreign = isinstance(module, Conv1D) and not self.is_own
            if not is_linear(module) or is_foreign or matches(name, module, self.ignore):
                continue
            scheme = next((s for s in self.schemes if matches(name, module, s.targets)), None)
            if scheme is not None:
                yield name, module, scheme

    def files_of(self, name: str, layer: nn.Linear, scheme: Scheme, catalogue: Catalogue) -> dict[str, FileTensor]:
        shapes = stored_shapes(layer.out_features, layer.in_features, scheme)
        if scheme.act_order or f"{name}.{GROUP_OF}" in catalogue.entries:
            shapes[GROUP_OF] = (layer.in_features,)
        dtypes = stored_dtypes(scheme, float_dtype(catalogue, f"{name}.{SCALE}", layer.weight.dtype))
        weight = layer.weight
        layouts = stored_layouts(shapes, weight.spec) if isinstance(weight, DistTensor) else {}
        return {key: FileTensor(shape, dtypes[key], layouts.get(key)) for key, shape in shapes.items()}

    def check(self, name: str, layer: nn.Linear, scheme: Scheme, files: Mapping[str, Tensor]) -> None:
        if GROUP_OF in files:
            check_groups(name, files[GROUP_OF], layer.in_features, scheme)

    def stored(self, layer: nn.Linear, scheme: Scheme, files: Mapping[str, Tensor]) -> Stored:
        return dict(files)


def read_group(group: Mapping[str, Any], where: str) -> Scheme:
    """Return the scheme of a group of layers, with their names as targets."""
    weights: Any = group.get("weights")
    if group.get("output_activations") or not isinstance(weights, Mapping):
        raise refused(where, "a group without weights, or with output_activations", "weights must be quantized")
    inputs: Any = group.get("input_activations")
    if inputs and not isinstance(inputs, Mapping):
        raise refused(where, f"input_activations {inputs!r}", "numbers are described by an object")
    numbers = None if not inputs else _read_numbers(inputs, where)
    targets, by_group = _read_patterns(group.get("targets"), where), weights.get("actorder") in GROUP_ORDER
    return Scheme(_read_numbers(weights, where), numbers, targets=targets, ignore=(), act_order=by_group)


def _read_patterns(found: Any, where: str) -> tuple[str, ...]:
    """Return the names and regular expressions of layers; none for null."""
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(pattern, str) for pattern in found):
        raise refused(where, f"the layers {found!r}", "layers are a list of names and regular expressions")
    patterns: tuple[str, ...] = tuple(found)
    try:
        for pattern in patterns:
            re.compile(pattern[3:] if pattern.startswith("re:") else "")
    except re.error as error:
        raise refused(where, f"the layers {found!r}", f"a regular expression is wrong: {error}") from error
    return patterns


def _read_numbers(told: Mapping[str, Any], where: str) -> NumberFormat:
    size = told.get("group_size")
    strategy = told.get("strategy") or _strategy_for(size)
    known = strategy in _STRATEGIES and told.get("type", "int") in ("int", "float") and not told.get("block_structure")
    if not known or told.get("dynamic") not in (None, True, False):
        raise refused(where, f"numbers {dict(told)!r}", "this package does not have these numbers")
    return NumberFormat(
        told.get("num_bits", 8),
        told.get("type", "int"),
        strategy,
        size if strategy in ("group", "tensor_group") else None,
        told.get("symmetric", True),
        bool(told.get("dynamic", False)),
    )


def _strategy_for(group_size: object) -> Strategy:
    """Return the strategy of numbers for which only a group size is written; -1 means a whole row."""
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"
