"""The styles of parallel modules: each marks the weights, inputs and outputs of a module.

A style along an axis that the mesh does not have leaves its module as it is, so one plan serves many meshes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from meshwright.layout import Placement, ProcessMesh, Replicate, Shard
from meshwright.tensor import DistTensor, map_tensors

from ..marks.tensors import reshard, shard_tensor
from .regather import gather_inputs

LayerFn = Callable[[Any, ProcessMesh], Any]
"""Inputs or outputs of a layer, and the mesh of its stage → their replacement."""


class Style(Protocol):
    """The style of a module in a plan. In a pipeline, each layer is on the mesh of its stage."""

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        """Distribute the layer's weights, and register hooks that change the layouts of its inputs or outputs."""
        ...


@dataclass(frozen=True)
class ColwiseParallel:
    """A column-parallel layer: its weight is sharded along output features (linear, embedding) or output channels.

    The output stays sharded, unless `gather_output` is set. Set `transposed=True` if the weight is stored as (in, out),
    as in Hugging Face's `Conv1D`.
    """

    gather_output: bool = False
    axis: str = "tp"
    transposed: bool = False

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        is_table = isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
        _cut(layer, "weight", mesh, self.axis, 1 if is_table or _takes_first(layer, self.transposed) else 0)
        _cut(layer, "bias", mesh, self.axis, 0)
        if self.gather_output:
            _on_outputs(layer, mesh, lambda x: along(x, self.axis, Replicate()))


@dataclass(frozen=True)
class RowwiseParallel:
    """A row-parallel layer: its weight is sharded along input features (linear), words (embedding) or input channels.

    The output is a pending sum over the axis, which is reduced where the whole value is needed. Set `transposed=True`
    if the weight is stored as (in, out), as in Hugging Face's `Conv1D`.
    """

    axis: str = "tp"
    transposed: bool = False

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        is_table = isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
        _cut(layer, "weight", mesh, self.axis, 0 if is_table or _takes_first(layer, self.transposed) else 1)


VocabParallel = RowwiseParallel
"""A vocabulary-parallel embedding: its table is sharded along the words."""


@dataclass(frozen=True)
class SequenceParallelBegin:
    """The begin of a sequence-parallel region: the layer's output is sharded along dim `dim`."""

    dim: int = 1
    axis: str = "tp"

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        _on_outputs(layer, mesh, lambda x: along(x, self.axis, Shard(self.dim)))


@dataclass(frozen=True)
class SequenceParallelEnd:
    """The end of a sequence-parallel region: the layer's inputs are gathered along the axis.

    The layer saves this rank's part for the backward pass, which gathers it again.
    """

    axis: str = "tp"

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        gather_inputs(layer, lambda x: along(x, self.axis, Replicate()))


@dataclass(frozen=True)
class SequenceParallelEnable:
    """A sequence-parallel layer: its inputs and outputs are sharded along dim `dim`."""

    dim: int = 1
    axis: str = "tp"

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        _on_inputs(layer, mesh, lambda x: along(x, self.axis, Shard(self.dim)))
        _on_outputs(layer, mesh, lambda x: along(x, self.axis, Shard(self.dim)))


@dataclass(frozen=True)
class SequenceParallelDisable:
    """A layer that gets the whole sequence; its output is sharded again along dim `dim`.

    The layer saves this rank's part of its inputs for the backward pass, which gathers it again.
    """

    dim: int = 1
    axis: str = "tp"

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        gather_inputs(layer, lambda x: along(x, self.axis, Replicate()))
        _on_outputs(layer, mesh, lambda x: along(x, self.axis, Shard(self.dim)))


@dataclass(frozen=True)
class PrepareLayerInput:
    """A hook: `fn(inputs, mesh)` gets the inputs of the layer and may replace them."""

    fn: LayerFn

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        layer.register_forward_pre_hook(lambda _, inputs: self.fn(inputs, mesh))


@dataclass(frozen=True)
class PrepareLayerOutput:
    """A hook: `fn(outputs, mesh)` gets the outputs of the layer and may replace them."""

    fn: LayerFn

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        layer.register_forward_hook(lambda _, inputs, outputs: self.fn(outputs, mesh))


def along(x: Tensor, axis: str, placement: Placement) -> Tensor:
    """Return `x` with this placement along one axis; a tensor with too few dims is returned as it is."""
    if not isinstance(x, DistTensor) or (isinstance(placement, Shard) and placement.dim >= x.dim()):
        return x
    if axis not in x.mesh.sizes:
        return x
    placements = [placement if a == axis else p for a, p in zip(x.mesh.dim_names, x.placements, strict=True)]
    return reshard(x, x.mesh, placements)


def _cut(layer: nn.Module, name: str, mesh: ProcessMesh, axis: str, dim: int) -> None:
    """Shard a parameter along one more axis, if the mesh has it; the placements of other styles stay."""
    held: object = getattr(layer, name, None)
    if not isinstance(held, Tensor) or axis not in mesh.sizes:
        return
    # PEFT wraps a layer in a module whose weight is a property; that of a quantized layer is computed.
    owner = next((m for m in layer.modules() if m._parameters.get(name) is held or m._buffers.get(name) is held), None)
    if owner is None:
        return
    before = held.placements if isinstance(held, DistTensor) else [Replicate()] * mesh.ndim
    placements = [Shard(dim) if a == axis else p for a, p in zip(mesh.dim_names, before, strict=True)]
    setattr(owner, name, shard_tensor(held, mesh, placements))


def _takes_first(layer: nn.Module, transposed: bool) -> bool:
    return transposed or isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))


def _on_inputs(layer: nn.Module, mesh: ProcessMesh, fn: Callable[[Tensor], Tensor]) -> None:
    layer.register_forward_pre_hook(
        lambda _, inputs, named: (map_tensors(fn, inputs), map_tensors(fn, named)), with_kwargs=True
    )


def _on_outputs(layer: nn.Module, mesh: ProcessMesh, fn: Callable[[Tensor], Tensor]) -> None:
    layer.register_forward_hook(lambda _, inputs, outputs: map_tensors(fn, outputs))
