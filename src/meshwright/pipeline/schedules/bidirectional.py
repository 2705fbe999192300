"""Schedules that send microbatches through the model from both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..simulation.compaction import compacted
from ..table.action import Action
from ..table.peak_memory import peaks
from ..table.schedule import Schedule, both_ways, zigzag
from .flush_schedules import backward, backward_input, backward_weight, forward, require, require_counts

Unit = tuple[int, int]


class _Row:
    """The row of one rank of a DualPipe, built phase by phase.

    `units` gives the nth (microbatch, chunk) of each of the two streams: stream 0 starts first, stream 1 comes back.
    """

    def __init__(self, units: Callable[[int, int], Unit]) -> None:
        self.units = units
        self.actions: list[Action] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.late: list[Unit] = []

    def _forward(self, stream: int) -> Action:
        self.forwards[stream] += 1
        return forward(*self.units(stream, self.forwards[stream] - 1))

    def _backward(self, stream: int) -> Unit:
        self.backwards[stream] += 1
        return self.units(stream, self.backwards[stream] - 1)

    def run_forward(self, stream: int) -> None:
        self.actions.append(self._forward(stream))

    def run_backward(self, stream: int, split: bool = False) -> None:
        unit = self._backward(stream)
        if split:
            self.late.append(unit)
        self.actions.append(backward_input(*unit) if split else backward(*unit))

    def run_both(self, ahead: int, behind: int) -> None:
        """Run a forward and a backward side by side."""
        first = self._forward(ahead)
        self.actions.append(first._replace(beside=backward(*self._backward(behind))))

    def run_weight(self) -> None:
        self.actions.append(backward_weight(*self.late.pop(0)))

    def phases(self, place: int, places: int, rounds: int) -> tuple[Action, ...]:
        """Return the actions of the eight phases.

        `place` counts from the end of the pipeline to the middle, where a microbatch turns or two streams meet.
        `rounds` is the number of microbatches of a stream.
        """
        outside, inside, middle = places - 1 - place, place + 1, place == places - 1
        for _ in range(2 * outside):
            self.run_forward(0)
        for _ in range(inside):
            self.run_forward(0)
            self.run_forward(1)
        for _ in range(outside):
            self.run_backward(1, split=True)
            self.run_weight()
            self.run_forward(1)
        self._main(rounds - 2 * places + inside, middle)
        for _ in range(outside):
            self.run_backward(1)
            self.run_both(1, 0)
        self._last(inside, place)
        for _ in range(outside):
            self.run_weight()
            self.run_backward(0, split=True)
        while self.late:
            self.run_weight()
        return tuple(self.actions)

    def _main(self, rounds: int, middle: bool) -> None:
        for n in range(rounds):
            if n == 0 and middle:
                self.run_forward(0)
                self.run_backward(1)
            else:
                self.run_both(0, 1)
            self.run_both(1, 0)

    def _last(self, inside: int, place: int) -> None:
        """Run backwards of both streams; the second half leaves its weight gradients for the bubbles that follow."""
        split = False
        for n in range(inside):
            split = split or (n == inside // 2 and place % 2 == 1)
            self.run_backward(1, split)
            split = split or (n == inside // 2 and place % 2 == 0)
            self.run_backward(0, split)


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Two streams that meet in the middle, forward beside backward: two copies of the model (arXiv 2412.19437)."""
    name = "DualPipe"
    require_counts(name, ranks, microbatches)
    require(
        name,
        ranks % 2 == 0 and microbatches % 2 == 0 and microbatches >= 2 * ranks,
        f"{ranks} ranks, {microbatches} microbatches",
        "half of the microbatches enter at each end, and must fill all ranks",
        f"use an even number of ranks, and an even number of at least {2 * (ranks + ranks % 2)} microbatches",
    )
    half = microbatches // 2

    def row(r: int) -> tuple[Action, ...]:
        second = r >= ranks // 2

        def units(stream: int, n: int) -> Unit:
            way = stream ^ second
            return (n + half * way, r if way == 0 else ranks - 1 - r)

        return _Row(units).phases(min(r, ranks - 1 - r), ranks // 2, half)

    routes = (0,) * half + (1,) * half
    return Schedule(name, both_ways(ranks), microbatches, tuple(map(row, range(ranks))), routes)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe cut in half: one copy of the model in a V, forward beside backward (sail-sg, "cut-in-half")."""
    name = "DualPipe-V"
    require_counts(name, ranks, microbatches)
    require(
        name,
        microbatches >= 2 * ranks,
        f"{ranks} ranks, {microbatches} microbatches",
        "the first microbatch runs backward when the last one starts",
        f"use at least {2 * ranks} microbatches",
    )

    def row(r: int) -> tuple[Action, ...]:
        return _Row(lambda stream, n: (n, 2 * ranks - 1 - r if stream else r)).phases(r, ranks, microbatches)

    return Schedule(name, zigzag(ranks), microbatches, tuple(map(row, range(ranks))))


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Two 1F1B from both ends that fill one another's bubbles, p microbatches after p (arXiv 2107.06925).

    Two copies of the model. The bubble is 2F(p - 2) for p microbatches, and grows with more of them.
    """
    return _chimera("Chimera", ranks, microbatches, 1)


def chimera_doubled(ranks: int, microbatches: int) -> Schedule:
    """Chimera with two microbatches side by side in each forward, so that it takes as long as a backward (B + W = 2F).

    With those times the bubble does not grow with the number of microbatches. It holds twice as many of them.
    """
    return _chimera("Chimera, forward doubling", ranks, microbatches, 2)


def _chimera(name: str, ranks: int, microbatches: int, together: int) -> Schedule:
    require_counts(name, ranks, microbatches)
    require(
        name,
        ranks % 2 == 0 and microbatches % 2 == 0,
        f"{ranks} ranks, {microbatches} microbatches",
        "half of the microbatches enter at each end",
        "use even numbers",
    )
    units = [range(n, min(n + together * ranks, microbatches)) for n in range(0, microbatches, together * ranks)]
    halves = [(unit[: len(unit) // 2], unit[len(unit) // 2 :]) for unit in units]
    routes = tuple(way for unit in halves for way, half in enumerate(unit) for _ in half)
    rows = tuple(tuple(a for unit in halves for a in _unit_row(r, ranks, unit, together)) for r in range(ranks))
    schedule = Schedule(name, both_ways(ranks), microbatches, rows, routes)
    return compacted(schedule, capacity=max(peaks(schedule)))


def _unit_row(r: int, ranks: int, halves: tuple[range, range], together: int) -> Iterator[Action]:
    """Yield the actions of one unit on rank r, of both ways, sorted by their start if each way ran alone."""
    placed = [
        (start, way, action)
        for way, half in enumerate(halves)
        for start, action in _alone(r if way == 0 else ranks - 1 - r, ranks, half, together)
    ]
    yield from (action for _, _, action in sorted(placed, key=lambda p: p[:2]))


def _alone(stage: int, ranks: int, members: range, together: int) -> Iterator[tuple[int, Action]]:
    """Yield (start, action) of one way's 1F1B at a stage. The unit of time is a forward; a backward takes two."""
    for n in range(0, len(members), together):
        group = members[n : n + together]
        first = forward(group[0], stage)
        second = forward(group[1], stage) if group[1:] else None
        yield together * stage + 2 * n, first._replace(beside=second)
        for k, m in enumerate(group):
            yield together * ranks + 2 * (ranks - 1 - stage) + 2 * (n + k), backward(m, stage)
