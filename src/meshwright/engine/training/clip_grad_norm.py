"""Clip gradients by their total norm, also across meshes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from meshwright.fixed_order import in_same_numbers
from meshwright.tensor import DistTensor, renumber_gradients

from ..marks.tensors import unshard_dtensor


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Return the total norm of all gradients, and scale the gradients so that it is at most `max_norm`.

    The result is a plain tensor, equal on every rank. It is the norm before scaling. `torch.nn.utils.clip_grad_norm_`
    does the same for parameters on one mesh. Here parameters may be on several meshes, such as the stages of a
    pipeline. Every rank makes this call.

    Raises:
        RuntimeError: the norm is NaN or infinite and `error_if_nonfinite` is set; no gradient is changed.
    """
    owners = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    total = gradient_norm(owners, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of the gradients is {total.item()}, so no gradient was changed")
    clip_to(owners, max_norm, total)
    return total


def clip_to(owners: Iterable[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale gradients of the total norm `total` so that it is at most `max_norm`."""
    for each in _by_mesh(owners):
        clip_grads_with_norm_(each, max_norm, total)
        renumber_gradients(each, "the norm to which gradients are clipped", max_norm)


def gradient_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the total norm of all gradients, a plain tensor that is equal on every rank; every rank makes the call.

    Inside `same_numbers` it is the norm of the gradients' norms, whatever their meshes.
    """
    if in_same_numbers():
        grads = [p.grad for p in parameters if p.grad is not None]
        norms = [unshard_dtensor(torch.linalg.vector_norm(g, norm_type)).detach().float() for g in grads]
    else:
        norms = [_norm(each, norm_type) for each in _by_mesh(parameters)]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0, device="cpu")


def _by_mesh(owners: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    found: dict[Any, list[Tensor]] = {}
    for p in owners:
        found.setdefault(p.mesh if isinstance(p, DistTensor) else None, []).append(p)
    return found.values()


def _norm(owners: list[Tensor], norm_type: float) -> Tensor:
    grads = [p.grad for p in owners if p.grad is not None]
    if not grads:
        return torch.zeros((), device=owners[0].device)
    return unshard_dtensor(get_total_norm(grads, norm_type)).detach().float()
