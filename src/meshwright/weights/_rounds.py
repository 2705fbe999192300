"""Rounds: which pieces of which tensors move together, so that messages of a rank fit into a memory cap.

A rank has memory for the messages of one round beside the tensors. Large tensors move in several pieces, and small
ones share a round. All ranks derive the same rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm import Communicator
from meshwright.reshard import ElementMoves, Where

from ._errors import WeightError


class Move(NamedTuple):
    """A tensor whose elements move from the part `source` to the part `target` of this rank."""

    name: str
    source: Tensor
    target: Tensor
    moves: ElementMoves

    @property
    def sent_dtype(self) -> torch.dtype:
        """The smaller one of both dtypes: values are cast before they are sent, or after they were received."""
        before, after = self.moves.src.dtype, self.target.dtype
        return before if before.itemsize < after.itemsize else after


class Piece(NamedTuple):
    """Piece `at` of `pieces` of a move."""

    move: Move
    at: int
    pieces: int


@dataclass(slots=True)
class Round:
    """Pieces that move together, and the bytes of all messages of each rank."""

    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list[Piece])
    load: dict[int, int] = field(default_factory=dict[int, int])

    def takes(self, load: dict[int, int], dtype: torch.dtype, cap: int) -> bool:
        return dtype is self.dtype and all(self.load.get(rank, 0) + n <= cap for rank, n in load.items())

    def add(self, piece: Piece, load: dict[int, int]) -> None:
        self.pieces.append(piece)
        for rank, n in load.items():
            self.load[rank] = self.load.get(rank, 0) + n


def rounds_of(moves: Sequence[Move], cap: int, asked: str) -> list[Round]:
    """Return the rounds of these moves; in each, the messages that a rank sends and receives have at most `cap` bytes.

    Moves between equal parts of all ranks need no messages and are in no round. Raises WeightError if a message of the
    smallest size does not fit.
    """
    rounds: list[Round] = []
    for move in sorted(moves, key=lambda move: str(move.sent_dtype)):
        size = move.sent_dtype.itemsize
        pieces = pieces_within(move.moves, cap // size)
        if pieces is None:
            least = max(move.moves.traffic(move.moves.most_pieces).values()) * size
            raise WeightError(
                f"{asked} with memory_cap={cap}",
                f"{move.name} needs messages of {least} bytes",
                "a message has at least one row of a tensor for each rank that gets it",
                f"pass memory_cap={least} or more",
            )
        load = {rank: n * size for rank, n in move.moves.traffic(pieces).items() if n}
        for at in range(pieces) if load else ():
            if not rounds or not rounds[-1].takes(load, move.sent_dtype, cap):
                rounds.append(Round(move.sent_dtype))
            rounds[-1].add(Piece(move, at, pieces), load)
    return rounds


@lru_cache(maxsize=4096)
def pieces_within(moves: ElementMoves, most: int) -> int | None:
    """Return the smallest number of pieces of which a rank sends and receives at most `most` elements; None if none."""
    whole = max(moves.traffic().values())
    pieces = max(-(-whole // max(most, 1)), 1)
    while pieces <= moves.most_pieces:
        found = max(moves.traffic(pieces).values())
        if found <= most:
            return pieces
        pieces = max(pieces + 1, pieces * found // max(most, 1))
    return None


def keep(move: Move, rank: int) -> None:
    """Copy the elements that this rank holds on both sides."""
    source, target = _expanded(move, rank)
    for before, after in move.moves.keeps(rank):
        target[after].copy_(source[before])


def run_round(found: Round, here: Communicator, group: tuple[int, ...]) -> None:
    """Carry out a round: one message for each pair of ranks. Every rank of `group` makes the call."""
    sent: dict[int, list[Tensor]] = {}
    received: dict[int, list[Tensor]] = {}
    for move, at, pieces in found.pieces:
        source, target = _expanded(move, here.rank)
        _collect(sent, source, move.moves.sends(here.rank, at, pieces))
        _collect(received, target, move.moves.receives(here.rank, at, pieces))
    device = found.pieces[0].move.source.device
    sends = [(peer, _packed(parts, found.dtype)) for peer, parts in sent.items()]
    receives = [(peer, (_count(parts),), found.dtype, device) for peer, parts in received.items()]
    if not sends and not receives:  # an empty message to itself tells the communicator the device of other messages
        sends = [(here.rank, torch.empty(0, dtype=found.dtype, device=device))]
        receives = [(here.rank, (0,), found.dtype, device)]
    messages = here.exchange(sends, receives, group)
    for parts, message in zip(received.values(), messages, strict=False):
        _unpack(message, parts)


def _expanded(move: Move, rank: int) -> tuple[Tensor, Tensor]:
    """Return both parts with product dims split into factors."""
    return move.source.view(move.moves.shape_before(rank)), move.target.view(move.moves.shape_after(rank))


def _collect(found: dict[int, list[Tensor]], part: Tensor, places: Sequence[tuple[int, Where]]) -> None:
    for peer, where in places:
        found.setdefault(peer, []).append(part[where])


def _count(parts: Sequence[Tensor]) -> int:
    return sum(part.numel() for part in parts)


def _packed(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return one flat message with these parts."""
    message = torch.empty(_count(parts), dtype=dtype, device=parts[0].device)
    for part, target in zip(parts, message.split([part.numel() for part in parts]), strict=True):
        target.view(part.shape).copy_(part)
    return message


def _unpack(message: Tensor, parts: Sequence[Tensor]) -> None:
    for part, sent in zip(parts, message.split([part.numel() for part in parts]), strict=True):
        part.copy_(sent.view(part.shape))
