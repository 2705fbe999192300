"""Send rows to the ranks that hold their experts, and back.

Each axis of the mesh has one of three roles. Axes that shard the experts carry rows. Axes that shard only tokens have
replicas of every expert, and their ranks have terms of the experts' gradients. Along all other axes, ranks share rows
and experts; tensors stay distributed there, so that experts may be sharded inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Dim, Layout, ProcessMesh, Product, Spec, TorchValue, axes_of, replicated
from meshwright.tensor import DistTensor, as_dist_tensor, distribute_as, local_parts, redistribute

from .default_mesh import resolve_mesh
from .experts_rows import Routed, combined, experts_of, run_experts_without_random


@dataclass(frozen=True)
class Roles:
    """The axes that shard experts, and the axes that shard tokens, in this order; the latter include the former."""

    mesh: ProcessMesh
    experts: tuple[str, ...]
    tokens: tuple[str, ...]

    @cached_property
    def inner(self) -> tuple[str, ...]:
        """Return the axes along which ranks share rows and experts."""
        return tuple(a for a in self.mesh.dim_names if a not in self.tokens)

    @cached_property
    def inside(self) -> ProcessMesh | None:
        """Return the mesh of the ranks that share this rank's rows and experts."""
        rank = current_communicator().rank
        return self.mesh.get_submesh(self.inner, rank) if self.inner and rank in self.mesh else None

    def of_tokens(self, layout: Layout) -> Layout:
        """Return the layout of tokens, or of values per token, sharded along the token axes."""
        return Layout((self.tokens, *(self._free(d) for d in layout.dims[1:])))

    def of_parameter(self, layout: Layout) -> Layout:
        varying = (a for a in self.tokens if a not in self.experts)
        return Layout((self.experts, *(self._free(d) for d in layout.dims[1:])), varying=tuple(varying))

    def _free(self, dim: Dim) -> tuple[str, ...]:
        return () if isinstance(dim, Product) else tuple(a for a in dim if a in self.inner)

    def enter(self, x: DistTensor, keep: bool) -> Tensor:
        """Return this rank's rows of `x`: a distributed tensor on the inner ranks if `keep`, else a plain one."""
        local = x.to_local()
        if not keep or self.inside is None:
            return local
        layout = Layout(((), *x.spec.layout.dims[1:]))
        with local_parts():
            rows = local.shape[0]
        return as_dist_tensor(local, Spec(self.inside, layout, (rows, *x.spec.shape[1:]), x.dtype))

    def alike(self, made: Tensor, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return the experts' results in one layout for all ranks; ranks with few rows may have computed another one.

        Partial sums are reduced only after the results of each token have been added up.
        """
        if not isinstance(made, DistTensor) or not isinstance(x, DistTensor):
            return made
        last = axes_of(x.spec.layout.dims[1])
        cuts = {a for p in parameters if isinstance(p, DistTensor) for a in p.spec.layout.cut_axes}
        terms = tuple((a, "sum") for a in self.inner if a in cuts and a not in last)
        return redistribute(made, made.mesh, Layout(((), last), terms))

    def leave(self, out: Tensor, rows: int, last: tuple[str, ...]) -> DistTensor:
        """Return the global tensor of which `out` is this rank's rows; the axes `last` shard its features."""
        if isinstance(out, DistTensor):
            out = redistribute(out, out.mesh, Layout(((), last))).to_local()
        layout = Layout((self.tokens, last))
        features = out.shape[1] * prod(self.mesh.sizes[a] for a in last)
        return as_dist_tensor(out, Spec(self.mesh, layout, (rows, features), out.dtype))


def on_mesh(
    routed: Routed, tokens: Tensor, indices: Tensor, weights: Tensor, parameters: Sequence[Tensor]
) -> DistTensor:
    """Return the results of the experts for the tokens, in the layout of the tokens."""
    mesh = resolve_mesh(next(x.mesh for x in (*parameters, tokens, indices, weights) if isinstance(x, DistTensor)))
    flat = [as_distributed(x.reshape(-1, x.shape[-1]), mesh) for x in (tokens, indices, weights)]
    held = [as_distributed(p, mesh) for p in parameters]
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


def as_distributed(x: Tensor, mesh: ProcessMesh) -> DistTensor:
    """Return `x` as a distributed tensor; a plain `x` is whole on every rank."""
    return x if isinstance(x, DistTensor) else distribute_as(x, mesh, replicated(x.dim()))


def roles_of(mesh: ProcessMesh, tokens: DistTensor, parameter: DistTensor) -> Roles:
    """Return the roles of the axes, from the layouts of the tokens [rows, d] and of a parameter of all experts."""
    experts = axes_of(parameter.spec.layout.dims[0])
    cuts = tokens.spec.layout.dims[0]
    rows = axes_of(cuts) if tokens.mesh is mesh else ()
    return Roles(mesh, experts, (*rows, *(a for a in experts if a not in rows)))


def _dispatched(
    routed: Routed, roles: Roles, indices: Tensor, x: Tensor, scores: Tensor, parameters: Sequence[Tensor]
) -> Tensor:
    """Return the results of all ranks' experts for this rank's tokens."""
    ids = experts_of(indices, routed.count)
    order = ids.argsort(stable=True)
    trip = _row_counts(routed, roles, torch.bincount(ids, minlength=routed.count + 1)[: routed.count].tolist())
    place = _rows_sent(trip.mine, trip.sent, ids.device)
    order = order[place]
    rows = x.index_select(0, order // routed.choices)
    rows = _exchange_rows(rows, trip.group, trip.out, trip.back)
    by_expert = _by_expert(trip.received, ids.device)
    rows = rows.index_select(0, by_expert)
    ends = list(accumulate(map(sum, zip(*trip.received, strict=True))))
    made = run_experts_without_random(
        routed, rows, torch.tensor(ends, dtype=torch.int32, device=ids.device), parameters
    )
    if not rows.shape[0]:
        made = _still_connected(made, rows, parameters)
    made = roles.alike(made, x, parameters).index_select(0, by_expert.argsort())
    made = _exchange_rows(made, trip.group, trip.back, trip.out)
    return combined(_put_back(made, order, ids.shape[0]), scores)


@dataclass(frozen=True, slots=True)
class _RowCounts:
    """The row counts of one exchange: rows per expert on this rank, rows sent, and rows received from the group.

    `mine[i]` is the number of this rank's rows for expert i, `sent[i]` the number of those that are sent. `out[s]` rows
    go to the s-th rank of the group, and `back[s]` rows come from it. `received[s][i]` is the number of rows that come
    from the s-th rank for this rank's i-th expert.
    """

    group: tuple[int, ...]
    mine: list[int]
    sent: list[int]
    out: list[int]
    back: list[int]
    received: list[list[int]]


def _row_counts(routed: Routed, roles: Roles, mine: list[int]) -> _RowCounts:
    """Return the row counts of the exchange. With a capacity, all ranks of the tokens' axes gather their row counts.

    Only with these counts is it known which rows an expert takes.
    """
    here = current_communicator()
    if here.rank not in roles.mesh:
        return _RowCounts((here.rank,), mine, mine, [0], [0], [[]])
    group = roles.mesh.group(here.rank, roles.experts)
    tellers = group if routed.capacity is None else roles.mesh.group(here.rank, roles.tokens)
    counts = here.all_gather(torch.tensor(mine, device="cpu"), tellers, [(routed.count,)] * len(tellers))
    told = dict(zip(tellers, counts, strict=True))
    taken = told if routed.capacity is None else _rows_within_capacity(told, routed.capacity)
    spans = [_span(roles, routed.count, rank) for rank in group]
    own = spans[group.index(here.rank)]
    sent = taken[here.rank].tolist()
    received = [taken[rank][own].tolist() for rank in group]
    return _RowCounts(group, mine, sent, [sum(sent[s]) for s in spans], [sum(n) for n in received], received)


def _rows_within_capacity(told: dict[int, Tensor], capacity: int) -> dict[int, Tensor]:
    """Return the number of each rank's rows that experts take, rank by rank in the order of the tokens."""
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
    """Return the indices of the rows that are sent, in the order of their experts: the first rows of each expert."""
    begins = accumulate(mine, initial=0)
    spans = [torch.arange(b, b + n, device=device) for b, n in zip(begins, sent, strict=False)]
    return torch.cat(spans) if spans else torch.arange(0, device=device)


def _by_expert(received: list[list[int]], device: torch.device) -> Tensor:
    """Return the permutation that sorts rows, received rank by rank, by expert."""
    numbers = torch.arange(len(received[0]), device=device).repeat(len(received))
    counts = torch.tensor([n for each in received for n in each], dtype=torch.int64, device=device)
    return numbers.repeat_interleave(counts).argsort(stable=True)


def _put_back(made: Tensor, order: Tensor, rows: int) -> Tensor:
    """Return the results of the rows in `order`, each at its row's place; zero for rows that were not taken."""
    missing = made.shape[0] < rows
    where = torch.full((rows,), made.shape[0], device=order.device)
    where[order] = torch.arange(order.shape[0], device=order.device)
    return (torch.cat((made, made.new_zeros(1, made.shape[1]))) if missing else made).index_select(0, where)


def _still_connected(made: Tensor, rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return `made`, which has no rows, connected in autograd to all inputs of the experts.

    Every rank then takes part in the same communication of the backward pass.
    """
    nothing = [p[:0].sum() for p in parameters if p.is_floating_point()]
    return made + (rows.sum() + sum(nothing)).to(made.dtype)


def _exchange_rows(rows: Tensor, group: tuple[int, ...], out: list[int], back: list[int]) -> Tensor:
    """Return the rows received from the group: `out[i]` rows go to the i-th rank, and `back[i]` rows come from it."""
    if len(group) == 1:
        return rows
    sent = rows.to_local() if isinstance(rows, DistTensor) else rows
    received: Tensor = _RowExchange.apply(sent, group, out, back)
    if not isinstance(rows, DistTensor):
        return received
    spec = rows.spec
    return as_dist_tensor(received, Spec(spec.mesh, spec.layout, (sum(back), *spec.shape[1:]), spec.dtype))


class _RowExchange(torch.autograd.Function):
    """All-to-all of rows; the gradients travel in the opposite direction."""

    @staticmethod
    def forward(ctx: TorchValue, rows: Tensor, group: tuple[int, ...], out: list[int], back: list[int]) -> Tensor:
        ctx.route = group, back, out
        shapes = [(n, *rows.shape[1:]) for n in back]
        return torch.cat(current_communicator().all_to_all(list(rows.split(out)), shapes, group))

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _RowExchange.apply(grads[0], *ctx.route), None, None, None
