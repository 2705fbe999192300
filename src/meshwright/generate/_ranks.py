"""Generation on the ranks that a model is on; the other ranks wait for the result only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint import World, current_world
from meshwright.comm import among_ranks
from meshwright.engine import check_equal_options
from meshwright.layout import MeshwrightError
from meshwright.tensor import DistTensor

from ._errors import GenerationError

ASKED = "tokens of a model on several ranks"
Tokens = tuple[Tensor, Tensor, int]
"""Tokens and log-probabilities [r, t] of all rows, and the number of the weights."""


def ranks_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ranks that hold parts of the model; all ranks for a model without distributed tensors."""
    tensors = (*model.parameters(), *model.buffers())
    meshes = {x.mesh for x in tensors if isinstance(x, DistTensor)}
    ranks = {rank for mesh in meshes for rank in mesh.process_ids}
    return tuple(sorted(ranks)) or current_world().ranks


def made_by(
    ranks: tuple[int, ...],
    make: Callable[[], Tokens],
    shape: tuple[int, int],
    device: torch.device,
    options: Mapping[str, object],
) -> Tokens:
    """Return the tokens of this shape that `make` returns on `ranks`, on every rank of the world.

    An error of `make` is raised on every rank; on the other ranks as a GenerationError.

    Raises:
        DisagreementError: the options of the call differ between ranks.
    """
    world = current_world()
    if world.ranks == ranks:
        return make()
    made, error = None, None
    if world.rank in ranks:
        with among_ranks(ranks):
            made, error = _attempt(make)
    version = None if made is None else made[2]
    told: list[Any] = world.gathered(version if error is None else _parts_of(error))
    for rank, other in zip(world.ranks, told, strict=True):
        if isinstance(other, list):
            raise error if error is not None else _told_error(other, rank)
    check_equal_options(ASKED, options, world)
    tokens_rt, log_probs_rt = _sent(made, world, (2, *shape), ranks[0]).to(device).unbind(0)
    return tokens_rt.long(), log_probs_rt.float(), told[world.ranks.index(ranks[0])]


def _sent(made: Tokens | None, world: World, shape: tuple[int, ...], source: int) -> Tensor:
    """Return the tokens and log-probabilities of the rank `source`, stacked on the host of every rank."""
    assert world.communicator is not None
    empty = torch.zeros(0, dtype=torch.float64, device="cpu")
    mine = torch.stack([x.double().cpu() for x in made[:2]]) if made and world.rank == source else empty
    shapes = [shape if rank == source else (0,) for rank in world.ranks]
    return world.communicator.all_gather(mine, world.ranks, shapes)[world.ranks.index(source)]


def _attempt(make: Callable[[], Tokens]) -> tuple[Tokens | None, Exception | None]:
    try:
        return make(), None
    except Exception as caught:
        return None, caught


def _parts_of(error: Exception) -> list[str]:
    """Return the four parts of an error, for other ranks."""
    if isinstance(error, MeshwrightError):
        return [error.asked, error.found, error.why, error.write]
    what = "the model raised an error in a call for tokens"
    return ["tokens of a model", f"{type(error).__name__}: {error}", what, "look at the error of that rank"]


def _told_error(parts: list[str], rank: int) -> GenerationError:
    error = GenerationError(*parts)
    error.add_note(f"raised on rank {rank}")
    return error
