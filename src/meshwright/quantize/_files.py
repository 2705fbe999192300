"""Save and load quantized models in the form of compressed-tensors: safetensors files, and a config.json.

The state of the model is the content of the files, so the loader of checkpoints does the work: each rank reads its
slices, for any mesh and layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint import (
    Catalogue,
    Format,
    HeldTensor,
    SaveJob,
    format_of,
    load,
    open_together,
    save,
    write_new,
)
from meshwright.comm import current_communicator
from meshwright.layout import InputError, JsonValue, Spec, read_file, read_json
from meshwright.tensor import DistTensor, as_dist_tensor

from ._config import config_of, read_config
from ._errors import QuantizeError
from ._layers import convert_layers, refuse_quantized
from ._quantized_linear import QuantizedLinear
from ._scheme import Scheme
from ._stored_weight import SCALE, stored_dtypes, stored_layout, stored_shapes

CONFIG = "config.json"


def save_quantized(model: nn.Module, path: str | os.PathLike[str], *, files: Mapping[str, bytes] | None = None) -> None:
    """Write a quantized model into the new folder `path`, for transformers, vLLM, and `load_quantized`.

    Every rank makes the call. The folder has safetensors files in the form of compressed-tensors, and a config.json:
    that of the model, if it has one as models of transformers do, with the quantization added. It appears complete, or
    not at all. `files` are further files of the folder by name, such as those of a tokenizer.

    Raises:
        QuantizeError: no layer is quantized, or compressed-tensors does not know the numbers.
        CheckpointError: the files cannot be written; raised on every rank.
    """
    own: Any = getattr(model, "config", None)
    config: dict[str, Any] = own.to_dict() if hasattr(own, "to_dict") else {}
    text = json.dumps(config | {"quantization_config": config_of(model)}, indent=2)
    tensors = {name: _held(x) for name, x in _state(model)}
    beside = {**(files or {}), CONFIG: (text + "\n").encode()}
    save(path, tensors, {}, _WithFiles(format_of("safetensors"), beside)).wait()


@dataclass(frozen=True, slots=True)
class _WithFiles:
    """The format of model hubs, and files beside it, such as config.json."""

    files: Format
    beside: Mapping[str, bytes]

    def prepared(self, job: SaveJob) -> Callable[[], JsonValue]:
        return self.files.prepared(job)

    def finish(self, job: SaveJob, reports: Sequence[JsonValue]) -> None:
        for name, content in self.beside.items():
            write_new(job.folder / name, content)
        self.files.finish(job, reports)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's state; a tensor with two names has the first of them."""
    seen: set[int] = set()
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor) and id(x) not in seen:
            seen.add(id(x))
            yield name, x


def _held(x: Tensor) -> HeldTensor:
    return HeldTensor(x.to_local().detach(), x.spec) if isinstance(x, DistTensor) else HeldTensor(x.detach())


@torch.no_grad()
def load_quantized(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Fill a model with a quantized checkpoint in the form of compressed-tensors, and return the model.

    `model` is the model before its quantization, plain or distributed; its weights may be on the meta device if the
    checkpoint has them quantized. Every rank makes the call, and reads the slices that it holds. The model's own
    names, or those of the checkpoint, decide nothing: quantized layers are those that its config.json names.

    Raises:
        QuantizeError: the folder has no such checkpoint, or one with numbers that this package does not have.
        CheckpointError: the model does not fit; nothing was loaded, and the model is unchanged.
    """
    folder = Path(path)
    refuse_quantized(model)
    stored = read_config(_read(folder / CONFIG), str(folder))
    catalogue = open_together(folder)
    new = {n: _empty(n, layer, scheme, catalogue) for n, layer, scheme in stored.layers_of(model)}
    wanted = dict(_wanted(model, new, catalogue))
    inside = tuple(f"{name}." for name in new)
    load(catalogue, wanted, whole=lambda name: name.startswith(inside))
    return convert_layers(model, new)


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


def _empty(name: str, layer: nn.Linear, scheme: Scheme, catalogue: Catalogue) -> QuantizedLinear:
    """Return a quantized layer with zeros, in the layouts that follow from the weight's."""
    shape = (layer.out_features, layer.in_features)
    if scheme.weights.group_size is not None and layer.in_features % scheme.weights.group_size:
        raise QuantizeError(
            f"load {name} in groups of {scheme.weights.group_size}",
            f"a layer with {layer.in_features} inputs",
            "the rows of the layer are no multiple of the group size",
            "build the model with the sizes that the checkpoint's config.json has",
        )
    scale = catalogue.entries.get(f"{name}.{SCALE}")
    dtypes = stored_dtypes(scheme, scale.dtype if scale is not None else layer.weight.dtype)
    shapes = stored_shapes(*shape, scheme)
    return QuantizedLinear(
        shape, scheme, {key: _zeros(key, size, dtypes[key], layer.weight) for key, size in shapes.items()}, layer.bias
    )


def _zeros(name: str, shape: tuple[int, ...], dtype: torch.dtype, weight: Tensor) -> Tensor:
    device = "cpu" if weight.is_meta else weight.device
    if not isinstance(weight, DistTensor):
        return torch.zeros(shape, dtype=dtype, device=device)
    spec = Spec(weight.spec.mesh, stored_layout(name, shape, weight.spec), shape, dtype)
    return as_dist_tensor(torch.zeros(spec.local_shape(current_communicator().rank), dtype=dtype, device=device), spec)


def _wanted(
    model: nn.Module, new: dict[str, QuantizedLinear], catalogue: Catalogue
) -> Iterator[tuple[str, HeldTensor]]:
    """Yield what the model reads: the state of its quantized layers, and of all that stays as it is.

    A tensor with several names is read under one that was saved.
    """
    for name, layer in new.items():
        for key, x in layer.state_dict(keep_vars=True).items():
            yield f"{name}.{key}", _held(x)
    names: dict[int, list[tuple[str, Tensor]]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, Tensor) and name.rpartition(".")[0] not in new:
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
        yield name, _held(x)
