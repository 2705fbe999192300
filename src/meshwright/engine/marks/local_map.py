"""Functions and modules that compute with one rank's local parts.

Arguments and results are distributed tensors; the function gets plain tensors. An argument may be replicated along an
axis along which some result is sharded or partial. Each rank then uses it differently and has one term of its gradient.
Such an argument is passed as *varying*, and the terms are summed. A result that is replicated along such an axis is
computed alike on all ranks. Its gradient is passed on by the first of these ranks only, so that it counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm import current_communicator
from meshwright.layout import Partial, Placement, ProcessMesh, Shard, TorchValue, layout_of
from meshwright.tensor import DistTensor, redistribute, tensors_in

from .._errors import LocalMapError
from .default_mesh import resolve_mesh
from .local_call import LocalMapCall, Place, mesh_of, noted, parts_of, whole_of
from .tensors import check, dtensor_from_local, reshard

PlacementList = Sequence[Placement]
Shape = Sequence[int] | None
Target = tuple[ProcessMesh, PlacementList, Shape] | None
"""The mesh, placements and global shape (for uneven parts) of a result; None if it is no tensor, or stays plain."""


def local_map(
    func: Callable[..., Any],
    out_placements: Sequence[PlacementList | None],
    in_placements: Sequence[PlacementList | None] | None = None,
    process_mesh: ProcessMesh | None = None,
    reshard_inputs: bool = False,
    out_shapes: Sequence[Shape] | None = None,
) -> Callable[..., Any]:
    """Return `func` as a function of distributed tensors that runs on the local parts, which are plain tensors.

    Results have the layouts of `out_placements`, one list per result (None: not a tensor, or left plain). Pass their
    global shapes as `out_shapes` if parts are uneven. Arguments must have the layouts of `in_placements`, one list per
    positional argument (None: any layout), or are resharded if `reshard_inputs` is set. Gradients are right without
    further marks, as long as `func` itself does not communicate.

    Raises:
        LocalMapError: an argument has another layout, or the numbers of arguments, results and placements differ.

    >>> import meshwright as mw
    >>> mesh = mw.ProcessMesh([0, 1], ["dp"])
    >>> total = mw.local_map(lambda x: x.sum(), [[mw.Partial()]])
    >>> mw.simulate(lambda: total(mw.shard_tensor(torch.arange(5.0), mesh, [mw.Shard(0)])).item(), 2)
    [10.0, 10.0]
    """

    def wrapped(*args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        note = noted((args, kwargs))
        if note is None:
            return run(args, kwargs)
        mesh = mesh_of((args, kwargs), process_mesh)
        wanted = [None if p is None else (mesh, p) for p in _per_input(func, in_placements, len(args))]
        targets = _targets(func, [None if p is None else (mesh, p) for p in out_placements], out_shapes)
        return note(
            LocalMapCall(func, run), (args, kwargs), lambda: _run_on_fake_parts(func, args, kwargs, wanted, targets)
        )

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchValue:
        first = next((a.mesh for a in (*args, *kwargs.values()) if isinstance(a, DistTensor)), None)
        mesh = resolve_mesh(process_mesh if process_mesh is not None else first)
        wanted = _per_input(func, in_placements, len(args))
        places = [None if p is None else (mesh, check(p)) for p in out_placements]
        targets = _targets(func, places, out_shapes)
        axes = _varying_axes(targets)
        placed = [_placed(a, w, mesh, reshard_inputs) for a, w in zip(args, wanted, strict=True)]
        local = [_inside(a, axes) for a in placed]
        return _results(func, func(*local, **{k: _inside(v, axes) for k, v in kwargs.items()}), targets)

    return wrapped


class LocalLayer(nn.Module):
    """A module whose `forward` gets local parts: subclass it and write the forward pass of one rank.

    Inputs and the module's own parameters come in their present layouts. `out_dist_attrs` has one (mesh, placements)
    per result. `out_shapes` has the global shapes of results with uneven parts.
    """

    def __init__(
        self,
        out_dist_attrs: Sequence[tuple[ProcessMesh, PlacementList]],
        *,
        out_shapes: Sequence[Shape] | None = None,
    ) -> None:
        super().__init__()
        self.out_dist_attrs = list(out_dist_attrs)
        self.out_shapes = out_shapes
        self._is_local = False

    def __call__(self, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        if self._is_local:
            return super().__call__(*args, **kwargs)
        own = dict((*self.named_parameters(), *self.named_buffers()))
        note = noted((args, kwargs))
        if note is None:
            return self._run(args, kwargs, own)
        targets = _targets(type(self), self.out_dist_attrs, self.out_shapes)

        def inside(own: dict[str, Any], /, *parts: TorchValue, **named: TorchValue) -> TorchValue:
            return self._call(own, parts, named)

        given = (own, *args)
        call = LocalMapCall(type(self), self._run)
        return note(
            call,
            (args, kwargs, own),
            lambda: _run_on_fake_parts(inside, given, kwargs, [None] * len(given), targets),
        )

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], own: dict[str, Any]) -> TorchValue:
        targets = _targets(type(self), self.out_dist_attrs, self.out_shapes)
        axes = _varying_axes(targets)
        local = tuple(_inside(a, axes) for a in args)
        named = {k: _inside(v, axes) for k, v in kwargs.items()}
        out = self._call({k: _inside(v, axes) for k, v in own.items()}, local, named)
        return _results(type(self), out, targets)

    def _call(self, own: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchValue:
        """Run the forward pass on local parts, with `own` in place of the module's parameters and buffers."""
        self._is_local = True
        try:
            return torch.func.functional_call(self, own, args, kwargs)
        finally:
            self._is_local = False


