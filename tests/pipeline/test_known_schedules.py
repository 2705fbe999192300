"""Every known schedule runs, and has the values of its closed form."""

from __future__ import annotations

import random
import re
from contextlib import suppress

import pytest

from meshwright.pipeline import (
    KNOWN_SCHEDULES,
    Action,
    Channel,
    ChunkMemory,
    KnownSchedule,
    Schedule,
    ScheduleError,
    ScheduleSizes,
    Times,
    channels,
    check_schedule,
    parse_schedule,
    peaks,
    schedule_by_name,
    simulate_schedule,
    wave,
    weight_versions,
    with_transfers,
    zero_bubble,
)
from meshwright.pipeline.simulation.simulator import Clock

SHAPES = [(2, 2), (2, 4), (2, 8), (3, 6), (4, 4), (4, 8), (4, 16), (6, 12)]


def made(k: KnownSchedule, p: int, m: int, v: int) -> Schedule | None:
    """Return the schedule, or None if it refuses these sizes."""
    with suppress(ScheduleError):
        return k.build(p, m, v)
    return None


@pytest.mark.parametrize("name", KNOWN_SCHEDULES)
@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_closed_forms(name: str, p: int, m: int) -> None:
    k = schedule_by_name(name)
    for v in (1, 2, 3) if k.takes_chunks else (1,):
        schedule = made(k, p, m, v)
        if schedule is None:
            continue
        check_schedule(schedule, stale=name.startswith("PipeDream"))
        shape = ScheduleSizes(p, m, v)
        if k.holds(shape):
            holds_forms(k, schedule, shape)


def holds_forms(k: KnownSchedule, schedule: Schedule, s: ScheduleSizes) -> None:
    """Check makespan, span and peak against the closed forms, which may be upper bounds."""
    parts = schedule.chunks // s.p if len(schedule.ways) == 1 else 1
    times = Times(s.f / parts, s.b / parts, s.w / parts)
    line = simulate_schedule(schedule, times)
    if k.bubble is not None:
        assert line.makespan == pytest.approx(s.work + k.bubble(s))
    if k.span_bubble is not None:
        assert line.span == pytest.approx(s.work + k.span_bubble(s))
    if k.peak is not None:
        assert max(peaks(schedule)) / parts == pytest.approx(k.peak(s))


@pytest.mark.parametrize("name", KNOWN_SCHEDULES)
def test_text_means_the_same_table(name: str) -> None:
    for p, m in ((2, 4), (4, 8)):
        schedule = made(schedule_by_name(name), p, m, 2)
        if schedule is not None:
            assert parse_schedule(str(schedule)) == schedule
            lowered = with_transfers(schedule)
            assert parse_schedule(str(lowered)) == lowered


@pytest.mark.parametrize("name", KNOWN_SCHEDULES)
def test_explicit_transfers_change_neither_time_nor_memory(name: str) -> None:
    times = Times(3.0, 4.0, 2.0, transfer=0.5)
    for p, m in ((2, 4), (4, 8)):
        schedule = made(schedule_by_name(name), p, m, 2)
        if schedule is not None:
            lowered = with_transfers(schedule)
            check_schedule(lowered, stale=True)
            assert simulate_schedule(lowered, times).makespan == pytest.approx(
                simulate_schedule(schedule, times).makespan
            )
            assert peaks(lowered) == peaks(schedule)


def test_known_schedules_run_on_their_kind_of_channel() -> None:
    """GPipe runs over unbuffered channels, 1F1B over buffered ones, V-Half needs tags."""
    found = {
        name: tuple(c for c, runs in channels(with_transfers(schedule_by_name(name).make(4, 8))).items() if runs)
        for name in ("GPipe", "1F1B", "V-Half")
    }
    assert found["GPipe"] == (Channel.BUFFERED, Channel.IN_ORDER, Channel.RENDEZVOUS)
    assert found["1F1B"] == (Channel.BUFFERED, Channel.IN_ORDER)
    assert found["V-Half"] == (Channel.BUFFERED,)


def test_bubbles_of_the_zero_bubble_paper() -> None:
    """Table 5 of arXiv 2401.10241, from the times of its table 9: 1.5B, p = 8, m = 24."""
    times = Times(18.522, 18.086, 9.337, transfer=0.601)
    published = {"1F1B": 0.2431, "ZB-H1": 0.1585, "ZB-H2": 0.1083, "ZB-1p": 0.1585, "ZB-2p": 0.0433}
    for name, bubble in published.items():
        make = schedule_by_name(name).make
        schedule = make(8, 24, times) if name in ("ZB-1p", "ZB-2p") else make(8, 24)
        assert simulate_schedule(schedule, times).span_bubble == pytest.approx(bubble, abs=1e-4), name


def test_a_table_looks_for_inputs_a_few_times_for_each_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of chunks does not matter, so that a search can try waves of many chunks."""
    looked, original = list[Action](), Clock.arrival

    def arrival(clock: Clock, rank: int, action: Action) -> float | None:
        looked.append(action)
        return original(clock, rank, action)

    monkeypatch.setattr(Clock, "arrival", arrival)
    table = wave(2, 8, 16)
    assert len(looked) <= 2 * 12 * sum(map(len, table.rows))  # two tables are made


def test_weight_versions() -> None:
    assert weight_versions(schedule_by_name("PipeDream").make(4, 8)) == (4, 3, 2, 1)
    assert weight_versions(schedule_by_name("PipeDream-2BW").make(4, 8)) == (2, 2, 2, 2)


def test_memory_in_bytes() -> None:
    """B releases the memory that W does not need; a chunk's static bytes are always in memory."""
    memory = ChunkMemory(held=10.0, kept=4.0, static=(100.0, 200.0))
    assert peaks(schedule_by_name("ZB-H1").make(2, 4), memory) == (100.0 + 20.0, 200.0 + 14.0)


@pytest.mark.parametrize(("p", "m", "units"), [(4, 16, 101), (6, 12, 83), (8, 16, 113)])
def test_v_half_in_half_of_the_memory(p: int, m: int, units: int) -> None:
    """At p = 8 and m = 16 the best known table takes 56.5 times a pass of a stage, which is two units here."""
    table = schedule_by_name("V-Half").build(p, m, 2)
    assert simulate_schedule(table, Times()).makespan == units
    assert max(peaks(table)) == p + 2  # of 2p units of 1F1B


def test_zero_bubble_with_random_times() -> None:
    rng = random.Random(3)
    for _ in range(300):
        p, m = rng.randint(2, 5), rng.randint(1, 9)
        f, b, w = (tuple(rng.choice((0.05, 0.7, 1.0, 3.0)) for _ in range(p)) for _ in range(3))
        check_schedule(
            zero_bubble("ZB", p, m, rng.choice((1.0, float(p), 2.0 * p)), Times(f, b, w, transfer=rng.random()))
        )


@pytest.mark.parametrize("name", KNOWN_SCHEDULES)
def test_a_schedule_names_its_source(name: str) -> None:
    assert re.fullmatch(r"arXiv \d{4}\.\d{5}|sail-sg, DualPipe cut in half", KNOWN_SCHEDULES[name].source)
    assert KNOWN_SCHEDULES[name].times in ("any", "F=B=W", "B+W=2F")


@pytest.mark.parametrize("name", ["Seq1F1B", "TeraPipe"])
def test_schedules_over_slices_of_sequences_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="sequences in a pipeline stay whole"):
        schedule_by_name(name)
