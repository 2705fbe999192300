"""Names and tensors of a model as checkpoints of transformers have them.

Most tensors are stored as they are, and only the names of wrappers are removed. Transformers keeps some tensors in
another form than its checkpoints do, such as all experts of a layer in one tensor; it converts them back itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ._errors import WeightError

_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|base_layer)\.|^base_model\.model\.")
"""Names that torch.compile and PEFT add: `base_model.model.layers.0.q_proj.base_layer.weight`."""

_ADAPTER = re.compile(r"(\.lora_[^.]+)\.[^.]+")
"""Part of a name with the name of the adapter, which files of PEFT omit: `lora_A.default.weight`."""

Converter = Callable[[nn.Module, Mapping[str, Tensor]], Mapping[str, Tensor]]


def hub_name(model: nn.Module, name: str, shape: Sequence[int]) -> str:
    """Return the name of a tensor in a checkpoint. Raises WeightError if it is stored in another form there."""
    convert = _converter(model)
    bare = _bare(name)
    if convert is None:
        return bare
    found = convert(_base(model), {bare: torch.empty(tuple(shape), device="meta")})
    if [tuple(x.shape) for x in found.values()] != [tuple(shape)]:
        raise WeightError(
            f"mw.weights.stream(model): {name}",
            f"checkpoints have {', '.join([*found][:3])}{' …' if len(found) > 3 else ''} in its place",
            "the library converts whole tensors, and a rank holds a part",
            'pass whole=True, or format="meshwright" for the names and tensors of the model',
        )
    return next(iter(found))


def hub_tensors(model: nn.Module, name: str, whole: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Return the names and tensors of a checkpoint that a whole tensor of the model is stored as."""
    convert = _converter(model)
    return [(_bare(name), whole)] if convert is None else [*convert(_base(model), {_bare(name): whole}).items()]


def _bare(name: str) -> str:
    """Return the name in a file: of the model inside all wrappers, or in a file of adapters of PEFT.

    >>> _bare("base_model.model.head.base_layer.weight"), _bare("base_model.model.head.lora_A.default.weight")
    ('head.weight', 'base_model.model.head.lora_A.weight')
    """
    return _ADAPTER.sub(r"\1", name) if _ADAPTER.search(name) else _WRAPPERS.sub("", name)


def _base(model: Any) -> nn.Module:
    """Return the model inside a model of PEFT."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner


def _converter(model: nn.Module) -> Converter | None:
    """Return the library's function that converts tensors back to those of its checkpoints; None without conversion."""
    base: Any = _base(model)
    if not type(base).__module__.startswith("transformers.") and not hasattr(base, "_weight_conversions"):
        return None
    try:
        loading = import_module("transformers.core_model_loading")
        mapping = import_module("transformers.conversion_mapping")
    except ImportError:  # before transformers 5, tensors were stored as they are
        return None
    known = getattr(base, "_weight_conversions", None)
    return (
        loading.revert_weight_conversion
        if known or mapping.get_model_conversion_mapping(base, add_legacy=False)
        else None
    )
