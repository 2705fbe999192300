"""Schedules: a table with the actions of each rank of a pipeline, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .action import TRANSFERS, Action, ActionKind

Row = tuple[Action, ...]
Way = tuple[int, ...]
"""The rank that runs each chunk of a model, from the first chunk to the last."""


class Edge(NamedTuple):
    """A value that flows from one chunk to a later one; `gradient` is True if a gradient returns."""

    source: int
    target: int
    gradient: bool = True


def linear(ranks: int) -> tuple[Way, ...]:
    """Return a way with one chunk per rank, in order."""
    return (tuple(range(ranks)),)


def looped(ranks: int, chunks: int = 2) -> tuple[Way, ...]:
    """Return a way with `chunks` chunks per rank that continues from the last rank at the first one."""
    return (tuple(range(ranks)) * chunks,)


def zigzag(ranks: int, chunks: int = 2) -> tuple[Way, ...]:
    """Return a way with `chunks` chunks per rank that turns at the last and at the first rank; two chunks are a V."""
    there = tuple(range(ranks))
    return (tuple(r for n in range(chunks) for r in (there if n % 2 == 0 else there[::-1])),)


def both_ways(ranks: int) -> tuple[Way, ...]:
    """Return the ways of two copies of the model: from the first rank to the last, and back (Chimera, DualPipe)."""
    return (tuple(range(ranks)), tuple(range(ranks))[::-1])


@dataclass(frozen=True)
class Schedule:
    """Rows of actions, one row per rank; `ways` gives the rank of each chunk.

    A model with several copies has several `ways`. `routes` gives the index in `ways` of each microbatch (empty: 0).
    `edges` are the values that flow between chunks (empty: from each chunk to the next). `versions` gives, for each
    microbatch, the number of updates that its weights have had (empty: the updates before it in the row).
    """

    name: str
    ways: tuple[Way, ...]
    microbatches: int
    rows: tuple[Row, ...]
    routes: tuple[int, ...] = ()
    edges: tuple[Edge, ...] = ()
    versions: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def chunks(self) -> int:
        """The number of chunks of the model."""
        return len(self.ways[0])

    def rank_of(self, microbatch: int, chunk: int) -> int:
        """Return the rank that runs `chunk` for `microbatch`."""
        return self.ways[self.way_of(microbatch)][chunk]

    def way_of(self, microbatch: int) -> int:
        """Return the index in `ways` of a microbatch."""
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
        """Rank → itself and the ranks that it sends values to or receives values from."""
        found = [{rank} for rank in range(self.ranks)]
        for way in self.ways:
            for edge in self.all_edges:
                source, target = way[edge.source], way[edge.target]
                found[source].add(target)
                found[target].add(source)
        return tuple(map(frozenset, found))

    @property
    def all_edges(self) -> tuple[Edge, ...]:
        """The values that flow between chunks."""
        return self.edges or tuple(Edge(c, c + 1) for c in range(self.chunks - 1))

    @cached_property
    def has_transfers(self) -> bool:
        """True if the table has send and receive actions; otherwise messages travel when they are needed."""
        return any(atom.kind in TRANSFERS for _, atom in self.atoms())

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The (microbatch, chunk) whose forward runs once more before the backward."""
        return frozenset((a.microbatch, a.chunk) for _, a in self.atoms() if a.kind is ActionKind.RECOMPUTE)

    def splits(self, rank: int) -> bool:
        """True if the rank computes the gradients of weights separately from those of inputs."""
        return any(atom.kind is ActionKind.BACKWARD_WEIGHT for atom in atoms_of(self.rows[rank]))

    def atoms(self) -> Iterator[tuple[int, Action]]:
        """Yield every (rank, action) row by row; actions that run side by side are yielded separately."""
        for rank, row in enumerate(self.rows):
            yield from ((rank, atom) for atom in atoms_of(row))

    def __str__(self) -> str:
        """Return the text that `parse_schedule` reads: a head, the ways, and one line per rank."""
        m = self.microbatches
        lines = [f"{self.name}: {m} microbatch{'' if m == 1 else 'es'}"]
        lines += [_line("way", way) for way in self.ways]
        named = {"routes": self.routes, "edges": tuple(map(_edge_text, self.edges)), "versions": self.versions}
        lines += [_line(name, items) for name, items in named.items() if items]
        return "\n".join([*lines, *(_line(rank, row) for rank, row in enumerate(self.rows))])


def atoms_of(row: Row) -> Iterator[Action]:
    """Yield the actions of a row in order; actions that run side by side are yielded separately."""
    for action in row:
        if action.beside is None:
            yield action
        else:
            yield from action.atoms


def chunks_on(way: Way, rank: int) -> list[int]:
    """Return the chunks that a rank runs on a way, in order."""
    return [chunk for chunk, owner in enumerate(way) if owner == rank]


def _line(head: object, items: Sequence[object]) -> str:
    return " ".join([f"{head}:", *map(str, items)])


def _edge_text(edge: Edge) -> str:
    return f"{edge.source}>{edge.target}{'' if edge.gradient else '-'}"
