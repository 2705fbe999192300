"""What a schedule is wanted for: ranks, microbatches, placement, times, memory, and what is to be short."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from meshwright.pipeline import Memory, Schedule, Times, peaks, simulate

Objective = Literal["makespan", "span"]


@dataclass(frozen=True)
class Problem:
    """Microbatches through chunks; `way` names the rank of each chunk.

    `capacity` is the most that a rank may hold, in the units of `memory`; with `split`, gradients of weights may come
    later than those of inputs. `objective` is the makespan (the optimizer waits for all ranks) or the span (it does
    not).
    """

    way: tuple[int, ...]
    microbatches: int
    times: Times = field(default_factory=Times)
    memory: Memory = field(default_factory=Memory)
    capacity: tuple[float, ...] | float | None = None
    objective: Objective = "makespan"
    split: bool = True

    @property
    def ranks(self) -> int:
        return max(self.way) + 1

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """The most that each rank may hold."""
        if isinstance(self.capacity, tuple):
            return self.capacity
        return (float("inf") if self.capacity is None else self.capacity,) * self.ranks

    def value(self, schedule: Schedule) -> float:
        """The makespan or the span of a schedule."""
        line = simulate(schedule, self.times)
        return line.makespan if self.objective == "makespan" else line.span

    def allows(self, schedule: Schedule) -> bool:
        """Whether a schedule keeps to the placement and the memory."""
        if schedule.ways != (self.way,) or schedule.microbatches != self.microbatches or schedule.slices > 1:
            return False
        return all(held <= limit for held, limit in zip(peaks(schedule, self.memory), self.limits, strict=True))
