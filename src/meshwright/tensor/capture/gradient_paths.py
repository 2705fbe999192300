"""The operands of a call for which each result has a gradient, as determined by torch's autograd.

A rank outside the mesh computes nothing, so its results need these operands to be linked in the autograd graph.
`torch.zeros_like(x)` has a gradient for none, and `a.expand_as(b)` for `a` only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..core.tree import map_tensors, tensors_in
from ..torch_hooks import imagining, no_interception, no_modes
from .call_capture import sizes_of, spec_if_distributed

Paths = tuple[frozenset[int], ...]
"""For each result, the indices of the operands that it has a gradient for, among the tensors of the call."""


def gradient_paths(func: TorchFunction, args: Arguments, kwargs: NamedArguments) -> Paths | None:
    """Return the paths of a call; None if torch cannot carry it out without values."""
    tensors = list(tensors_in((args, kwargs)))
    try:
        found = [_results_behind(func, args, kwargs, n) for n, t in enumerate(tensors) if _is_differentiable(t)]
    except Exception:  # torch refuses tensors without values, in many ways
        return None
    return tuple(frozenset(n for n, behind in found if behind[k]) for k in range(len(found[0][1]))) if found else None


def _is_differentiable(x: Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def _results_behind(
    func: TorchFunction, args: Arguments, kwargs: NamedArguments, place: int
) -> tuple[int, Sequence[bool]]:
    """Return `place`, and for each result whether it requires a gradient if only the operand at `place` does.

    Hooks of the caller do not see what autograd saves here: `torch.utils.checkpoint` counts what a call saves.
    """
    left = iter(range(len(list(tensors_in((args, kwargs))))))

    def stand_in(x: Tensor) -> Tensor:
        like = spec_if_distributed(x) or x
        made = torch.empty(like.shape, dtype=like.dtype, device="meta")
        return made.requires_grad_().view_as(made) if next(left) == place else made

    hidden = saved_tensors_hooks(lambda x: x, lambda x: x)
    shapes = imagining(sizes_of(args, kwargs, spec_if_distributed))
    with no_modes(), shapes, no_interception(), torch.enable_grad(), hidden:
        out = func(*map_tensors(stand_in, args), **map_tensors(stand_in, kwargs))
        return place, [t.requires_grad for t in tensors_in(out)]
