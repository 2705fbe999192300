"""Work that the ranks of the world share: fixed trees of sums, inversions by owners, and rows.

Nothing here depends on the model's mesh. Results are equal bit by bit for every number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshwright.checkpoint import World, current_world
from meshwright.layout import Layout, MeshwrightError, ProcessMesh, Spec, replicated
from meshwright.reshard import plan

from .._errors import CalibrationError

T = TypeVar("T")
PIECES = 8
"""Number of pieces of the calibration batches, a power of two; the sums of pieces are joined as a binary tree."""
Node = tuple[int, int]
"""A node of the tree: its level (0: a piece) and its number on this level."""


class Ranks:
    """The ranks that quantize a model together: those of the world, or the caller alone."""

    def __init__(self, alone: bool) -> None:
        self._world = World() if alone else current_world()
        self._loads = [0.0] * self.size

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def size(self) -> int:
        return self._world.size

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order; any JSON value."""
        return self._world.gathered(value)

    def agreed(self, act: Callable[[], T]) -> T:
        """Return the result of `act`. If it raises on any rank, every rank raises: its own error, or one with the text.

        Raises:
            CalibrationError: `act` raised on another rank.
        """
        error: Exception | None = None
        result: Any = None
        try:
            result = act()
        except Exception as caught:
            error = caught
        for rank, told in enumerate(self.gathered(None if error is None else _text(error))):
            if told is not None:
                raise error if error is not None else _told_error(told, rank)
        return result

    def of_first(self, act: Callable[[], Any]) -> Any:
        """Return the result of `act` on rank 0, any JSON value; other ranks do not call it. Raises as `agreed` does."""
        return self.gathered(self.agreed(lambda: act() if self.rank == 0 else None))[0]

    def pieces_of(self, rank: int) -> range:
        """Return the pieces of the calibration batches that a rank runs."""
        return range(rank * PIECES // self.size, (rank + 1) * PIECES // self.size)

    def owners(self, costs: Sequence[float]) -> list[int]:
        """Return the rank for each of several tasks: the most expensive first, each to the rank with the least work."""
        found = [0] * len(costs)
        for task in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            owner = min(range(self.size), key=lambda r: (self._loads[r], r))
            self._loads[owner] += costs[task]
            found[task] = owner
        return found

    def tree_sum(self, sums: TreeSum, shape: tuple[int, ...], owner: int, device: torch.device) -> Tensor | None:
        """Return the sum of the pieces of all ranks on `owner`, as a fixed binary tree; None on other ranks."""
        zero = torch.zeros(shape, device=device)
        every = [subtrees(self.pieces_of(rank)) for rank in range(self.size)]
        mine = [sums.at(node, zero) for node in every[self.rank]]
        if self._world.communicator is None or self.size == 1:
            return mine[0]
        slots, rest = max(map(len, every)), ((),) * (len(shape) - 1)
        stack = torch.stack(mine + [zero] * (slots - len(mine)))
        stacked = Spec(self._world.mesh, Layout((("world",), (), *rest)), (self.size * slots, *shape), stack.dtype)
        by_rows = stacked.with_layout(Layout(((), ("world",), *rest)))
        rows = self._world.communicator.convert(plan(stacked, by_rows), stack)
        known = {node: rows[r * slots + i] for r, nodes in enumerate(every) for i, node in enumerate(nodes)}
        total = _join((PIECES.bit_length() - 1, 0), known).contiguous()
        cut = Spec(self._world.mesh, Layout((("world",), *rest)), shape, stack.dtype)
        found = self._world.communicator.convert(plan(cut, self._on(owner, cut)), total)
        return found if owner == self.rank else None

    def largest(self, x: Tensor) -> Tensor:
        """Return the largest number of all ranks for each element."""
        if self._world.communicator is None or self.size == 1:
            return x
        return self._world.communicator.all_reduce(x, "max", tuple(range(self.size)))

    def broadcast(self, x: Tensor | None, shape: tuple[int, ...], like: Tensor, owner: int) -> Tensor:
        """Return the float32 tensor of the owner on every rank, on the device of `like`; other ranks pass None."""
        if self._world.communicator is None or self.size == 1:
            assert x is not None
            return x
        target = Spec(self._world.mesh, replicated(len(shape)), shape, torch.float32)
        source = self._on(owner, target)
        part = like.new_empty(source.local_shape(self.rank), dtype=torch.float32) if x is None else x.to(like.device)
        return self._world.communicator.convert(plan(source, target), part)

    def _on(self, owner: int, like: Spec) -> Spec:
        return Spec(ProcessMesh([owner], ["owner"]), replicated(like.ndim), like.shape, like.dtype)

    def rows_of(self, rank: int, count: int, panel: int) -> range:
        """Return the rows of a rank: whole panels of rows, but for the last one."""
        panels = -(-count // panel)
        first, last = rank * panels // self.size, (rank + 1) * panels // self.size
        return range(min(first * panel, count), min(last * panel, count))

    def gather_rows(self, part: Tensor, count: int, panel: int) -> Tensor:
        """Return the tensor of which each rank has the rows of `rows_of`."""
        if self._world.communicator is None or self.size == 1:
            return part
        shapes = [(len(self.rows_of(rank, count, panel)), *part.shape[1:]) for rank in range(self.size)]
        is_float8 = part.dtype == torch.float8_e4m3fn
        sent = (part.view(torch.uint8) if is_float8 else part).contiguous()
        found = torch.cat(self._world.communicator.all_gather(sent, tuple(range(self.size)), shapes))
        return found.view(part.dtype) if is_float8 else found


def _text(error: Exception) -> list[str]:
    if isinstance(error, MeshwrightError):
        return [error.asked, error.found, error.why, error.write]
    said = str(error) or type(error).__name__
    return ["calibrate a model", type(error).__name__, said, "remove the cause and try again"]


def _told_error(told: Sequence[str], rank: int) -> CalibrationError:
    asked, found, why, write = told
    error = CalibrationError(asked, found, why, write)
    error.add_note(f"raised on rank {rank}")
    return error


def subtrees(pieces: range) -> list[Node]:
    """Return the largest nodes of the tree all of whose pieces are in a range.

    >>> subtrees(range(2, 5))
    [(1, 1), (0, 4)]
    """
    found: list[Node] = []
    at = pieces.start
    while at < pieces.stop:
        level = 0
        while at % (2 << level) == 0 and at + (2 << level) <= pieces.stop:
            level += 1
        found.append((level, at >> level))
        at += 1 << level
    return found


class TreeSum:
    """Sums of the pieces of one rank: a sum is joined with its neighbour as soon as both are known."""

    def __init__(self) -> None:
        self._nodes: dict[Node, Tensor | None] = {}

    def add(self, piece: int, x: Tensor | None) -> None:
        """Add the sum of the next piece; None if the piece has no batches."""
        node = (0, piece)
        while (node[0], node[1] ^ 1) in self._nodes and node[1] % 2:
            before = self._nodes.pop((node[0], node[1] ^ 1))
            x = before if x is None else x if before is None else before + x
            node = (node[0] + 1, node[1] // 2)
        self._nodes[node] = x

    def at(self, node: Node, zero: Tensor) -> Tensor:
        """Return the sum below a node."""
        found = self._nodes.get(node)
        return zero if found is None else found


def _join(node: Node, known: Mapping[Node, Tensor]) -> Tensor:
    if node in known:
        return known[node]
    level, number = node
    return _join((level - 1, 2 * number), known) + _join((level - 1, 2 * number + 1), known)
