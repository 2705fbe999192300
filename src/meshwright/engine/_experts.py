"""Experts: each token goes to the few of them that a router chose, and what they make of it is added up.

One device sorts rows by expert, so that each expert's stand together. On a mesh, rows travel to the ranks that hold
their experts and back, all to all (Lepikhin et al., GShard, 2020); as many as there are, or up to a capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.tensor import DistTensor, captured_whole

from ._errors import ExpertsError
from ._experts_fixed import Places
from ._experts_mesh import on_mesh
from ._experts_rows import Routed, combined, experts_of, run_experts

Experts = Callable[..., Tensor]
"""`experts(rows, ends, *parameters)`: rows of one expert after the other, `ends[i]` is where those of the i-th end."""


def dispatch_experts(
    tokens: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: Experts,
    parameters: Sequence[Tensor],
    *,
    capacity: int | None = None,
) -> Tensor:
    """For each of `tokens` [..., d], the sum of what its experts make of it, times their weights.

    `indices` [..., k] names the experts of a token, `weights` [..., k] how much each counts. `experts(rows, ends,
    *parameters)` makes one row of each row: those of expert i end at `ends[i]`, as for `F.grouped_mm`,
    and behind the last expert's may be rows of none, of which anything may be made. The first dim of all `parameters`
    counts experts; the mesh axes that cut it are those that rows travel over, so that a rank's `experts` sees the rows
    of its own experts and its part of their parameters. Where tokens or parameters are cut along other dims, rows and
    parameters are distributed tensors, on the ranks that share them.

    An expert takes the first `capacity` rows in the order of the tokens, or all rows where that is None (dropless);
    rows that it does not take, and indices of no expert, add nothing. The result lies as `tokens` do, with the numbers
    of one device. In a static program rows travel where there is a capacity, and without one it does what one device
    does, by the rules of operators. Raises ExpertsError for shapes that do not fit, and for random numbers that are
    drawn for a rank's rows.

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
    return note(Places(routed, _on_one_device), given, lambda: _on_one_device(routed, *given))


def _on_one_device(
    routed: Routed, tokens: Tensor, indices: Tensor, weights: Tensor, parameters: Sequence[Tensor]
) -> Tensor:
    """Operators of fixed sizes alone, so that a static program can hold them: rows of no expert stand behind."""
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
            asked, f"parameters of shapes {[tuple(p.shape) for p in parameters]}",
            "the first dim of every parameter counts the experts", "stacked parameters: [experts, ...], at least one",
        )  # fmt: skip
    if indices.shape != weights.shape or indices.shape[:-1] != tokens.shape[:-1] or tokens.dim() < 2:
        raise ExpertsError(
            asked, f"indices {tuple(indices.shape)} and weights {tuple(weights.shape)}",
            "each token has as many indices as weights", "tokens [..., d], indices [..., k], weights [..., k]",
        )  # fmt: skip
    if capacity is not None and capacity < 1:
        raise ExpertsError(
            asked, f"a capacity of {capacity}", "an expert that takes no row is none",
            "capacity=math.ceil(1.25 * indices.numel() / experts), or None for all rows",
        )  # fmt: skip
