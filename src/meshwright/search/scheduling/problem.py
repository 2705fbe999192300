"""Scheduling problem of a pipeline: ranks, microbatches, placement, times, memory, and the objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import inf
from typing import Literal

from meshwright.pipeline import Action, ActionKind, ChunkMemory, Schedule, Times, peaks, simulate_schedule

from .._errors import SearchError

Objective = Literal["makespan", "span"]
SPLIT = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT, ActionKind.BACKWARD})
WHOLE = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD})


@dataclass(frozen=True)
class Problem:
    """Microbatches that pass through chunks; `way` has the rank of each chunk.

    `capacity` is the most that a rank may hold, in the units of `memory`. With `split`, weight gradients may come later
    than input gradients. `objective` is the makespan (the optimizer waits for all ranks) or the span (it does not).
    Schedules have one action at a time, compute nothing twice, and run the forwards of each chunk in order.

    Raises:
        SearchError: a rank has no chunk, there are no microbatches, or a tuple in `capacity` has not one number per
            rank.
    """

    way: tuple[int, ...]
    microbatches: int
    times: Times = field(default_factory=Times)
    memory: ChunkMemory = field(default_factory=ChunkMemory)
    capacity: tuple[float, ...] | float | None = None
    objective: Objective = "makespan"
    split: bool = True

    def __post_init__(self) -> None:
        if not self.way or set(self.way) != set(range(self.ranks)) or self.microbatches < 1:
            raise SearchError(
                "a problem",
                f"way {self.way}, {self.microbatches} microbatches",
                "each rank needs a chunk, and there must be a microbatch",
                "write Problem(linear(4)[0], 8)",
            )
        if isinstance(self.capacity, tuple) and len(self.capacity) != self.ranks:
            raise SearchError(
                "a problem",
                f"{len(self.capacity)} capacities for {self.ranks} ranks",
                "a tuple needs one number per rank",
                "pass one number for all ranks, or one per rank",
            )

    @property
    def ranks(self) -> int:
        return max(self.way) + 1

    def chunks_of(self, rank: int) -> list[int]:
        return [c for c, r in enumerate(self.way) if r == rank]

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """Upper bound on what each rank may hold."""
        if isinstance(self.capacity, tuple):
            return self.capacity
        return (inf if self.capacity is None else self.capacity,) * self.ranks

    @cached_property
    def microbatch_limits(self) -> tuple[float, ...]:
        """Part of the limits that is left for microbatches, for each rank."""
        always = peaks(self._empty, self.memory)
        return tuple(limit - static for limit, static in zip(self.limits, always, strict=True))

    @cached_property
    def _empty(self) -> Schedule:
        return Schedule("", (self.way,), self.microbatches, ((),) * self.ranks)

    def held(self, chunk: int) -> float:
        """Return the amount that one microbatch takes on the rank of a chunk, from its forward on."""
        return self.memory.change(self._empty, Action(ActionKind.FORWARD, 0, chunk))

    def kept(self, chunk: int) -> float:
        """Return the part of `held` that stays from B to W; 0 if the backward pass is not split."""
        return -self.memory.change(self._empty, Action(ActionKind.BACKWARD_WEIGHT, 0, chunk)) if self.split else 0.0

    def value(self, schedule: Schedule) -> float:
        """Return the makespan or the span of a schedule."""
        line = simulate_schedule(schedule, self.times)
        return line.makespan if self.objective == "makespan" else line.span

    def allows(self, schedule: Schedule) -> bool:
        """True if a schedule respects the placement and the memory, and has only actions of the problem."""
        if schedule.ways != (self.way,) or schedule.microbatches != self.microbatches:
            return False
        known, actions = SPLIT if self.split else WHOLE, [*chain(*schedule.rows)]
        if any(action.beside or action.kind not in known for action in actions):
            return False
        forwards = [(a.chunk, a.microbatch) for a in actions if a.kind is ActionKind.FORWARD]
        if sorted(forwards, key=lambda f: f[0]) != sorted(forwards):
            return False
        return all(held <= limit for held, limit in zip(peaks(schedule, self.memory), self.limits, strict=True))
