"""Rows that travel to the ranks that hold their experts, and back.

Axes of the mesh have one of three roles. Those that cut the experts carry rows; those that cut only tokens have every
expert once more, in whose gradients their ranks have terms; along all others the ranks share rows and experts, and
tensors there stay distributed, so that experts may be cut inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import current
from meshwright.layout import Layout, ProcessMesh, Product, Spec, axes_of, replicated
from meshwright.tensor import DistTensor, local_parts, place, present, redistribute

from ._experts_rows import Routed, combined, experts_of, without_chance
from ._mesh import resolve_mesh


@dataclass(frozen=True)
class Roles:
    """Which axes cut experts, and which cut tokens, in this order; the latter include the former."""

    mesh: ProcessMesh
    experts: tuple[str, ...]
    tokens: tuple[str, ...]

    @cached_property
    def inner(self) -> tuple[str, ...]:
        """Axes along which ranks share rows and experts."""
        return tuple(a for a in self.mesh.dim_names if a not in self.tokens)

    @cached_property
    def inside(self) -> ProcessMesh | None:
        """The ranks that share this rank's rows and experts."""
        rank = current().rank
        return self.mesh.get_submesh(self.inner, rank) if self.inner and rank in self.mesh else None

    def of_tokens(self, layout: Layout) -> Layout:
        """The layout of tokens, or of what stands beside them, that is cut as roles say."""
        return Layout((self.tokens, *(self._free(d) for d in layout.dims[1:])))

    def of_parameter(self, layout: Layout) -> Layout:
        varying = (a for a in self.tokens if a not in self.experts)
        return Layout((self.experts, *(self._free(d) for d in layout.dims[1:])), varying=tuple(varying))

    def _free(self, dim: Any) -> tuple[str, ...]:
        return () if isinstance(dim, Product) else tuple(a for a in dim if a in self.inner)

    def enter(self, x: DistTensor, keep: bool) -> Tensor:
        """This rank's rows of `x`; a tensor of the ranks inside where such are to be kept."""
        local = x.to_local()
        if not keep or self.inside is None:
            return local
        layout = Layout(((), *x.spec.layout.dims[1:]))
        with local_parts():
            rows = local.shape[0]
        return present(local, Spec(self.inside, layout, (rows, *x.spec.shape[1:]), x.dtype))

    def alike(self, made: Tensor, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """What experts made, laid the same way on all ranks that it goes to: ranks with few rows may lay it otherwise.

        Terms wait until those of one token have been added up.
        """
        if not isinstance(made, DistTensor) or not isinstance(x, DistTensor):
            return made
        last = axes_of(x.spec.layout.dims[1])
        cuts = {a for p in parameters if isinstance(p, DistTensor) for a in p.spec.layout.cut_axes}
        terms = tuple((a, "sum") for a in self.inner if a in cuts and a not in last)
        return redistribute(made, made.mesh, Layout(((), last), terms))

    def leave(self, out: Tensor, rows: int, last: tuple[str, ...]) -> DistTensor:
        """The tensor of all ranks of which `out` is this rank's rows; `last` cuts its features."""
        if isinstance(out, DistTensor):
            out = redistribute(out, out.mesh, Layout(((), last))).to_local()
        layout = Layout((self.tokens, last))
        features = out.shape[1] * prod(self.mesh.sizes[a] for a in last)
        return present(out, Spec(self.mesh, layout, (rows, features), out.dtype))


def on_mesh(
    routed: Routed, tokens: Tensor, indices: Tensor, weights: Tensor, parameters: Sequence[Tensor]
) -> DistTensor:
    """What the experts make of tokens, which lies as those do."""
    mesh = resolve_mesh(next(x.mesh for x in (*parameters, tokens, indices, weights) if isinstance(x, DistTensor)))
    flat = [laid(x.reshape(-1, x.shape[-1]), mesh) for x in (tokens, indices, weights)]
    held = [laid(p, mesh) for p in parameters]
    home = flat[0]
    roles = roles_of(mesh, home, held[0])
    x = redistribute(flat[0], mesh, roles.of_tokens(home.spec.layout))
    ids, scores = (redistribute(t, mesh, Layout((roles.tokens, ()))) for t in flat[1:])
    own = [redistribute(p, mesh, roles.of_parameter(p.spec.layout)) for p in held]
    keep = any(set(t.spec.layout.cut_axes) & set(roles.inner) for t in (x, *own))
    here, beside, *given = (roles.enter(t, keep) for t in (x, scores, *own))
    found = _dispatched(routed, roles, ids.to_local(), here, beside, given).to(x.dtype)
    (_, last), rows = x.spec.layout.dims, home.spec.layout.dims[0]
    out = roles.leave(found, home.spec.shape[0], axes_of(last))
    back = redistribute(out, home.mesh, Layout((rows, last if home.mesh is mesh else ())))
    return back.reshape(*tokens.shape[:-1], out.shape[-1])  # pyright: ignore[reportReturnType] - of a DistTensor


def laid(x: Tensor, mesh: ProcessMesh) -> DistTensor:
    """`x`, which every rank has whole where it is not distributed."""
    return x if isinstance(x, DistTensor) else place(x, mesh, replicated(x.dim()))


def roles_of(mesh: ProcessMesh, tokens: DistTensor, parameter: DistTensor) -> Roles:
    """What the axes are for, by how tokens [rows, d] and a parameter of all experts lie."""
    experts = axes_of(parameter.spec.layout.dims[0])
    cuts = tokens.spec.layout.dims[0]
    rows = axes_of(cuts) if tokens.mesh is mesh else ()
    return Roles(mesh, experts, (*rows, *(a for a in experts if a not in rows)))


def _dispatched(
    routed: Routed, roles: Roles, indices: Tensor, x: Tensor, scores: Tensor, parameters: Sequence[Tensor]
) -> Tensor:
    """This rank's tokens, through the experts of all ranks."""
    ids = experts_of(indices, routed.count)
    order = ids.argsort(stable=True)
    trip = _trip(routed, roles, torch.bincount(ids, minlength=routed.count + 1)[: routed.count].tolist())
    place = _rows_sent(trip.mine, trip.sent, ids.device)
    order = order[place]
    rows = x.index_select(0, order // routed.choices)
    rows = _travel(rows, trip.group, trip.out, trip.back)
    by_expert = _by_expert(trip.received, ids.device)
    rows = rows.index_select(0, by_expert)
    ends = list(accumulate(map(sum, zip(*trip.received, strict=True))))
    made = without_chance(routed, rows, torch.tensor(ends, dtype=torch.int32, device=ids.device), parameters)
    if not rows.shape[0]:
        made = _still_connected(made, rows, parameters)
    made = roles.alike(made, x, parameters).index_select(0, by_expert.argsort())
    made = _travel(made, trip.group, trip.back, trip.out)
    return combined(_put_back(made, order, ids.shape[0]), scores)


@dataclass(frozen=True, slots=True)
class _Trip:
    """How many rows this rank has for each expert, how many of those it sends, and what the ranks of a group send it.

    `received[s][i]` are the rows of the s-th rank of the group for this rank's i-th expert.
    """

    group: tuple[int, ...]
    mine: list[int]
    sent: list[int]
    out: list[int]
    back: list[int]
    received: list[list[int]]


def _trip(routed: Routed, roles: Roles, mine: list[int]) -> _Trip:
    """All ranks that tokens come from tell how many rows they have: only so it is known which ones experts take."""
    here = current()
    if here.rank not in roles.mesh:
        return _Trip((here.rank,), mine, mine, [0], [0], [[]])
    group = roles.mesh.group(here.rank, roles.experts)
    tellers = group if routed.capacity is None else roles.mesh.group(here.rank, roles.tokens)
    counts = here.all_gather(torch.tensor(mine), tellers, [(routed.count,)] * len(tellers))
    told = dict(zip(tellers, counts, strict=True))
    taken = told if routed.capacity is None else _taken(told, routed.capacity)
    spans = [_span(roles, routed.count, rank) for rank in group]
    own = spans[group.index(here.rank)]
    sent = taken[here.rank].tolist()
    received = [taken[rank][own].tolist() for rank in group]
    return _Trip(group, mine, sent, [sum(sent[s]) for s in spans], [sum(n) for n in received], received)


def _taken(told: dict[int, Tensor], capacity: int) -> dict[int, Tensor]:
    """How many of each rank's rows experts take, the ranks in the order of the tokens."""
    before = torch.zeros_like(next(iter(told.values())))
    taken: dict[int, Tensor] = {}
    for rank, count in told.items():
        taken[rank] = torch.minimum(count, (capacity - before).clamp(min=0))
        before = before + count
    return taken


def _span(roles: Roles, count: int, rank: int) -> slice:
    spec = Spec(roles.mesh, Layout((roles.experts,)), (count,), torch.int64)
    ((start, length),) = spec.local_ranges(rank)
    return slice(start, start + length)


def _rows_sent(mine: list[int], sent: list[int], device: torch.device) -> Tensor:
    """Which of the rows, in the order of their experts, are sent: the first ones of each expert."""
    begins = accumulate(mine, initial=0)
    spans = [torch.arange(b, b + n, device=device) for b, n in zip(begins, sent, strict=False)]
    return torch.cat(spans) if spans else torch.arange(0, device=device)


def _by_expert(received: list[list[int]], device: torch.device) -> Tensor:
    """The order that brings rows that came rank by rank together by expert."""
    numbers = torch.arange(len(received[0]), device=device).repeat(len(received))
    counts = torch.tensor([n for each in received for n in each], dtype=torch.int64, device=device)
    return numbers.repeat_interleave(counts).argsort(stable=True)


def _put_back(made: Tensor, order: Tensor, rows: int) -> Tensor:
    """What was made of the rows in `order`, each where it came from; zero for those that were not taken."""
    missing = made.shape[0] < rows
    where = torch.full((rows,), made.shape[0], device=order.device)
    where[order] = torch.arange(order.shape[0], device=order.device)
    return (torch.cat((made, made.new_zeros(1, made.shape[1]))) if missing else made).index_select(0, where)


def _still_connected(made: Tensor, rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """`made`, of no rows, behind everything that other ranks' results are made of: all go the same way back."""
    nothing = [p[:0].sum() for p in parameters if p.is_floating_point()]
    return made + (rows.sum() + sum(nothing)).to(made.dtype)


def _travel(rows: Tensor, group: tuple[int, ...], out: list[int], back: list[int]) -> Tensor:
    """The rows that come from each rank of the group, where `out[i]` go to the i-th and `back[i]` come from it."""
    if len(group) == 1:
        return rows
    if not isinstance(rows, DistTensor):
        return _Travel.apply(rows, group, out, back)  # pyright: ignore[reportReturnType] - untyped in torch
    local: Any = _Travel.apply(rows.to_local(), group, out, back)
    spec = rows.spec
    return present(local, Spec(spec.mesh, spec.layout, (sum(back), *spec.shape[1:]), spec.dtype))


class _Travel(torch.autograd.Function):
    """All to all of rows; gradients go back the way that rows came."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: tuple[int, ...], out: list[int], back: list[int]) -> Tensor:
        ctx.way = group, back, out
        shapes = [(n, *rows.shape[1:]) for n in back]
        return torch.cat(current().all_to_all(list(rows.split(out)), shapes, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Travel.apply(grads[0], *ctx.way), None, None, None