def _run_on_fake_parts(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wanted: Sequence[Place],
    targets: Sequence[Target],
) -> TorchValue:
    """Return the function's results for whole fake tensors, found by a run on fake local parts."""
    guess = next(((t[0], t[1]) for t in targets if t is not None), None)
    parts = [parts_of(a, place, guess) for a, place in zip(args, wanted, strict=True)]
    out = func(*parts, **parts_of(kwargs, None, guess))
    results, many = _listed(func, out, targets)
    grad = any(x.requires_grad for x in tensors_in((args, kwargs)))
    made = [
        whole_of(x, None if t is None else (t[0], t[1]), None if t is None else t[2], grad)
        for x, t in zip(results, targets, strict=True)
    ]
    return type(out)(made) if many else made[0]


def _per_input(
    func: object, in_placements: Sequence[PlacementList | None] | None, count: int
) -> Sequence[PlacementList | None]:
    if in_placements is None:
        return [None] * count
    if len(in_placements) != count:
        raise LocalMapError(
            f"local_map of {_name(func)}",
            f"{count} positional arguments, but in_placements for {len(in_placements)}",
            "each positional argument needs an entry",
            "pass one list of placements per tensor, and None for any other argument",
        )
    return in_placements


def _targets(
    func: object, places: Sequence[tuple[ProcessMesh, PlacementList] | None], shapes: Sequence[Shape] | None
) -> list[Target]:
    if shapes is not None and len(shapes) != len(places):
        raise LocalMapError(
            f"local_map of {_name(func)}",
            f"shapes for {len(shapes)} results, but placements for {len(places)}",
            "each result needs an entry in both",
            "pass one shape per result, and None where the parts are even",
        )
    known = shapes if shapes is not None else [None] * len(places)
    return [None if p is None else (*p, shape) for p, shape in zip(places, known, strict=True)]


