"""Schedules that the checker refuses, and its error messages."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.pipeline import (
    KNOWN_SCHEDULES,
    Action,
    ActionKind,
    Channel,
    ChunkMemory,
    Edge,
    Schedule,
    ScheduleError,
    check_schedule,
    linear,
    one_f_one_b,
    parse_action,
    parse_schedule,
    pipedream,
    with_transfers,
    zb_h1,
)


def schedule_of(*rows: str, m: int = 1, name: str = "mine") -> Schedule:
    """Return a schedule of one chunk per rank."""
    return Schedule(name, linear(len(rows)), m, tuple(tuple(map(parse_action, row.split())) for row in rows))


BROKEN = {
    "a backward is missing": (schedule_of("F0.0", "F0.1 BW0.1"), "BW0.0"),
    "a weight gradient is missing": (schedule_of("F0.0 B0.0", "F0.1 BW0.1"), "W0.0"),
    "twice": (schedule_of("F0.0 F0.0 BW0.0", "F0.1 BW0.1"), "F0.0 once"),
    "two kinds of backward": (schedule_of("F0.0 BW0.0 B0.0", "F0.1 BW0.1"), "once each"),
    "backward before forward": (schedule_of("BW0.0 F0.0", "F0.1 BW0.1"), "rank 0 is at BW0.0"),
    "another rank's chunk": (schedule_of("F0.0 F0.1 BW0.1 BW0.0", ""), "rank 1"),
    "no such microbatch": (schedule_of("F0.0 F7.0 BW0.0", "F0.1 BW0.1"), "counted from 0"),
    "weights before inputs": (schedule_of("F0.0 W0.0 B0.0", "F0.1 BW0.1"), "W0.0"),
    "ranks wait for each other": (
        schedule_of("F0.0 BW0.0 F1.0 BW1.0", "F1.1 BW1.1 F0.1 BW0.1", m=2),
        "rank 0 is at BW0.0 and waits for B0.1; rank 1 is at F1.1 and waits for F1.0",
    ),
    "a send without receive": (schedule_of("F0.0 >F0.0 <B0.1 BW0.0", "F0.1 BW0.1 >B0.1"), "with_transfers"),
    "an update too early": (schedule_of("F0.0 O BW0.0", "F0.1 BW0.1"), "stale=True"),
    "gathered too late": (schedule_of("F0.0 G.0 BW0.0", "F0.1 BW0.1"), "G.0 before it"),
    "scattered too early": (schedule_of("F0.0 S.0 BW0.0", "F0.1 BW0.1"), "S.0 after"),
    "an edge that leads back": (replace(one_f_one_b(2, 1), edges=(Edge(1, 0),)), "0>1"),
    "a way to nowhere": (replace(one_f_one_b(2, 1), ways=((0, 5),)), "way: 0 1"),
    "a route that is no way": (replace(one_f_one_b(2, 1), routes=(3,)), "number of a way for each microbatch"),
    "no microbatches": (replace(one_f_one_b(2, 3), microbatches=0), "1 microbatch or more"),
    "too few versions": (replace(one_f_one_b(2, 3), versions=(0,)), "3 numbers"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_tables_are_refused(what: str) -> None:
    schedule, told = BROKEN[what]
    with pytest.raises(ScheduleError, match="schedule") as caught:
        check_schedule(schedule)
    assert told in str(caught.value)


def test_capacity() -> None:
    assert check_schedule(one_f_one_b(4, 8), capacity=4) == (4, 3, 2, 1)
    with pytest.raises(ScheduleError, match="rank 0 holds up to 4"):
        check_schedule(one_f_one_b(4, 8), capacity=3)
    check_schedule(zb_h1(4, 8), memory=ChunkMemory(kept=0.5), capacity=(4, 3.5, 3, 2.5))


def test_stale_weights_need_an_option() -> None:
    with pytest.raises(ScheduleError, match="change what the optimizer means"):
        check_schedule(pipedream(2, 4))
    check_schedule(pipedream(2, 4), stale=True)


@pytest.mark.parametrize(
    ("first", "second", "versions", "says"),
    [
        ("F0.0 BW0.0 O F1.0 BW1.0", "F0.1 BW0.1 O F1.1 BW1.1", (), "microbatches 0 O 1 of chunk 0"),
        ("F0.0 F1.0 BW0.0 O BW1.0 O", "F0.1 F1.1 BW0.1 BW1.1 O", (), "0 1 O of chunk 1 on rank 1"),
        ("F0.0 BW0.0 O O F1.0 BW1.0 O", "F0.1 BW0.1 O O F1.1 BW1.1 O", (), "equally many microbatches"),
        ("F0.0 BW0.0 O F1.0 BW1.0 O", "F0.1 BW0.1 O F1.1 BW1.1 O", (0, 2), "with weights of 2 updates"),
    ],
)
def test_groups_of_updates(first: str, second: str, versions: tuple[int, ...], says: str) -> None:
    """Updates have the same groups on all ranks, of one size, and miss none; weights are used after their gather."""
    schedule = replace(schedule_of(first, second, m=2), versions=versions)
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule, stale=True)
    assert says in str(caught.value)


def test_versions_count_as_memory() -> None:
    assert check_schedule(pipedream(4, 8), stale=True, memory=ChunkMemory(weights=10.0)) == (34.0, 23.0, 12.0, 1.0)
    with pytest.raises(ScheduleError, match="holds up to 34"):
        check_schedule(pipedream(4, 8), stale=True, memory=ChunkMemory(weights=10.0), capacity=33)


def test_receives_in_another_order_than_sends() -> None:
    rows = "F0.0 >F0.0 F1.0 >F1.0 <B0.1 BW0.0 <B1.1 BW1.0", "<F1.0 F1.1 BW1.1 >B1.1 <F0.0 F0.1 BW0.1 >B0.1"
    schedule = schedule_of(*rows, m=2)
    with pytest.raises(ScheduleError, match=r"waits for >F0\.0, sent before it"):
        check_schedule(schedule, Channel.IN_ORDER)
    with pytest.raises(ScheduleError, match="no rank can continue"):
        check_schedule(schedule, Channel.RENDEZVOUS)


def test_messages_posted_together_match() -> None:
    """1F1B's ranks both send first in its middle; posted together, the messages match."""
    apart = with_transfers(one_f_one_b(2, 2))
    with pytest.raises(ScheduleError, match="rendezvous"):
        check_schedule(apart, Channel.RENDEZVOUS)
    rows = "F0.0 >F0.0 F1.0 >F1.0&<B0.1 BW0.0 <B1.1 BW1.0", "<F0.0 F0.1 BW0.1 <F1.0&>B0.1 F1.1 BW1.1 >B1.1"
    check_schedule(schedule_of(*rows, m=2), Channel.RENDEZVOUS)


