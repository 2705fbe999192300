"""Mixture of experts: each token goes to the experts that a router chose, and their results are summed with weights.

One device sorts rows by expert, so that the rows of each expert are contiguous. On a mesh, rows travel by all-to-all to
the ranks that hold their experts, and back (Lepikhin et al., GShard, 2020). All rows travel, or at most `capacity` per
expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.tensor import DistTensor, captured_whole

from .._errors import ExpertsError
from .experts_exchange import on_mesh
from .experts_rows import Routed, combined, experts_of, run_experts
from .experts_slots import SlottedExperts

Experts = Callable[..., Tensor]
"""`experts(rows, ends, *parameters)`: rows sorted by expert; `ends[i]` is the index after the last row of expert i."""


def dispatch_experts(
    tokens: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: Experts,
    parameters: Sequence[Tensor],
    *,
    capacity: int | None = None,
) -> Tensor:
    """Return, for each of `tokens` [..., d], the weighted sum of the results of its experts.

    `indices` [..., k] names the experts of a token, `weights` [..., k] their weights. `experts(rows, ends,
    *parameters)` returns one row for each row. The rows of expert i end at `ends[i]`, as for `F.grouped_mm`. After the
    last expert's rows there may be rows of no expert, whose results are ignored. The first dim of all `parameters`
    counts experts. Rows travel over the mesh axes that shard this dim, so a rank's `experts` gets the rows of its own
    experts and its part of their parameters. If tokens or parameters are sharded along other dims, rows and parameters
    are distributed tensors on the ranks that share them.

    An expert takes its first `capacity` rows in the order of the tokens, or all rows if `capacity` is None (dropless).
    Rows over the capacity, and indices of no expert, add nothing. The result has the layout of `tokens`, and the
    numbers of one device. In a static program, rows travel only with a capacity; without one, the program runs the
    single-device algorithm by the rules of its operators.

    Raises:
        ExpertsError: shapes do not fit, or random numbers are drawn for a rank's rows.

    >>> def product(rows, ends, w): return torch.nn.functional.grouped_mm(rows, w, offs=ends)
    >>> x, to, one = torch.ones(2, 4), torch.tensor([[0], [1]]), torch.ones(2, 1)
    >>> dispatch_experts(x, to, one, product, [torch.stack((torch.eye(4), 2 * torch.eye(4)))])[:, 0]
    tensor([1., 2.])
    """
    _check(tokens, indices, weights, parameters, capacity)
    every = (tokens, indices, weights, *parameters)
    routed = Routed(experts, capacity, parameters[0].shape[0], indices.shape[-1])
    note = next((told for x in every if (told := captured_whole(x)) is not None), None)
    if note is None and any(isinstance(x, DistTensor) for x in every):
        return on_mesh(routed, tokens, indices, weights, parameters)
    if note is None or capacity is None:
        return _on_one_device(routed, tokens, indices, weights, parameters)
    given = (tokens, indices, weights, list(parameters))
    return note(SlottedExperts(routed, _on_one_device), given, lambda: _on_one_device(routed, *given))


def _on_one_device(
    routed: Routed, tokens: Tensor, indices: Tensor, weights: Tensor, parameters: Sequence[Tensor]
) -> Tensor:
    """Run the experts with operators of fixed sizes only, as a static program needs; rows of no expert come last."""
    x = tokens.reshape(-1, tokens.shape[-1])
    ids = experts_of(indices, routed.count)
    order = ids.argsort(stable=True)
    ids = ids[order]
    numbers = torch.arange(routed.count, device=ids.device)
    if routed.capacity is not None:
        begins = torch.searchsorted(ids, torch.arange(routed.count + 1, device=ids.device))
        place = torch.arange(ids.shape[0], device=ids.device) - begins[ids]
        ids = torch.where(place < routed.capacity, ids, routed.count)
        again = ids.argsort(stable=True)
        order, ids = order[again], ids[again]
    taken = (ids < routed.count).unsqueeze(-1)
    ends = torch.searchsorted(ids, numbers, right=True).to(torch.int32)
    rows = torch.where(taken, x[order // routed.choices], 0)
    out = torch.where(taken, run_experts(routed, rows, ends, parameters), 0)
    found = combined(out[order.argsort()], weights.reshape(-1, routed.choices)).to(tokens.dtype)
    return found.reshape(*tokens.shape[:-1], found.shape[-1])


def _check(
    tokens: Tensor, indices: Tensor, weights: Tensor, parameters: Sequence[Tensor], capacity: int | None
) -> None:
    asked = f"dispatch_experts of tokens {tuple(tokens.shape)}"
    if not parameters or len({p.shape[:1] for p in parameters}) > 1 or not parameters[0].dim():
        raise ExpertsError(
            asked,
            f"parameters of shapes {[tuple(p.shape) for p in parameters]}",
            "dim 0 of every parameter must count the experts",
            "stack the parameters: pass at least one of shape [experts, ...]",
        )
    if indices.shape != weights.shape or indices.shape[:-1] != tokens.shape[:-1] or tokens.dim() < 2:
        raise ExpertsError(
            asked,
            f"indices {tuple(indices.shape)} and weights {tuple(weights.shape)}",
            "each token needs as many weights as indices",
            "pass tokens [..., d], indices [..., k] and weights [..., k]",
        )
    if capacity is not None and capacity < 1:
        raise ExpertsError(
            asked,
            f"a capacity of {capacity}",
            "each expert must take at least one row",
            "pass capacity=math.ceil(1.25 * indices.numel() / experts), or None for all rows",
        )
