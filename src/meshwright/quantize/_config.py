"""Schemes as the `quantization_config` of a model's config.json, in the form of compressed-tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.layout import JsonValue

from ._errors import QuantizeError
from ._layers import is_linear, matches
from ._quantized_linear import QuantizedLinear
from ._scheme import NumberFormat, Scheme
from ._stored_weight import stored_form

METHOD = "compressed-tensors"
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "token")


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the `quantization_config` of a model with quantized layers.

    Raises:
        QuantizeError: there is none, or compressed-tensors does not know the numbers of a layer.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    if not layers:
        raise QuantizeError(
            f"save a {type(model).__name__} in the form of compressed-tensors",
            "no quantized layer",
            "the form describes quantized layers",
            "call mw.quantize(model, ...) first, or mw.save_state_dict(model.state_dict(), path)",
        )
    groups = _names_by_numbers(layers)
    forms = {stored_form(scheme) for scheme in groups}
    return {
        "quant_method": METHOD,
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": _groups_json(groups),
        "ignore": [name for name, module in model.named_modules() if is_linear(module)],
        "kv_cache_scheme": None,
    }


def _names_by_numbers(layers: Mapping[str, QuantizedLinear]) -> dict[Scheme, list[str]]:
    """Return the names of the layers for each scheme without its method, if compressed-tensors knows them all."""
    groups: dict[Scheme, list[str]] = {}
    for name, layer in layers.items():
        _check_known(name, layer.scheme)
        groups.setdefault(_numbers_of(layer.scheme), []).append(name)
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
    return Scheme(scheme.weights, scheme.input_activations, act_order=scheme.act_order)


def _groups_json(groups: Mapping[Scheme, Sequence[str]]) -> dict[str, Any]:
    """Return the groups of layers; a single one is that of all linear layers."""
    all_linear = ["Linear"] if len(groups) == 1 else None
    return {f"group_{i}": _group_json(scheme, all_linear or names) for i, (scheme, names) in enumerate(groups.items())}


def _group_json(scheme: Scheme, targets: Sequence[str]) -> dict[str, Any]:
    inputs = scheme.input_activations
    return {
        "targets": list(targets),
        "weights": _numbers_json(scheme.weights) | ({"actorder": "static"} if scheme.act_order else {}),
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
class StoredSchemes:
    """The schemes of a checkpoint, and the layers that it leaves out."""

    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]

    def layers_of(self, model: nn.Module) -> Iterator[tuple[str, nn.Linear, Scheme]]:
        """Yield the name, the layer and the scheme of each linear layer that is quantized in the checkpoint."""
        for name, module in model.named_modules():
            if not is_linear(module) or matches(name, module, self.ignore):
                continue
            scheme = next((s for s in self.schemes if matches(name, module, s.targets)), None)
            if scheme is not None:
                yield name, module, scheme


def read_config(config: JsonValue, where: str) -> StoredSchemes:
    """Return the schemes in the `quantization_config` of a model's configuration.

    Raises:
        QuantizeError: there is none, or it describes numbers that this package does not have.
    """
    told = config.get("quantization_config") if isinstance(config, Mapping) else None
    if not isinstance(told, Mapping) or told.get("quant_method") != METHOD:
        found = "no quantization_config" if not isinstance(told, Mapping) else f"{told.get('quant_method')!r}"
        raise _refused(where, found, "only the form of compressed-tensors can be loaded")
    groups: Any = told.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise _refused(where, f"config_groups {groups!r}", "each group of layers must be described by an object")
    schemes = tuple(_read_group(group, where) for group in groups.values())
    return StoredSchemes(schemes, tuple(told.get("ignore") or ()))


def _read_group(group: Mapping[str, Any], where: str) -> Scheme:
    weights: Any = group.get("weights")
    if group.get("output_activations") or not isinstance(weights, Mapping):
        raise _refused(where, "a group without weights, or with output_activations", "weights must be quantized")
    inputs: Any = group.get("input_activations")
    numbers = None if not inputs else _read_numbers(inputs, where)
    return Scheme(_read_numbers(weights, where), numbers, targets=tuple(group.get("targets") or ()), ignore=())


def _read_numbers(told: Mapping[str, Any], where: str) -> NumberFormat:
    size = told.get("group_size")
    strategy = told.get("strategy") or ("group" if size and size > 0 else "tensor")
    known = strategy in _STRATEGIES and told.get("type", "int") in ("int", "float") and not told.get("block_structure")
    if not known or told.get("dynamic") not in (None, True, False) or told.get("actorder") in ("group", "dynamic"):
        raise _refused(where, f"numbers {dict(told)!r}", "this package does not have these numbers")
    return NumberFormat(
        told.get("num_bits", 8),
        told.get("type", "int"),
        strategy,
        size if strategy in ("group", "tensor_group") else None,
        told.get("symmetric", True),
        bool(told.get("dynamic", False)),
    )


def _refused(where: str, found: str, why: str) -> QuantizeError:
    return QuantizeError(
        f"load quantized weights from {where}",
        found,
        why,
        "load a checkpoint of mw.save_quantized or llm-compressor: integers of 2 to 8 bits, or float8",
    )
