"""Quantized experts in a checkpoint: their part of config.json, and the empty tensors that the loader fills.

The names of the tensors are those of the buffers of `QuantizedExperts`. Only this package reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from meshwright.checkpoint import Catalogue
from meshwright.tensor import DistTensor

from .._errors import QuantizeError
from .._scheme import Scheme
from .._stored_weight import SCALE, stored_dtypes, stored_layouts
from ..conversion import Experts, experts_in
from ..layers.quantized_experts import QuantizedExperts, StoredExperts, buffer_name, store_experts
from .file_tensor import FileTensor, check_rows, float_dtype, refused

EXPERTS = "experts_groups"
"""The key of the groups of experts in the `quantization_config`."""


def quantized_experts(model: nn.Module) -> dict[str, StoredExperts]:
    """Return the quantized experts of a model by the names of their parameters."""
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, QuantizedExperts)]
    return {f"{name}.{key}" if name else key: told for name, m in modules for key, told in m.stored_experts.items()}


def read_experts(
    told: Mapping[str, Any], where: str, read_group: Callable[[Mapping[str, Any], str], Scheme]
) -> dict[str, Scheme]:
    """Return the scheme of each quantized expert parameter that a `quantization_config` names."""
    groups: Any = told.get(EXPERTS, {})
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise refused(where, f"{EXPERTS} {groups!r}", "each group of experts must be described by an object")
    schemes = [read_group(group, where) for group in groups.values()]
    return {name: scheme for scheme in schemes for name in scheme.targets}


@contextmanager
def experts_to_fill(model: nn.Module, schemes: Mapping[str, Scheme], catalogue: Catalogue) -> Generator[None]:
    """Make experts of a model quantized, with zeros, before the block; after an error, the model is as it was.

    Raises:
        QuantizeError: the model has no such experts, or their rows do not fit.
    """
    found = {each.name: each for each in experts_in(model) if each.name in schemes}
    for name, scheme in schemes.items():
        if name not in found:
            raise _no_experts(name)
        check_rows(name, found[name].rows_and_columns[1], scheme)
    modules = {id(each.module): each.module for each in found.values()}.values()
    before = [(m, type(m), dict(m._parameters), dict(m._buffers), dict(vars(m))) for m in modules]
    try:
        for name, each in found.items():
            told = each.told(Scheme(schemes[name].weights))
            store_experts(each.module, each.key, told, _zeros(each, told, catalogue))
        yield
    except BaseException:
        for module, kind, parameters, buffers, attributes in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes, _parameters=parameters, _buffers=buffers)
        raise


def _zeros(experts: Experts, told: StoredExperts, catalogue: Catalogue) -> dict[str, Tensor]:
    """Return empty tensors for those that hold experts, in layouts that follow from theirs."""
    weight, shapes = experts.weight, told.stored_shapes()
    dtypes = stored_dtypes(told.scheme, float_dtype(catalogue, buffer_name(experts.name, SCALE), told.dtype))
    layouts = stored_layouts(shapes, weight.spec) if isinstance(weight, DistTensor) else {}
    return {key: FileTensor(shape, dtypes[key], layouts.get(key)).zeros(weight) for key, shape in shapes.items()}


def _no_experts(name: str) -> QuantizeError:
    return QuantizeError(
        f"load the quantized experts {name}",
        "a model without this parameter of three dims",
        "the checkpoint is that of another model",
        "build the model that config.json describes, before its quantization",
    )
