"""Checker of schedules: completeness, order, deadlock, weight versions and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .._errors import ScheduleError
from .action import COMPUTES, RECEIVES, TRANSFERS, Action, ActionKind
from .execution_order import Channel, Event, events, feasible_order, message_ranks
from .peak_memory import ChunkMemory, peaks
from .schedule import Schedule, atoms_of
from .weight_versions import is_asynchronous, update_groups, versions_used


def check_schedule(
    schedule: Schedule,
    channel: Channel = Channel.BUFFERED,
    *,
    memory: ChunkMemory | None = None,
    capacity: float | Sequence[float] | None = None,
    stale: bool = False,
) -> tuple[float, ...]:
    """Check that a table can run, and return the peak memory of each rank (see `peaks`).

    Args:
        schedule: the table.
        channel: how messages travel between two ranks.
        memory: bytes per chunk and microbatch; by default, microbatches are counted.
        capacity: upper bound on the memory of a rank; one number for all ranks, or one per rank.
        stale: allow weights to change between a microbatch's forward and its backward, or between two microbatches
            (asynchronous pipelines). The optimizer then computes something else than on one device.

    Raises:
        ScheduleError: the table cannot run; the error names the action at fault.
    """
    _check_ways(schedule)
    _check_actions(schedule)
    _check_complete(schedule)
    _check_messages(schedule)
    for _ in feasible_order(schedule, channel):
        pass
    _check_updates(schedule, stale)
    found = peaks(schedule, memory)
    _check_capacity(schedule, found, capacity)
    return found


def _wrong(schedule: Schedule, found: str, why: str, write: str) -> ScheduleError:
    return ScheduleError(f"schedule {schedule.name!r}", found, why, write)


def _check_ways(schedule: Schedule) -> None:
    """Check that ways name existing ranks, routes name ways, edges lead forward, and there is a microbatch."""
    owners = {rank for way in schedule.ways for rank in way}
    lengths = {len(way) for way in schedule.ways}
    if len(lengths) != 1 or 0 in lengths or not owners <= set(range(schedule.ranks)):
        raise _wrong(
            schedule,
            f"ways {schedule.ways} and {schedule.ranks} rows",
            "each way must name a rank with a row for every chunk, and all copies must have the same chunks",
            "write way: 0 1 for two chunks on two ranks",
        )
    if schedule.routes and (
        len(schedule.routes) != schedule.microbatches or not set(schedule.routes) <= set(range(len(schedule.ways)))
    ):
        raise _wrong(
            schedule,
            f"routes {schedule.routes}",
            f"each of {schedule.microbatches} microbatches must take one of {len(schedule.ways)} ways",
            "give the number of a way for each microbatch",
        )
    for e in schedule.edges:
        if not 0 <= e.source < e.target < schedule.chunks:
            raise _wrong(schedule, f"an edge {e.source}>{e.target}", "an edge must lead to a later chunk", "write 0>1")
    if schedule.microbatches < 1:
        found = f"{schedule.microbatches} microbatches"
        raise _wrong(schedule, found, "a batch needs at least one microbatch", "use 1 microbatch or more")
    if schedule.versions and len(schedule.versions) != schedule.microbatches:
        raise _wrong(
            schedule,
            f"versions {schedule.versions}",
            "each microbatch uses one version of the weights",
            f"give {schedule.microbatches} numbers",
        )


def _check_actions(schedule: Schedule) -> None:
    """Check that every action names an existing microbatch and chunk, on the rank that runs the chunk."""
    for rank, atom in schedule.atoms():
        if atom.kind is ActionKind.OPTIMIZER:
            continue
        ends = (atom.chunk, atom.other_end) if atom.kind in TRANSFERS else (atom.chunk,)
        in_range = all(0 <= c < schedule.chunks for c in ends)
        if atom.kind in COMPUTES | TRANSFERS:
            in_range = in_range and 0 <= atom.microbatch < schedule.microbatches
        if not in_range:
            raise _wrong(
                schedule,
                f"{atom} on rank {rank}",
                f"there are {schedule.microbatches} microbatches and {schedule.chunks} chunks, counted from 0",
                "use smaller numbers",
            )
        _check_rank(schedule, rank, atom)


def _check_rank(schedule: Schedule, rank: int, atom: Action) -> None:
    if atom.kind in COMPUTES:
        owners = {schedule.rank_of(atom.microbatch, atom.chunk)}
    elif atom.kind in TRANSFERS:
        owners = {message_ranks(schedule, atom)[atom.kind in RECEIVES]}
    else:
        owners = {way[atom.chunk] for way in schedule.ways}
    if rank not in owners:
        raise _wrong(
            schedule,
            f"{atom} on rank {rank}",
            f"the action belongs to rank {', '.join(map(str, sorted(owners)))}",
            f"move {atom} to that rank's row, or change the way",
        )


_RUN = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
    ActionKind.RECOMPUTE,
)


def _check_complete(schedule: Schedule) -> None:
    """Check that each chunk runs F once per microbatch, then BW once, or B once and W once; and R at most once."""
    counts = Counter((a.kind, a.microbatch, a.chunk) for _, a in schedule.atoms() if a.kind in COMPUTES)
    for m in range(schedule.microbatches):
        for c in range(schedule.chunks):
            f, bw, b, w, r = (counts[kind, m, c] for kind in _RUN)
            if f != 1 or (bw, b, w) not in ((1, 0, 0), (0, 1, 1)) or r > 1:
                found = {"F": f, "BW": bw, "B": b, "W": w, "R": r}
                raise _wrong(
                    schedule,
                    f"microbatch {m} at chunk {c}: " + ", ".join(f"{n} times {k}" for k, n in found.items()),
                    "each chunk must run one forward and one backward of each microbatch",
                    f"run F{m}.{c} once, and BW{m}.{c} once or B{m}.{c} and W{m}.{c} once each",
                )


def _check_messages(schedule: Schedule) -> None:
    """Check that each message is sent once and received once, and that no message is missing."""
    if not schedule.has_transfers:
        return
    counts = Counter(e for _, a in schedule.atoms() if a.kind in TRANSFERS for e in events(a))
    wanted = set(_messages(schedule))
    for event in (*counts, *wanted):
        if counts[event] != 1 or event not in wanted:
            raise _wrong(
                schedule,
                f"{counts[event]} times {_message(event)}",
                "each edge between two ranks carries one message forward, and one back if it has a gradient",
                "call with_transfers on the schedule without sends and receives",
            )


def _message(event: Event) -> str:
    return str(Action(event.kind, event.microbatch, event.chunk, event.to))


def _messages(schedule: Schedule) -> Iterator[Event]:
    """Yield the sends and receives that the edges of a schedule need."""
    for m in range(schedule.microbatches):
        for e in schedule.all_edges:
            if schedule.rank_of(m, e.source) != schedule.rank_of(m, e.target):
                yield Event(ActionKind.SEND_FORWARD, m, e.source, e.target)
                yield Event(ActionKind.RECEIVE_FORWARD, m, e.source, e.target)
                if e.gradient:
                    yield Event(ActionKind.SEND_BACKWARD, m, e.target, e.source)
                    yield Event(ActionKind.RECEIVE_BACKWARD, m, e.target, e.source)


def _check_updates(schedule: Schedule, stale: bool) -> None:
    """Check the place of updates, gathers and scatters in each row.

    Without `stale`, a row must update its weights after its last backward.
    """
    for rank, row in enumerate(schedule.rows):
        atoms = list(atoms_of(row))
        if not stale:
            _check_update_last(schedule, rank, atoms)
        _check_gathers(schedule, rank, atoms)
    if stale and is_asynchronous(schedule):
        _check_groups(schedule)
        _check_versions(schedule)


def _check_update_last(schedule: Schedule, rank: int, atoms: Sequence[Action]) -> None:
    """Check that a row updates its weights after its last backward."""
    updates = [n for n, atom in enumerate(atoms) if atom.kind is ActionKind.OPTIMIZER]
    last = max((n for n, atom in enumerate(atoms) if atom.kind in COMPUTES), default=-1)
    if updates and (updates[0] < last or schedule.versions):
        raise _wrong(
            schedule,
            f"{atoms[updates[0]]} on rank {rank}, before {atoms[last]}",
            "updates with microbatches in flight change what the optimizer means",
            "move O to the end of the row; or call check_schedule(schedule, stale=True) to allow it",
        )


def _check_groups(schedule: Schedule) -> None:
    """Check that all updates take equally many microbatches, the same on all ranks, and that none is left out."""
    found = update_groups(schedule)
    at, first = next(iter(found.items()))
    other = next((place for place, taken in found.items() if taken != first), at)
    if other != at or len({len(group) for group in first[:-1]}) != 1 or first[-1]:
        raise _wrong(
            schedule,
            " and ".join(_groups_text(*place, found[place]) for place in dict.fromkeys((at, other))),
            "each update must take equally many microbatches, the same on all ranks, and none may be left out",
            "put O after the last backward of each group, in every row",
        )


def _groups_text(rank: int, chunk: int, taken: Sequence[frozenset[int]]) -> str:
    numbers = " O ".join(" ".join(map(str, sorted(group))) for group in taken)
    return f"gradients of microbatches {' '.join(numbers.split())} of chunk {chunk} on rank {rank}"


def _check_versions(schedule: Schedule) -> None:
    """Check that no microbatch uses a version of the weights before it exists."""
    for rank, row in enumerate(schedule.rows):
        made = 0
        for atom, version in versions_used(schedule, row):
            made += atom.kind is ActionKind.OPTIMIZER
            if not 0 <= version <= made:
                raise _wrong(
                    schedule,
                    f"{atom} on rank {rank} with weights of {version} updates",
                    f"only {made} updates exist at that time",
                    f"use versions of at most {made}",
                )


def _check_gathers(schedule: Schedule, rank: int, atoms: Sequence[Action]) -> None:
    """Check that gathered parameters are gathered before their first use, and gradients scattered after a BW or W."""
    gathered = {a.chunk for a in atoms if a.kind is ActionKind.GATHER}
    seen: set[tuple[ActionKind, int]] = set()
    for atom in atoms:
        c, found = atom.chunk, f"{atom} on rank {rank}"
        if atom.kind in COMPUTES and c in gathered and (ActionKind.GATHER, c) not in seen:
            raise _wrong(schedule, found, f"the parameters of chunk {c} are not gathered yet", f"put G.{c} before it")
        gradients = {(ActionKind.BACKWARD, c), (ActionKind.BACKWARD_WEIGHT, c)}
        if atom.kind is ActionKind.SCATTER and gradients.isdisjoint(seen):
            raise _wrong(schedule, found, "no gradients exist yet", f"put S.{c} after a BW or W of that chunk")
        seen.add((atom.kind, c))


def _check_capacity(schedule: Schedule, found: Sequence[float], capacity: float | Sequence[float] | None) -> None:
    if capacity is None:
        return
    most = capacity if isinstance(capacity, Sequence) else [capacity] * len(found)
    for rank, (needed, there) in enumerate(zip(found, most, strict=True)):
        if needed > there:
            raise _wrong(
                schedule,
                f"rank {rank} holds up to {needed:g}",
                f"its capacity is {there:g}",
                "use a schedule with fewer microbatches in flight (ZB-1p, V-Half, V-Min), or smaller microbatches",
            )


def channels(schedule: Schedule) -> dict[Channel, bool]:
    """Return, for each kind of channel, True if the table runs over it without deadlock.

    >>> from meshwright.pipeline import gpipe, with_transfers
    >>> {str(c): runs for c, runs in channels(with_transfers(gpipe(2, 4))).items()}
    {'buffered': True, 'in order': True, 'rendezvous': True}
    """
    return {channel: _runs(schedule, channel) for channel in Channel}


def _runs(schedule: Schedule, channel: Channel) -> bool:
    try:
        for _ in feasible_order(schedule, channel):
            pass
    except ScheduleError:
        return False
    return True
