"""Rows of experts, on one device and on a rank: their order, and the calls of the experts' function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.layout import generator_state
from meshwright.tensor import DistTensor

from .._errors import ExpertsError


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts' function, its capacity (None: all rows), the number of experts, and the experts per token."""

    experts: Callable[..., Tensor]
    capacity: int | None
    count: int
    choices: int

    @property
    def name(self) -> str:
        return str(getattr(self.experts, "__name__", self.experts))


def experts_of(indices: Tensor, count: int) -> Tensor:
    """Return the expert of each row, token by token; `count` for no expert."""
    ids = indices.reshape(-1)
    return torch.where((ids >= 0) & (ids < count), ids, count)


def run_experts(routed: Routed, rows: Tensor, ends: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the results of the experts' function, one row per row. Raises ExpertsError for other results."""
    name = routed.name
    out = routed.experts(rows, ends, *parameters)
    if not isinstance(out, Tensor) or out.dim() != 2 or out.shape[0] != rows.shape[0]:  # pyright: ignore[reportUnnecessaryIsInstance] - a user's function
        found: object = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__  # pyright: ignore[reportUnnecessaryIsInstance] - as above
        raise ExpertsError(
            f"experts {name} of rows {tuple(rows.shape)}",
            f"{found}",
            "the function must return one row for each row",
            f"return a tensor of shape ({rows.shape[0]}, features)",
        )
    if isinstance(out, DistTensor) and not isinstance(rows, DistTensor):
        raise ExpertsError(
            f"experts {name} of rows {tuple(rows.shape)}",
            f"a distributed result {out.spec!r}",
            "the function used a distributed tensor together with the rows of this rank",
            "pass every tensor that has a part for each expert as one of the parameters",
        )
    return out


def run_experts_without_random(routed: Routed, rows: Tensor, ends: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Call `run_experts` for rows of one rank. Raises ExpertsError if random numbers are drawn for them."""
    devices = dict.fromkeys(("cpu", str(rows.device)))
    before = [generator_state(device) for device in devices]
    out = run_experts(routed, rows, ends, parameters)
    if any(not torch.equal(a, b) for a, b in zip(before, map(generator_state, devices), strict=True)):
        raise ExpertsError(
            f"experts {routed.name} of rows {tuple(rows.shape)}",
            "random numbers drawn inside the function",
            "the rows of a rank depend on the mesh, so the random numbers would, too",
            "apply dropout to the tokens before the call, or to the result after the call",
        )
    return out


def combined(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over each token's rows, times their weights."""
    return (rows.unflatten(0, (-1, weights.shape[-1])) * weights.unsqueeze(-1)).sum(1)
