"""Memory of a rank along its row: activations from their forward until their last use, weights and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat

from .action import Action, ActionKind
from .schedule import Row, Schedule, chunks_on
from .weight_versions import held_version_counts


@dataclass(frozen=True, slots=True)
class ChunkMemory:
    """Bytes per chunk and microbatch; each field has one number per chunk, or one number for all chunks.

    `held` is the memory that a forward saves for the backward. `kept` is the part of it that stays between B and W
    (default: all). `inputs` stays between a forward that is recomputed and its recomputation. `static` is the constant
    memory of a chunk: weights, their gradients and the optimizer's state. `weights` is the memory of each older version
    of the weights (asynchronous schedules).
    """

    held: float | tuple[float, ...] = 1.0
    kept: float | tuple[float, ...] | None = None
    inputs: float | tuple[float, ...] = 0.0
    static: float | tuple[float, ...] = 0.0
    weights: float | tuple[float, ...] = 0.0

    def change(self, schedule: Schedule, action: Action) -> float:
        """Return the change in bytes held after `action` (one atom)."""
        c = action.chunk
        if action.kind is ActionKind.FORWARD:
            return chunk_value(self.inputs if (action.microbatch, c) in schedule.recomputed else self.held, c)
        if action.kind is ActionKind.RECOMPUTE:
            return chunk_value(self.held, c) - chunk_value(self.inputs, c)
        if action.kind is ActionKind.BACKWARD:
            return -chunk_value(self.held, c)
        if action.kind is ActionKind.BACKWARD_INPUT:
            return self._kept(c) - chunk_value(self.held, c)
        return -self._kept(c) if action.kind is ActionKind.BACKWARD_WEIGHT else 0.0

    def _kept(self, chunk: int) -> float:
        return chunk_value(self.held if self.kept is None else self.kept, chunk)


def chunk_value(values: float | tuple[float, ...], index: int) -> float:
    """Return element `index` of a tuple, or the number itself if there is one for all elements."""
    return values[index] if isinstance(values, tuple) else values


def peaks(schedule: Schedule, memory: ChunkMemory | None = None) -> tuple[float, ...]:
    """Return the peak bytes of each rank.

    Without `memory`, the peak number of (chunk, microbatch) with a pending backward.

    >>> from meshwright.pipeline import one_f_one_b
    >>> peaks(one_f_one_b(4, 8))
    (4.0, 3.0, 2.0, 1.0)
    """
    memory = memory or ChunkMemory()
    return tuple(
        _on(schedule, rank, memory.static) + _peak(schedule, row, memory, _on(schedule, rank, memory.weights))
        for rank, row in enumerate(schedule.rows)
    )


def _on(schedule: Schedule, rank: int, values: float | tuple[float, ...]) -> float:
    """Return the sum of the values of a rank's chunks."""
    return sum(chunk_value(values, chunk) for way in schedule.ways for chunk in chunks_on(way, rank))


def _peak(schedule: Schedule, row: Row, memory: ChunkMemory, weights: float) -> float:
    now = most = 0.0
    older = (n - 1 for n in held_version_counts(schedule, row)) if weights else repeat(0)
    for action in row:
        changes = [(memory.change(schedule, atom), next(older) * weights) for atom in action.atoms]
        most = max(most, now + sum(c for c, _ in changes if c > 0) + max(versions for _, versions in changes))
        now += sum(c for c, _ in changes)
    return most
