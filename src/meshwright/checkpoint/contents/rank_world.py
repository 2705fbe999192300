"""The ranks that save or load together, and their communication.

All messages are short texts: file names, errors, tables of names. Without a communicator the world is one rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from meshwright.comm import Communicator, NoCommunicatorError, current_communicator, world_ranks
from meshwright.layout import JsonValue, ProcessMesh

from .._errors import error_from_text, error_text

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """The caller's rank, all ranks, and the communicator."""

    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    communicator: Communicator | None = None

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def mesh(self) -> ProcessMesh:
        """Return the mesh of all ranks in a row."""
        return ProcessMesh(self.ranks, ["world"])

    def has_ended(self, rank: int) -> bool:
        """True if the process of `rank` is known to have ended."""
        return self.communicator is not None and self.communicator.has_ended(rank)

    def gathered(self, value: JsonValue) -> list[Any]:
        """Return the values of all ranks in rank order; any JSON value."""
        if self.communicator is None or self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([data.numel()], device="cpu")
        lengths = self.communicator.all_gather(length, self.ranks, [(1,)] * self.size)
        texts = self.communicator.all_gather(data, self.ranks, [(int(n),) for n in lengths])
        return [json.loads(text.numpy().tobytes()) for text in texts]

    def all_gather_distinct(self, text: str, digest: str) -> dict[str, list[int]]:
        """Return the distinct texts of all ranks, each with its ranks; each text is sent once."""
        digests: list[str] = self.gathered(digest)
        first = self.ranks[digests.index(digest)] == self.rank
        texts = self.gathered(text if first else None)
        return {
            texts[digests.index(d)]: [r for r, other in zip(self.ranks, digests, strict=True) if other == d]
            for d in dict.fromkeys(digests)
        }

    def agreed(self, act: Callable[[], T]) -> tuple[T, list[T]]:
        """Return the result of `act` on this rank, and the results on all ranks.

        If `act` raises on any rank, every rank raises. A rank on which it raised raises that error unchanged; the
        others raise a CheckpointError with its text.
        """
        told: Mapping[str, Any]
        mine: T | None = None
        error: Exception | None = None
        try:
            mine = act()
            told = {"value": mine}
        except Exception as caught:
            error, told = caught, {"error": error_text(caught)}
        everyone = self.gathered(told)
        for rank, other in zip(self.ranks, everyone, strict=True):
            if "error" in other:
                raise error if error is not None else _noted(error_from_text(other["error"]), rank)
        values = [other["value"] for other in everyone]
        return values[self.ranks.index(self.rank)] if mine is None else mine, values


def current_world() -> World:
    """Return the world of the caller; a world of one rank without ranks."""
    try:
        communicator = current_communicator()
    except NoCommunicatorError:
        return World()
    return World(communicator.rank, world_ranks(), communicator)


def _noted(error: Exception, rank: int) -> Exception:
    error.add_note(f"raised on rank {rank}")
    return error
