"""The interface of a form of quantized checkpoints: the tensors of a layer in the files, and their conversion.

A rank reads its part of large tensors. Zero points, tables and descriptions are small, and every rank reads them whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.checkpoint import Catalogue, HeldTensor
from meshwright.comm import current_communicator
from meshwright.layout import Dim, Layout, Product, Spec, axes_of
from meshwright.tensor import DistTensor, as_dist_tensor

from .._errors import QuantizeError
from .._scheme import Scheme
from .._stored_weight import Stored

CONFIG = "config.json"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of scales and biases."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file. Without a layout, every rank reads it whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None = None

    def zeros(self, weight: Tensor) -> Tensor:
        """Return zeros in this layout, on the mesh and the device of a weight."""
        device = torch.device("cpu") if weight.is_meta else weight.device
        if self.layout is None or not isinstance(weight, DistTensor):
            return torch.zeros(self.shape, dtype=self.dtype, device=device)
        spec = Spec(weight.spec.mesh, self.layout, self.shape, self.dtype)
        part = torch.zeros(spec.local_shape(current_communicator().rank), dtype=self.dtype, device=device)
        return as_dist_tensor(part, spec)


class Form(Protocol):
    """A form of quantized checkpoints."""

    def layers_of(self, model: nn.Module, catalogue: Catalogue) -> Iterable[tuple[str, nn.Linear, Scheme]]:
        """Return the name, the layer and the scheme of each linear layer that is quantized in the checkpoint."""
        ...

    def files_of(self, name: str, layer: nn.Linear, scheme: Scheme, catalogue: Catalogue) -> dict[str, FileTensor]:
        """Return the tensors of a layer in the files, under their names without that of the layer."""
        ...

    def check(self, name: str, layer: nn.Linear, scheme: Scheme, files: Mapping[str, Tensor]) -> None:
        """Raise QuantizeError for values that cannot be loaded; this rank's parts are given."""
        ...

    def stored(self, layer: nn.Linear, scheme: Scheme, files: Mapping[str, Tensor]) -> Stored:
        """Return the tensors of a quantized layer, of those in the files; in any layout."""
        ...


def layout_like(shape: Sequence[int], dims: Sequence[int | None], weight: Tensor) -> Layout | None:
    """Return the layout of a tensor each of whose dims corresponds to a dim of the weight, or to none; None if plain.

    A dim with fewer elements than the weight's is sharded if every rank has the same number of elements of both.
    """
    if not isinstance(weight, DistTensor):
        return None
    found = [() if d is None else _axes_for(n, d, weight.spec) for n, d in zip(shape, dims, strict=True)]
    return Layout(tuple(found))


def _axes_for(length: int, dim: int, weight: Spec) -> Dim:
    axes = weight.layout.dims[dim]
    if isinstance(axes, Product):
        return ()
    ranks = prod(weight.mesh.sizes[axis] for axis in axes_of(axes))
    is_even = length % ranks == 0 and weight.shape[dim] % ranks == 0
    return axes if is_even or length == weight.shape[dim] else ()


def float_dtype(catalogue: Catalogue, name: str, weight: torch.dtype) -> torch.dtype:
    """Return the dtype of scales or of a bias in the files; that of the weight if it is not one of `FLOATS`."""
    entry = catalogue.entries.get(name)
    return entry.dtype if entry is not None and entry.dtype in FLOATS else weight


def held(x: Tensor) -> HeldTensor:
    return HeldTensor(x.to_local().detach(), x.spec) if isinstance(x, DistTensor) else HeldTensor(x.detach())


def refused(where: str, found: str, why: str) -> QuantizeError:
    return QuantizeError(
        f"load quantized weights from {where}",
        found,
        why,
        "load a checkpoint of mw.save_quantized or llm-compressor, or one in the form of GPTQ, AWQ (gemm) or nf4",
    )


def check_rows(name: str, columns: int, scheme: Scheme) -> None:
    """Raise QuantizeError if rows with this number of columns are no multiple of the group size."""
    if scheme.weights.group_size is not None and columns % scheme.weights.group_size:
        raise QuantizeError(
            f"load {name} in groups of {scheme.weights.group_size}",
            f"a layer with {columns} inputs",
            "the rows of the layer are no multiple of the group size",
            "build the model with the sizes that the checkpoint's config.json has",
        )


def check_groups(name: str, group_of: Tensor, columns: int, scheme: Scheme) -> None:
    """Raise QuantizeError if a column has a group that does not exist."""
    groups = columns // (scheme.weights.group_size or columns)
    if group_of.numel() and not 0 <= int(group_of.min()) <= int(group_of.max()) < groups:
        raise QuantizeError(
            f"load {name}",
            f"the groups {int(group_of.min())} to {int(group_of.max())} of its columns",
            f"a layer with {columns} inputs in {scheme.weights!r} has the groups 0 to {groups - 1}",
            "write the checkpoint again; its group index is not that of its scales",
        )
