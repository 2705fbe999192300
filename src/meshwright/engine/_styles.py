"""How a module is parallel: what a plan by module names says of each, as marks on its weights, inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from meshwright.layout import MeshError, Placement, ProcessMesh, Replicate, Shard
from meshwright.tensor import DistTensor, map_tensors

from ._regather import gather_inputs
from ._tensors import reshard, shard_tensor

LayerFn = Callable[[Any, ProcessMesh], Any]
"""Inputs, or outputs, of a layer and the mesh of its stage → what takes their place."""


class Style(Protocol):
    """What a plan says of a module; layers that are split over stages are each on a mesh of their own."""

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        """Lays the layer's weights, and puts hooks where its inputs or outputs are to lie otherwise."""
        ...


@dataclass(frozen=True)
class ColwiseParallel:
    """A weight cut over what the layer gives: features of a linear layer or an embedding, channels of a convolution.

    What it gives stays cut, unless it is to be gathered with `gather_output`. A weight that has the features which it
    takes first is `transposed`.
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
    """A weight cut over what the layer takes: features of a linear layer, words of an embedding, channels.

    What it gives is a sum over the axis, which is taken where it is needed. A weight that has the features which it
    takes first is `transposed`.
    """

    axis: str = "tp"
    transposed: bool = False

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        is_table = isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
        _cut(layer, "weight", mesh, self.axis, 0 if is_table or _takes_first(layer, self.transposed) else 1)


VocabParallel = RowwiseParallel
"""An embedding cut over its words."""


@dataclass(frozen=True)
class SequenceParallelBegin:
    """What the layer gives is cut along dim `dim` from here on."""

    dim: int = 1
    axis: str = "tp"

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        _on_outputs(layer, mesh, lambda x: along(x, self.axis, Shard(self.dim)))


@dataclass(frozen=True)
class SequenceParallelEnd:
    """What the layer takes is whole along the axis from here on; it saves this rank's part, to be gathered again."""

    axis: str = "tp"

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        gather_inputs(layer, lambda x: along(x, self.axis, Replicate()))


@dataclass(frozen=True)
class SequenceParallelEnable:
    """The layer works on parts along dim `dim`: its inputs and outputs are cut, with others around it as they are."""

    dim: int = 1
    axis: str = "tp"

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        _on_inputs(layer, mesh, lambda x: along(x, self.axis, Shard(self.dim)))
        _on_outputs(layer, mesh, lambda x: along(x, self.axis, Shard(self.dim)))


@dataclass(frozen=True)
class SequenceParallelDisable:
    """The layer works on the whole sequence; what it gives is cut again along dim `dim`.

    Of what it takes it saves this rank's part, which is gathered again in the backward pass.
    """

    dim: int = 1
    axis: str = "tp"

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        gather_inputs(layer, lambda x: along(x, self.axis, Replicate()))
        _on_outputs(layer, mesh, lambda x: along(x, self.axis, Shard(self.dim)))


@dataclass(frozen=True)
class PrepareLayerInput:
    """`fn(inputs, mesh)` sees what goes into the layer."""

    fn: LayerFn

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        layer.register_forward_pre_hook(lambda _, inputs: self.fn(inputs, mesh))


@dataclass(frozen=True)
class PrepareLayerOutput:
    """`fn(outputs, mesh)` sees what comes out of the layer."""

    fn: LayerFn

    def mark(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        layer.register_forward_hook(lambda _, inputs, outputs: self.fn(outputs, mesh))


def along(x: Tensor, axis: str, placement: Placement) -> Tensor:
    """`x` lying so along one axis, and as it does along the others; what has fewer dims stays as it is."""
    if not isinstance(x, DistTensor) or (isinstance(placement, Shard) and placement.dim >= x.dim()):
        return x
    if axis not in x.mesh.sizes:
        return x
    placements = [placement if a == axis else p for a, p in zip(x.mesh.dim_names, x.placements, strict=True)]
    return reshard(x, x.mesh, placements)


def _cut(layer: nn.Module, name: str, mesh: ProcessMesh, axis: str, dim: int) -> None:
    """One more axis that cuts a parameter; those of other styles stay."""
    held: Any = getattr(layer, name, None)
    if not isinstance(held, Tensor):
        return
    if axis not in mesh.sizes:
        raise MeshError(
            f"a layer that is cut along {axis!r}", repr(mesh), f"it has no axis {axis!r}",
            f"one of {list(mesh.dim_names)}: {type(layer).__name__} by ColwiseParallel(axis={mesh.dim_names[-1]!r})",
        )  # fmt: skip
    before = held.placements if isinstance(held, DistTensor) else [Replicate()] * mesh.ndim
    placements = [Shard(dim) if a == axis else p for a, p in zip(mesh.dim_names, before, strict=True)]
    # PEFT wraps a layer in a module whose weight is a property.
    owner = next((m for m in layer.modules() if m._parameters.get(name) is held), layer)
    setattr(owner, name, shard_tensor(held, mesh, placements))


def _takes_first(layer: nn.Module, transposed: bool) -> bool:
    return transposed or isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))


def _on_inputs(layer: nn.Module, mesh: ProcessMesh, fn: Callable[[Tensor], Tensor]) -> None:
    layer.register_forward_pre_hook(
        lambda _, inputs, named: (map_tensors(fn, inputs), map_tensors(fn, named)), with_kwargs=True
    )


def _on_outputs(layer: nn.Module, mesh: ProcessMesh, fn: Callable[[Tensor], Tensor]) -> None:
    layer.register_forward_hook(lambda _, inputs, outputs: map_tensors(fn, outputs))