def test_masks_have_no_gradient_to_send() -> None:
    """Nothing comes back along an edge without gradient, and skip connections name the other end."""
    plain = replace(one_f_one_b(3, 1), edges=(Edge(0, 1), Edge(1, 2), Edge(0, 2, gradient=False)))
    lowered = with_transfers(plain)
    assert [str(a) for a in lowered.rows[0]] == ["F0.0", ">F0.0", ">F0.0:2", "<B0.1", "BW0.0"]
    check_schedule(lowered)


NO_TABLES = [
    "",
    "mine",
    "mine: 1 microbatch\nway: a",
    "m: 1 microbatch\nway: 0\nF0.0",
    "m: 1 microbatch\nway: 0\n1: F0.0",
    "m: 1 microbatch\n0: F0.0",
    "m: 1 microbatch\nway: 0\n0: F0.0\n0: BW0.0",
    "m: 1 microbatch\nway: 0\n0: X3",
    "m: 1 microbatch\nway: 0\n0: F",
    "m: 1 microbatch\nway: 0\nedges: 0<1\n0: F0.0",
]


@pytest.mark.parametrize("text", NO_TABLES)
def test_invalid_table_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(text)
    assert caught.value.write


def broken(schedule: Schedule, rng: random.Random) -> Schedule:
    """Return the table with one action left out, written twice, moved to another rank, or renamed."""
    rows = [list(row) for row in schedule.rows]
    rank = rng.choice([r for r, row in enumerate(rows) if row])
    place = rng.randrange(len(rows[rank]))
    action = rows[rank][place]
    match rng.randrange(5):
        case 0:
            del rows[rank][place]
        case 1:
            rows[rank].insert(rng.randrange(len(rows[rank])), action)
        case 2:
            rows[(rank + 1) % len(rows)].append(rows[rank].pop(place))
        case 3:
            rows[rank][place] = action._replace(microbatch=action.microbatch + schedule.microbatches)
        case _:
            backward = next(
                n for n, a in enumerate(rows[rank]) if a.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
            )
            first = rows[rank].pop(backward)
            ahead = next(n for n, a in enumerate(rows[rank]) if a[:3] == (ActionKind.FORWARD, *first[1:3]))
            rows[rank].insert(ahead, first)
    return replace(schedule, rows=tuple(map(tuple, rows)))


@pytest.mark.parametrize("name", [n for n in KNOWN_SCHEDULES if n not in ("PipeDream", "PipeDream-2BW")])
def test_random_damage_is_found(name: str) -> None:
    rng = random.Random(name)
    k = KNOWN_SCHEDULES[name]
    schedule = k.build(4, 8, 2)
    if any(a.beside for row in schedule.rows for a in row):
        schedule = replace(schedule, rows=tuple(tuple(atom for a in row for atom in a.atoms) for row in schedule.rows))
    for table in (schedule, with_transfers(schedule)):
        for _ in range(20):
            with pytest.raises(ScheduleError):
                check_schedule(broken(table, rng))


def test_simultaneous_actions_end_together() -> None:
    action = parse_action("F4.0&B1.3")
    assert [str(a) for a in action.atoms] == ["F4.0", "B1.3"]
    assert str(action) == "F4.0&B1.3"
    assert action == Action(ActionKind.FORWARD, 4, 0, beside=Action(ActionKind.BACKWARD_INPUT, 1, 3))
