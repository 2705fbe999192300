"""Experts with a capacity in a static program: each expert has a slot for each row it may take, so sizes are fixed.

The slots are a sum of terms from the tokens' ranks, reduced on the ranks that hold the experts. The results for tokens
are again a sum of terms. Ranks along axes that shard only tokens divide the slots of each expert among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Layout, Spec, replicated
from meshwright.tensor import DistTensor, as_dist_tensor, redistribute

from .experts_exchange import Roles, as_distributed, roles_of
from .experts_rows import Routed, combined, experts_of, run_experts


@dataclass(frozen=True, slots=True)
class SlottedExperts:
    """The call as an operator of a program; `otherwise` runs it if experts are sharded inside."""

    routed: Routed
    otherwise: Callable[..., Tensor]

    def __call__(self, tokens: Tensor, indices: Tensor, weights: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        known = [x for x in (*parameters, tokens, indices, weights) if isinstance(x, DistTensor)]
        if not known or any(x.mesh is not known[0].mesh for x in known):
            return self.otherwise(self.routed, tokens, indices, weights, parameters)
        mesh = known[0].mesh
        x, ids, scores = (as_distributed(t.reshape(-1, t.shape[-1]), mesh) for t in (tokens, indices, weights))
        own = [as_distributed(p, mesh) for p in parameters]
        roles = roles_of(mesh, x, own[0])
        own = [redistribute(p, mesh, roles.of_parameter(p.spec.layout)) for p in own]
        if any(set(p.spec.layout.cut_axes) - set(roles.experts) for p in own):
            return self.otherwise(self.routed, tokens, indices, weights, parameters)
        ids = redistribute(ids, mesh, replicated(2)).to_local()
        found = _partial_results(self.routed, roles, x, experts_of(ids, self.routed.count), scores, own).to(x.dtype)
        found = redistribute(found, mesh, Layout((x.spec.layout.dims[0], ())))
        return found.reshape(*tokens.shape[:-1], found.shape[-1])

    def __repr__(self) -> str:
        return f"dispatch_experts of {self.routed.name}, {self.routed.capacity} rows each"


def _partial_results(
    routed: Routed, roles: Roles, x: DistTensor, ids: Tensor, scores: DistTensor, parameters: Sequence[DistTensor]
) -> Any:
    """Return the results for the tokens, as a pending sum over all ranks of the tokens' axes."""
    capacity = routed.capacity or 0
    ids, order = ids.sort(stable=True)
    begins = torch.searchsorted(ids, torch.arange(routed.count + 1, device=ids.device))
    at = torch.arange(ids.shape[0], device=ids.device) - begins[ids]
    none = routed.count * capacity
    slots = torch.where((at < capacity) & (ids < routed.count), ids * capacity + at, none)
    source = torch.full((none + 1,), ids.shape[0], device=ids.device).scatter(0, slots, order)[:none]
    rows = x.index_select(0, (source // routed.choices).clamp(max=x.shape[0] - 1))
    rows = torch.where((source < ids.shape[0]).unsqueeze(-1), rows, 0).unflatten(0, (routed.count, capacity))
    sharing = tuple(a for a in roles.tokens if a not in roles.experts)
    lies = Layout((roles.experts, sharing, ()))
    rows = redistribute(rows, roles.mesh, lies)  # pyright: ignore[reportArgumentType] - made of a DistTensor
    made = _slot_results(routed, rows.to_local(), [p.to_local() for p in parameters])
    mine = _own_slots(rows.spec, slots[order.argsort()], capacity, tuple(made.shape))
    terms = torch.constant_pad_nd(made.flatten(0, 1), [0, 0, 0, 1]).index_select(0, mine)
    is_mine = (mine < made.shape[0] * made.shape[1]).view(-1, routed.choices)
    weights = torch.where(is_mine, _local_everywhere(scores, roles).to_local(), 0)
    found = combined(terms, weights)  # before the sum over ranks: infinite weights would make NaN of its terms
    waits = Layout(((), ()), tuple((a, "sum") for a in roles.tokens))
    return as_dist_tensor(found, Spec(roles.mesh, waits, found.shape, found.dtype))


def _local_everywhere(x: DistTensor, roles: Roles) -> DistTensor:
    """Return the whole value, of which each rank of the tokens' axes uses its own rows."""
    return redistribute(x, roles.mesh, Layout(((),) * x.dim(), varying=roles.tokens))


def _slot_results(routed: Routed, rows: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the results of a rank's experts for the rows in its slots [experts, places, features]."""
    experts, places = rows.shape[:2]
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=rows.device) * places
    return run_experts(routed, rows.flatten(0, 1), ends, parameters).unflatten(0, (experts, places))


def _own_slots(spec: Spec, slots: Tensor, capacity: int, shape: tuple[int, ...]) -> Tensor:
    """Return the index of each row's slot on this rank.

    Rows that are elsewhere, or in no slot, get the index after the last slot.
    """
    here = current_communicator()
    expert, at = slots // capacity - here.offset(spec, 0), slots % capacity - here.offset(spec, 1)
    mine = (expert >= 0) & (expert < shape[0]) & (at >= 0) & (at < shape[1])
    return torch.where(mine, expert * shape[1] + at, shape[0] * shape[1])
