"""A function of local parts in a model that is being captured: one operator, whose results are found on fake parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import current
from meshwright.layout import Placement, ProcessMesh, Replicate, Shard, Spec, layout_of
from meshwright.tensor import captured_whole, map_tensors, note_spec, noted_spec, tensors_in

from ._mesh import resolve_mesh

Place = tuple[ProcessMesh, Sequence[Placement]] | None
"""Where an operand or a result lies; None where that is not said."""


@dataclass(frozen=True, slots=True)
class LocalCall:
    """The call as an operator: `run` does it with distributed tensors."""

    func: Any
    run: Callable[..., Any]

    def __call__(self, *given: Any) -> Any:
        return self.run(*given)

    def __repr__(self) -> str:
        return f"local_map of {getattr(self.func, '__name__', self.func)}"


def noted(tree: Any) -> Any:
    """Whom to tell about a call with these arguments, where a model is being captured; else None."""
    return next((note for x in tensors_in(tree) if (note := captured_whole(x)) is not None), None)


def mesh_of(tree: Any, given: ProcessMesh | None) -> ProcessMesh:
    """The mesh that was named, else that of the first argument of which it is known, else the default."""
    known = map(noted_spec, tensors_in(tree))
    return resolve_mesh(given if given is not None else next((spec.mesh for spec in known if spec is not None), None))


def parts_of(tree: Any, place: Place, guess: Place) -> Any:
    """`tree` with fake parts for whole tensors, which lie as `place` says, as is known of them, or as is guessed."""

    def part(x: Tensor) -> Tensor:
        spec = _spec(x, place, guess)
        return x if spec is None else _fake(x.new_empty(current().local_shape(spec)), x.requires_grad)

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


def whole_of(part: Any, place: Place, shape: Sequence[int] | None, grad: bool) -> Any:
    """A fake whole tensor for a result: parts are taken to be of one size where no shape is given."""
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
    """`x`, with a past where it is to have a gradient."""
    return x.requires_grad_() * 1 if grad and torch.is_grad_enabled() else x
