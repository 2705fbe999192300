"""A function of local parts in a model that is being captured: one operator, with results found on fake parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Placement, ProcessMesh, Replicate, Shard, Spec, TorchValue, layout_of
from meshwright.tensor import Opaque, captured_whole, map_tensors, note_spec, noted_spec, tensors_in

from .default_mesh import resolve_mesh

Place = tuple[ProcessMesh, Sequence[Placement]] | None
"""The mesh and placements of an operand or a result; None if they are not given."""


@dataclass(frozen=True, slots=True)
class LocalMapCall:
    """The call as an operator; `run` runs it with distributed tensors."""

    func: Callable[..., Any]
    run: Callable[..., Any]

    def __call__(self, *given: TorchValue) -> TorchValue:
        return self.run(*given)

    def __repr__(self) -> str:
        return f"local_map of {getattr(self.func, '__name__', self.func)}"


def noted(tree: TorchValue) -> Opaque | None:
    """Return the capture's callback for a call with these arguments, or None if no model is being captured."""
    notes = map(captured_whole, tensors_in(tree))
    return next((note for note in notes if note is not None), None)


def mesh_of(tree: TorchValue, given: ProcessMesh | None) -> ProcessMesh:
    """Return the given mesh, else the mesh of the first argument whose spec is known, else the default mesh."""
    known = map(noted_spec, tensors_in(tree))
    return resolve_mesh(given if given is not None else next((spec.mesh for spec in known if spec is not None), None))


def parts_of(tree: TorchValue, place: Place, guess: Place) -> TorchValue:
    """Return `tree` with fake local parts for whole tensors.

    A tensor has the layout of `place`, else its known spec, else the layout of `guess`.
    """

    def part(x: Tensor) -> Tensor:
        spec = _spec(x, place, guess)
        return x if spec is None else _fake(x.new_empty(current_communicator().local_shape(spec)), x.requires_grad)

    return map_tensors(part, tree)


def _spec(x: Tensor, place: Place, guess: Place) -> Spec | None:
    known = noted_spec(x)
    if place is None and known is not None:
        return known
    mesh, placements = place or guess or (None, ())
    if mesh is None:
        return None
    fitting = [p if isinstance(p, Shard) and -x.dim() <= p.dim < x.dim() else Replicate() for p in placements]
    return Spec(mesh, layout_of(fitting, x.dim(), mesh), x.shape, x.dtype)


def whole_of(part: TorchValue, place: Place, shape: Sequence[int] | None, grad: bool) -> TorchValue:
    """Return a fake whole tensor for a result. Without `shape`, all parts are taken to have one size."""
    if place is None or not isinstance(part, Tensor):
        return part
    mesh, placements = place
    layout = layout_of(placements, part.dim(), mesh)
    sizes = list(part.shape if shape is None else shape)
    for axis, p in zip(mesh.dim_names, placements, strict=False):
        if shape is None and isinstance(p, Shard):
            sizes[p.dim] *= mesh.sizes[axis]
    out = _fake(part.new_empty(sizes), grad and part.dtype.is_floating_point)
    note_spec(out, Spec(mesh, layout, out.shape, out.dtype))
    return out


def _fake(x: Tensor, grad: bool) -> Tensor:
    """Return `x`, with an autograd history if `grad` is set."""
    return x.requires_grad_() * 1 if grad and torch.is_grad_enabled() else x
