"""The chunks of a model, from the marks that move values from one mesh to another.

A captured program whose marks change meshes is a chain of chunks, and each chunk is on one mesh. The chain is the
longest path through the changes. A node belongs to the first chunk on its mesh that is not before the chunks of its
operands. So values that bypass chunks (skip connections, masks, labels) join the chain on their mesh. Draws, and values
that depend only on buffers that batches renew, belong to the chunk that uses them. Values that depend on no batch
belong to no chunk: they are computed once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, count

from meshwright.graph import ALWAYS, EVERYWHERE, ChunkConversion, Input, Node, Program, Value, is_random_call
from meshwright.tensor import STAGE_SPLIT

from .._errors import StageError

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Stages:
    """The ranks of each stage, and the stage of each chunk."""

    ranks: tuple[Ranks, ...]
    way: tuple[int, ...]

    def of(self, rank: int) -> int | None:
        """Return the stage of a rank; None for a rank in no stage."""
        return next((at for at, ranks in enumerate(self.ranks) if rank in ranks), None)


def split_stages(program: Program) -> tuple[Program, Stages]:
    """Return the captured program, whose values have known layouts, with the chunk of each node; and its stages.

    A value that returns to the mesh of an earlier chunk begins another chunk there.

    Raises:
        StageError: the meshes of two stages overlap.
    """
    found = _Staging(program)
    ranks = tuple(dict.fromkeys(found.chain))
    _check_apart(ranks)
    numbers = count()
    nodes = tuple(found.with_chunk(node, numbers) for node in program.nodes)
    return replace(program, nodes=nodes), Stages(ranks, tuple(ranks.index(r) for r in found.chain))


@dataclass
class _Staging:
    program: Program
    chunk: dict[Value, int] = field(default_factory=dict[Value, int])
    chain: tuple[Ranks, ...] = ()

    def __post_init__(self) -> None:
        self._find_always()
        self.chain = self._longest_chain()
        self._place_inputs()
        self._place_nodes()
        self._postpone()

    def _place_inputs(self) -> None:
        for given in self.program.inputs:
            ranks = self._ranks_of(given.value)
            self._check_input(given, ranks)
            self.chunk.setdefault(given.value, EVERYWHERE if ranks is None else self._first_chunk(ranks, 0))

    def _place_nodes(self) -> None:
        """Put each node into the first chunk on its mesh that is not before the chunks of its operands."""
        for node in self.program.nodes:
            if node.outs and all(v in self.chunk for v in node.outs):
                continue
            before = max((self.chunk[v] for v in node.ins), default=EVERYWHERE)
            ranks = self._ranks_of_node(node)
            if ranks is None and before < 0:
                at = EVERYWHERE
            else:
                at = self._first_chunk(ranks, max(before, 0) + (node.op is STAGE_SPLIT), extend=True)
            self.chunk.update(dict.fromkeys(node.outs, at))

    def _check_input(self, given: Input, ranks: Ranks | None) -> None:
        """Raise StageError if ranks of several stages hold parts of an input: no single stage could send it."""
        stages = [stage for stage in dict.fromkeys(self.chain) if set(stage) & set(ranks or ())]
        if len(stages) > 1 and ranks not in self.chain:
            raise StageError(
                "stages of a pipeline",
                f"{given.name} on ranks of the stages {' and '.join(map(_ranks_text, stages))}",
                "the first stage sends the input without the ranks of a later stage",
                "give a plain tensor, or place it on the mesh of one stage",
            )

    def _ranks_of(self, v: Value) -> Ranks | None:
        """Return the ranks that hold a value; None if they are not known."""
        spec = self.program.specs.get(v)
        return None if spec is None else tuple(sorted(spec.mesh.process_ids))

    def _ranks_of_node(self, node: Node) -> Ranks | None:
        return next((r for v in (*node.outs, *node.ins) if (r := self._ranks_of(v)) is not None), None)

    def _find_always(self) -> None:
        """Find the values that depend on no batch, on no buffer that changes, and on no draw."""
        changed = {x for x, _ in self.program.writes}
        for given in self.program.inputs:
            if given.role in ("parameter", "buffer", "constant") and given.value not in changed:
                self.chunk[given.value] = ALWAYS
        for node in self.program.nodes:
            if not is_random_call(node) and all(self.chunk.get(v) == ALWAYS for v in node.ins):
                self.chunk.update(dict.fromkeys(node.outs, ALWAYS))

    def _postpone(self) -> None:
        """Move draws, and values of renewed buffers only, to the chunk that uses them or that draws next.

        By then earlier chunks have drawn their numbers, and earlier microbatches have renewed the buffers.
        """
        waiting = self._waiting()
        next_draw = len(self.chain)
        for node in reversed(self.program.nodes):
            if node in waiting:
                latest = self._first_use(node)
                self._move_to_last(node, min(latest, next_draw) if is_random_call(node) else latest)
            if is_random_call(node):
                next_draw = min([next_draw, *(self.chunk[v] for v in node.outs if self.chunk[v] >= 0)])

    def _first_use(self, node: Node) -> int:
        """Return the first chunk that reads a result of a node."""
        users = [user for v in node.outs for user in self.program.users.get(v, ())]
        return min((self.chunk[v] for user in users for v in user.outs), default=0)

    def _waiting(self) -> set[Node]:
        free = {x for x, _ in self.program.writes}
        found: set[Node] = set()
        for node in self.program.nodes:
            waits = is_random_call(node) or any(v in free for v in node.ins)
            if waits and all(v in free or self.chunk[v] < 0 for v in node.ins):
                free.update(node.outs)
                found.add(node)
        return found

    def _move_to_last(self, node: Node, latest: int) -> None:
        """Put a node into the last chunk on its mesh that is not after `latest`.

        It stays where it is if there is none.
        """
        at = self.chunk[node.outs[0]] if node.outs else EVERYWHERE
        later = (c for c in range(at + 1, latest + 1) if at >= 0 and self.chain[c] == self.chain[at])
        self.chunk.update(dict.fromkeys(node.outs, max(later, default=at)))

    def _longest_chain(self) -> tuple[Ranks, ...]:
        """Return the meshes along the longest path through changes of mesh."""
        chains: dict[Value, tuple[Ranks, ...]] = {}
        longest: tuple[Ranks, ...] = ()
        for node in self.program.nodes:
            if any(self.chunk.get(v) == ALWAYS for v in node.outs):
                continue
            chain = max((chains.get(v) or self._first_ranks(v) for v in node.ins), key=len, default=())
            ranks = self._ranks_of_node(node)
            if ranks is not None and (chain[-1:] != (ranks,) or node.op is STAGE_SPLIT):
                chain = (*chain, ranks)
            chains.update(dict.fromkeys(node.outs, chain))
            longest = max(longest, chain, key=len)
        return longest

    def _first_ranks(self, v: Value) -> tuple[Ranks, ...]:
        ranks = self._ranks_of(v)
        return () if ranks is None or self.chunk.get(v) == ALWAYS else (ranks,)

    def _first_chunk(self, ranks: Ranks | None, least: int, extend: bool = False) -> int:
        """Return the first chunk from `least` on that is on these ranks.

        If there is none, it is a new chunk at the end of the chain with `extend`, otherwise `least`.
        """
        if ranks is None or not self.chain:
            return least
        if ranks in self.chain[least:]:
            return self.chain.index(ranks, least)
        if not extend:
            return least
        self.chain = (*self.chain, ranks)
        return len(self.chain) - 1

    def with_chunk(self, node: Node, numbers: Iterator[int]) -> Node:
        """Return the node with its chunk, and with an edge if it leads from one chunk to another."""
        at = self.chunk[node.outs[0]] if node.outs else 0
        edge: ChunkConversion | None = None
        if at >= 0 and len(node.ins) == 1 and self._ranks_of(node.ins[0]) not in (None, self._ranks_of_node(node)):
            edge = ChunkConversion(self.chunk[node.ins[0]], at, next(numbers))
        return replace(node, origin=replace(node.origin, chunk=at, edge=edge))


def _check_apart(ranks: Sequence[Ranks]) -> None:
    for a, b in combinations(ranks, 2):
        if set(a) & set(b):
            raise StageError(
                "stages of a pipeline",
                f"stages on ranks {_ranks_text(a)} and on ranks {_ranks_text(b)}",
                "a rank can run only one stage",
                "use meshes that are the same, or have no rank in common",
            )


def _ranks_text(ranks: Ranks) -> str:
    return f"{ranks[0]}…{ranks[-1]}" if len(ranks) > 8 else ", ".join(map(str, ranks))