def _placed(x: TorchValue, wanted: PlacementList | None, mesh: ProcessMesh, may_move: bool) -> TorchValue:
    """Return `x` in the layout `wanted`. Raises LocalMapError if it has another one and `may_move` is not set."""
    if wanted is None or not isinstance(x, DistTensor):
        return x
    layout = layout_of(check(wanted), x.ndim, mesh)
    if x.mesh is mesh and (layout.dims, layout.partial) == (x.spec.layout.dims, x.spec.layout.partial):
        return x
    if may_move:
        return reshard(x, mesh, wanted)
    raise LocalMapError(
        f"local_map of an input with the placements {list(wanted)} on {mesh!r}",
        f"{x.spec!r} on {x.mesh!r}",
        "the function is written for local parts in the requested layout",
        "pass reshard_inputs=True, or call mw.reshard(x, mesh, placements) first",
    )


def _inside(x: TorchValue, axes: frozenset[tuple[ProcessMesh, str]]) -> TorchValue:
    """Return the local part of `x`. It is varying along those of `axes` along which it is replicated."""
    if not isinstance(x, DistTensor):
        return x
    varying = {a for m, a in axes if m is x.mesh} - set(x.spec.layout.axes) | set(x.spec.layout.varying)
    return redistribute(x, x.mesh, x.spec.layout.with_varying(varying)).to_local()


def _varying_axes(targets: Sequence[Target]) -> frozenset[tuple[ProcessMesh, str]]:
    """Return the mesh axes along which some result differs from rank to rank."""
    return frozenset(
        (target[0], axis)
        for target in targets
        if target is not None
        for axis, placement in zip(target[0].dim_names, target[1], strict=False)
        if isinstance(placement, Shard | Partial)
    )


def _results(func: object, out: TorchValue, targets: Sequence[Target]) -> TorchValue:
    """Return the function's results as distributed tensors in the layouts of their targets."""
    results, many = _listed(func, out, targets)
    axes = _varying_axes(targets)
    made = [_outside(func, x, target, axes) for x, target in zip(results, targets, strict=True)]
    return type(out)(made) if many else made[0]


def _listed(func: object, out: TorchValue, targets: Sequence[Target]) -> tuple[list[Any], bool]:
    """Return the results in a list, and True if there are several. Raises LocalMapError for a wrong number."""
    many = isinstance(out, (list, tuple))
    results: list[Any] = list(out) if many else [out]
    if len(results) != len(targets):
        raise LocalMapError(
            f"local_map of {_name(func)}",
            f"{len(results)} results, but placements for {len(targets)}",
            "each result needs an entry",
            "pass one list of placements per tensor, and None for any other result",
        )
    return results, many


def _outside(func: object, x: TorchValue, target: Target, axes: frozenset[tuple[ProcessMesh, str]]) -> TorchValue:
    if isinstance(x, DistTensor):
        raise LocalMapError(
            f"local_map of {_name(func)}",
            f"a result {x.spec!r} that is already distributed",
            "the function used a distributed tensor from outside together with local parts",
            "pass distributed tensors as arguments, so that the function gets their local parts",
        )
    if target is None or not isinstance(x, Tensor):
        return x
    mesh, placements, shape = target
    cut = {a for a, p in zip(mesh.dim_names, placements, strict=False) if isinstance(p, Shard | Partial)}
    once = {a for m, a in axes if m is mesh} - cut
    return dtensor_from_local(_count_gradient_once(x, mesh, once) if once else x, mesh, placements, shape=shape)


def _count_gradient_once(x: Tensor, mesh: ProcessMesh, axes: set[str]) -> Tensor:
    at = mesh.coordinate(current_communicator().rank) if current_communicator().rank in mesh else {}
    out: Tensor = _GradientOnFirstRank.apply(x, not any(at.get(a) for a in axes))
    return out


class _GradientOnFirstRank(torch.autograd.Function):
    """The identity; the gradient passes on one rank and is zero on the others."""

    @staticmethod
    def forward(ctx: TorchValue, x: Tensor, passes: bool) -> Tensor:
        ctx.passes = passes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] if ctx.passes else torch.zeros_like(grads[0]), None


def _name(func: object) -> str:
    return str(getattr(func, "__name__", func))
