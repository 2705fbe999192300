"""The peak memory of a row, compared with a plain count of allocations and releases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.pipeline import (
    KNOWN_SCHEDULES,
    ActionKind,
    ChunkMemory,
    Schedule,
    Times,
    linear,
    parse_action,
    peaks,
    simulate_schedule,
)

SEVERAL = ChunkMemory(held=(5.0, 7.0), kept=(2.0, 3.0), inputs=(1.0, 2.0), static=(10.0, 20.0))


def schedule_of(*rows: str, m: int) -> Schedule:
    return Schedule("mine", linear(len(rows)), m, tuple(tuple(map(parse_action, row.split())) for row in rows))


def accounted(schedule: Schedule, rank: int, memory: ChunkMemory) -> float:
    """Return the peak memory of a rank; in each place, memory is allocated before other memory is released."""

    def of(values: float | tuple[float, ...] | None, chunk: int) -> float:
        return values[chunk] if isinstance(values, tuple) else values or 0.0

    held: dict[tuple[int, int], float] = {}
    most = 0.0
    for action in schedule.rows[rank]:
        after = dict(held)
        for atom in action.atoms:
            at, c = (atom.microbatch, atom.chunk), atom.chunk
            if atom.kind in (ActionKind.FORWARD, ActionKind.RECOMPUTE):
                short = atom.kind is ActionKind.FORWARD and at in schedule.recomputed
                after[at] = of(memory.inputs if short else memory.held, c)
            elif atom.kind is ActionKind.BACKWARD_INPUT:
                after[at] = of(memory.held if memory.kept is None else memory.kept, c)
            elif atom.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                del after[at]
        during = {at: max(held.get(at, 0.0), after.get(at, 0.0)) for at in {*held, *after}}
        most, held = max(most, sum(during.values())), after
    assert not held, "the step did not release all memory"
    chunks = [c for way in schedule.ways for c, owner in enumerate(way) if owner == rank]
    return most + sum(of(memory.static, c) for c in chunks)


@pytest.mark.parametrize(
    ("row", "peak"),
    [
        ("F0.0 BW0.0 F1.0 BW1.0", 1.0),
        ("F0.0 F1.0&BW0.0 BW1.0", 2.0),  # the forward pass allocates before the backward pass releases
        ("F0.0 BW0.0&F1.0 BW1.0", 2.0),
        ("F0.0 F1.0 BW0.0 BW1.0", 2.0),
    ],
)
def test_simultaneous_actions_both_hold_memory(row: str, peak: float) -> None:
    assert peaks(schedule_of(row, m=2)) == (peak,)


@pytest.mark.parametrize("name", [n for n in KNOWN_SCHEDULES if n not in ("PipeDream", "PipeDream-2BW")])
def test_peaks_of_known_schedules(name: str) -> None:
    known = KNOWN_SCHEDULES[name]
    schedule = known.build(4, 8, 2)
    chunks = schedule.chunks
    several = ChunkMemory(*(tuple(base + c for c in range(chunks)) for base in (5.0, 2.0, 1.0, 10.0)))
    for memory in (ChunkMemory(), ChunkMemory(held=3.0, kept=1.0, static=2.0), several):
        expected = tuple(accounted(schedule, rank, memory) for rank in range(schedule.ranks))
        assert peaks(schedule, memory) == expected
        assert simulate_schedule(schedule).peaks(memory) == expected


def test_recomputed_forwards_keep_their_inputs() -> None:
    schedule = schedule_of("F0.0 F1.0 R0.0 BW0.0 R1.0 B1.0 W1.0", "F0.1 B0.1 W0.1 F1.1 R1.1 BW1.1", m=2)
    assert peaks(schedule, SEVERAL) == (10.0 + 1.0 + 5.0, 20.0 + 7.0)
    assert peaks(schedule, SEVERAL) == tuple(accounted(schedule, rank, SEVERAL) for rank in range(2))


TIMES = Times(
    forward=(1.0, 2.0),
    backward=(3.0, 4.0),
    weight=(5.0, 6.0),
    transfer=(0.5, 0.25),
    recompute=(7.0, 8.0),
    gather=(0.125, 0.5),
    scatter=2.0,
    optimizer=10.0,
    overhead=0.0625,
    slowdown=0.75,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("F0.1", 2.0),
        ("B0.1", 4.0),
        ("W0.1", 6.0),
        ("BW0.0", 8.0),
        ("R0.1", 8.0),
        ("G.1", 0.5),
        ("S.1", 2.0),
        ("O", 10.0),
        (">F0.0", 0.0),
        ("<B0.1", 0.0),
    ],
)
def test_the_time_of_an_action(text: str, seconds: float) -> None:
    assert TIMES.of(parse_action(text)) == seconds
    assert TIMES.length(parse_action(text)) == seconds + 0.0625
    assert TIMES.length(parse_action(f"{text}&F1.0")) == (seconds + 1.0) * 0.75 + 0.0625


def test_times_of_chunks_and_messages() -> None:
    assert replace(TIMES, recompute=None).of(parse_action("R0.1")) == 2.0
    assert TIMES.of_chunk(1) == (2.0, 4.0, 6.0)
    assert TIMES.message(1, 0) == TIMES.message(0, 1) == 0.5
    assert TIMES.message(1, 2) == 0.25


def test_a_step_of_two_ranks_by_hand() -> None:
    """Rank 1 waits for a message and rank 0 for the gradient; these waits are the bubble."""
    line = simulate_schedule(schedule_of("F0.0 BW0.0", "F0.1 BW0.1", m=1), replace(TIMES, overhead=0.0))
    assert [(t.start, t.end) for row in line.rows for t in row] == [(0, 1), (14.0, 22.0), (1.5, 3.5), (3.5, 13.5)]
    assert (line.makespan, line.span) == (22.0, 22.0)
    assert line.busy == (9.0, 12.0)
    assert line.bubble == 1 - 21 / 44
    assert line.span_bubble == 1 - 12 / 22
