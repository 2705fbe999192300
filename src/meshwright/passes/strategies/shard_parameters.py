"""ZeRO: parameters, gradients and optimizer states are sharded over the axes that shard the batch.

Stage 1 shards the states: each rank updates its shard of a parameter, and the shards are gathered. In stage 2, a rank
receives only its shard of the gradient. In stage 3, a rank keeps only its shard of the parameter, and gathers the
parameter before each use (Rajbhandari et al. 2020, ZeRO). All stages are layouts; the communication follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from meshwright.graph import Change, Draft, Input, Pass, Program, Value, map_values, register_pass
from meshwright.layout import Dim, Layout, Spec
from meshwright.tensor import ReshardMark


def batch_axes(program: Program) -> tuple[str, ...]:
    """Return the mesh axes that shard some batch input."""
    found = [a for i in program.inputs if i.role == "batch" and i.spec is not None for a in i.spec.layout.cut_axes]
    return tuple(dict.fromkeys(found))


def further_sharded(spec: Spec, axes: Iterable[str], least: int = 1024) -> Spec:
    """Return `spec` sharded also over those `axes` that it does not use yet.

    They shard the first dim that they divide evenly, otherwise the longest dim. `spec` is returned unchanged for a
    tensor of fewer than `least` elements, and if no dim gives each rank an element.
    """
    free = tuple(a for a in axes if a in spec.mesh.sizes and a not in spec.layout.axes)
    ranks = prod(spec.mesh.sizes[a] for a in free)
    if ranks == 1 or spec.shape.numel() < least or not spec.layout.is_simple:
        return spec
    at = _dim_to_shard(spec, ranks)
    if at is None:
        return spec
    dim = spec.layout.dims[at]
    assert isinstance(dim, tuple)  # the layout is simple
    dims = (*spec.layout.dims[:at], (*dim, *free), *spec.layout.dims[at + 1 :])
    return spec.with_layout(Layout(dims, spec.layout.partial))


def _dim_to_shard(spec: Spec, ranks: int) -> int | None:
    """Return the first dim that `ranks` times its shards divide evenly, otherwise the longest with as many elements."""
    pieces = [_held(spec, dim) * ranks for dim in spec.layout.dims]
    even = [at for at, n in enumerate(spec.shape) if n and n % pieces[at] == 0]
    if even:
        return even[0]
    long = [at for at, n in enumerate(spec.shape) if n >= pieces[at]]
    return max(long, key=spec.shape.__getitem__, default=None)


def _held(spec: Spec, dim: Dim) -> int:
    """Return the number of shards of a dim."""
    return prod(spec.mesh.sizes[a] for a in dim) if isinstance(dim, tuple) else 1


def further_sharded_specs(trained: Iterable[Input], axes: Iterable[str], least: int = 1024) -> Mapping[str, Spec]:
    """Return the specs of the states by parameter, for parameters that can be sharded further."""
    axes = tuple(axes)
    found = {i.name: further_sharded(i.spec, axes, least) for i in trained if i.spec is not None}
    return {i.name: found[i.name] for i in trained if i.name in found and found[i.name] is not i.spec}


@register_pass
@dataclass(frozen=True)
class ShardParameters(Pass):
    """ZeRO stage 3 on a captured program: parameters are sharded over `axes`, and gathered along them before use.

    The default `axes` are those that shard some batch input. Results do not change, because a conversion changes no
    element, and its gradient is the transposed conversion: for the gather, a reduce-scatter.
    """

    name: ClassVar[str] = "shard_parameters"
    keeps_sums: ClassVar[bool] = True
    axes: tuple[str, ...] | None = None
    least: int = 1024

    def run(self, program: Program) -> Program:
        axes = batch_axes(program) if self.axes is None else self.axes
        draft = Draft(program)
        cut: dict[str, Spec] = {}
        changes: list[Change] = []
        for given in program.inputs:
            if given.role != "parameter" or given.spec is None:
                continue
            spec = further_sharded(given.spec, axes, self.least)
            if spec is given.spec:
                continue
            cut[given.name] = spec
            self._gather(draft, given, axes)
            freed = given.spec.nbytes / _pieces(given.spec) - spec.nbytes / _pieces(spec)
            changes.append(Change(self.name, f"kept as {spec!r}", given.name, {"bytes": freed}))
        out = draft.finish(*changes)
        inputs = tuple(replace(i, spec=cut.get(i.name, i.spec)) if i.role == "parameter" else i for i in out.inputs)
        specs = {**out.specs, **{i.value: i.spec for i in inputs if i.name in cut and i.spec is not None}}
        return replace(out, inputs=inputs, specs=specs)

    def _gather(self, draft: Draft, given: Input, axes: Sequence[str]) -> None:
        assert given.spec is not None
        users = draft.users(given.value)
        if not users:
            return
        v = given.value
        whole = Value(draft.names.fresh(f"{v.name}_whole"), v.shape, v.dtype, v.device)
        layout = replace(given.spec.layout, varying=tuple(a for a in axes if a not in given.spec.layout.axes))
        origin = replace(users[0].origin, grad=True)  # the first reader may run without gradients
        draft.add_as(ReshardMark(given.spec.mesh, layout), (v,), {}, whole, users[0], origin)
        for spot in users:
            args, kwargs = map_values(lambda u: whole if u is v else u, (spot.args, spot.kwargs))
            draft.set_args(spot, args, kwargs)


def _pieces(spec: Spec) -> int:
    return prod(spec.mesh.sizes[a] for a in spec.layout.cut_axes)
