"""The ranks that save or load together: who they are, and what they tell each other.

Everything here is text, and short: file names, errors, tables of names. Without a carrier the world is one rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from meshwright.comm import Carrier, NoCarrierError, current
from meshwright.layout import ProcessMesh

from ._errors import error_of, text_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """The caller among all ranks."""

    rank: int
    size: int
    carrier: Carrier | None

    @property
    def mesh(self) -> ProcessMesh:
        """All ranks in a row."""
        return ProcessMesh(range(self.size), ["world"])

    def gathered(self, value: Any) -> list[Any]:
        """What every rank brings, in rank order; anything that JSON can say."""
        if self.carrier is None or self.size == 1:
            return [value]
        group = tuple(range(self.size))
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.carrier.all_gather(torch.tensor([data.numel()]), group, [(1,)] * self.size)
        texts = self.carrier.all_gather(data, group, [(int(n),) for n in lengths])
        return [json.loads(text.numpy().tobytes()) for text in texts]

    def all_gather_distinct(self, text: str, digest: str) -> dict[str, list[int]]:
        """Every text that some rank brings, with the ranks that bring it; each text travels once."""
        digests: list[str] = self.gathered(digest)
        first = digests.index(digest) == self.rank
        texts = self.gathered(text if first else None)
        return {
            texts[digests.index(d)]: [r for r, other in enumerate(digests) if other == d]
            for d in dict.fromkeys(digests)
        }

    def agreed(self, act: Callable[[], T]) -> tuple[T, list[T]]:
        """What `act` gives here, and what it gives on every rank; if it raises on any rank, every rank raises.

        Errors that are not about checkpoints stay what they are on the rank that met them.
        """
        told: Mapping[str, Any]
        mine: T | None = None
        error: Exception | None = None
        try:
            mine = act()
            told = {"value": mine}
        except Exception as caught:
            error, told = caught, {"error": text_of(caught)}
        everyone = self.gathered(told)
        for rank, other in enumerate(everyone):
            if "error" in other:
                raise error if error is not None else _noted(error_of(other["error"]), rank)
        return everyone[self.rank]["value"] if mine is None else mine, [other["value"] for other in everyone]  # pyright: ignore[reportReturnType] - as `act` gives it


def world() -> World:
    """The world that the caller is in; a world of one rank where there are no ranks."""
    try:
        carrier = current()
    except NoCarrierError:
        return World(0, 1, None)
    return World(carrier.rank, carrier.size, carrier)


def _noted(error: Exception, rank: int) -> Exception:
    error.add_note(f"raised on rank {rank}")
    return error
