"""A schedule: what each rank of a pipeline does, in order, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ._action import TRANSFERS, Action, Kind

Row = tuple[Action, ...]
Way = tuple[int, ...]
"""The rank that runs each chunk of a model, from the first chunk to the last."""


class Edge(NamedTuple):
    """Something flows from one chunk to a later one; `gradient` tells whether a gradient comes back."""

    source: int
    target: int
    gradient: bool = True


def linear(ranks: int) -> tuple[Way, ...]:
    """One chunk per rank, in order."""
    return (tuple(range(ranks)),)


def looped(ranks: int, chunks: int = 2) -> tuple[Way, ...]:
    """`chunks` chunks per rank; from the last rank the way leads back to the first one."""
    return (tuple(range(ranks)) * chunks,)


def zigzag(ranks: int, chunks: int = 2) -> tuple[Way, ...]:
    """`chunks` chunks per rank; at the last and at the first rank the way turns (with two chunks: a V)."""
    there = tuple(range(ranks))
    return (tuple(r for n in range(chunks) for r in (there if n % 2 == 0 else there[::-1])),)


def both_ways(ranks: int) -> tuple[Way, ...]:
    """Two copies of the model, one from the first rank to the last, one back (Chimera, DualPipe)."""
    return (tuple(range(ranks)), tuple(range(ranks))[::-1])


@dataclass(frozen=True)
class Schedule:
    """Rows of actions, one row per rank; `ways` tells which rank runs each chunk.

    A model that stands there in several copies has several `ways`, and `routes` tells which one a microbatch takes
    (empty: the first). With `slices`, so many microbatches in a row are slices of one sequence, each needing those
    before it. `edges` are what flows between chunks (empty: from each to the next). `versions` is the number of
    updates that the weights have seen which a microbatch uses (empty: those made before it in the row).
    """

    name: str
    ways: tuple[Way, ...]
    microbatches: int
    rows: tuple[Row, ...]
    routes: tuple[int, ...] = ()
    slices: int = 1
    edges: tuple[Edge, ...] = ()
    versions: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def sequences(self) -> int:
        """How many whole microbatches there are: each is so many slices."""
        return self.microbatches // self.slices

    @property
    def chunks(self) -> int:
        """How many pieces the model is cut into."""
        return len(self.ways[0])

    @cached_property
    def chunks_per_rank(self) -> int:
        """The most chunks that one rank runs on one way."""
        return max(way.count(rank) for way in self.ways for rank in range(self.ranks))

    def rank_of(self, microbatch: int, chunk: int) -> int:
        """The rank that runs `chunk` for `microbatch`."""
        return self.ways[self.way_of(microbatch)][chunk]

    def way_of(self, microbatch: int) -> int:
        """The number of the way that a microbatch goes."""
        return self.routes[microbatch] if self.routes else 0

    @cached_property
    def into(self) -> Mapping[int, tuple[Edge, ...]]:
        """Chunk → the edges that end in it."""
        return {c: tuple(e for e in self.all_edges if e.target == c) for c in range(self.chunks)}

    @cached_property
    def out_of(self) -> Mapping[int, tuple[Edge, ...]]:
        """Chunk → the edges that begin in it."""
        return {c: tuple(e for e in self.all_edges if e.source == c) for c in range(self.chunks)}

    @cached_property
    def neighbours(self) -> tuple[frozenset[int], ...]:
        """Rank → itself and the ranks that something flows to from it, or back."""
        pairs = {(way[e.source], way[e.target]) for way in self.ways for e in self.all_edges}
        return tuple(
            frozenset({r} | {b for a, b in pairs if a == r} | {a for a, b in pairs if b == r})
            for r in range(self.ranks)
        )

    @property
    def all_edges(self) -> tuple[Edge, ...]:
        """What flows between chunks."""
        return self.edges or tuple(Edge(c, c + 1) for c in range(self.chunks - 1))

    @cached_property
    def has_transfers(self) -> bool:
        """Whether the table says when to send and receive; where it does not, that is when they are needed."""
        return any(atom.kind in TRANSFERS for _, atom in self.atoms())

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The (microbatch, chunk) whose forward runs once more before the backward."""
        return frozenset((a.microbatch, a.chunk) for _, a in self.atoms() if a.kind is Kind.RECOMPUTE)

    def splits(self, rank: int) -> bool:
        """Whether the rank runs the gradients of weights apart from those of inputs."""
        return any(atom.kind is Kind.BACKWARD_WEIGHT for action in self.rows[rank] for atom in action.atoms)

    def atoms(self) -> Iterator[tuple[int, Action]]:
        """Every (rank, action), row by row; of those side by side each alone."""
        for rank, row in enumerate(self.rows):
            for action in row:
                if action.beside is None:
                    yield rank, action
                else:
                    yield from ((rank, atom) for atom in action.atoms)

    def __str__(self) -> str:
        """The text that `parse_schedule` reads: a head, the ways, and one line per rank."""
        m, slices = self.microbatches, self.slices
        lines = [
            f"{self.name}: {m} microbatch{'' if m == 1 else 'es'}"
            + (f", {slices} slices a sequence" if slices > 1 else "")
        ]
        lines += [_line("way", way) for way in self.ways]
        named = {"routes": self.routes, "edges": tuple(map(_edge_text, self.edges)), "versions": self.versions}
        lines += [_line(name, items) for name, items in named.items() if items]
        return "\n".join([*lines, *(_line(rank, row) for rank, row in enumerate(self.rows))])


def _line(head: object, items: Sequence[object]) -> str:
    return " ".join([f"{head}:", *map(str, items)])


def _edge_text(edge: Edge) -> str:
    return f"{edge.source}>{edge.target}{'' if edge.gradient else '-'}"
