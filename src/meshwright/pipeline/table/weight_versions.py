"""Versions of the weights in asynchronous schedules: weights that change while microbatches are in flight.

The optimizer then computes something else than on one device. `check` refuses these schedules without `stale=True`, and
the static mode without `pipeline.asynchronous`. Each update takes the mean gradient of a group of microbatches. The
group is the same on all ranks, so "version n" means n updates on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .action import COMPUTES, Action, ActionKind
from .schedule import Row, Schedule, atoms_of


def is_asynchronous(schedule: Schedule) -> bool:
    """True if weights change while microbatches are in flight."""
    return bool(schedule.versions) or any(_updates_early(row) for row in schedule.rows)


def _updates_early(row: Row) -> bool:
    kinds = [atom.kind for atom in atoms_of(row)]
    if ActionKind.OPTIMIZER not in kinds:
        return False
    return not COMPUTES.isdisjoint(kinds[kinds.index(ActionKind.OPTIMIZER) :])


def updates(schedule: Schedule) -> int:
    """Return the number of weight updates of a step; it is 1 unless the schedule is asynchronous.

    >>> from meshwright.pipeline import one_f_one_b, pipedream, pipedream_2bw
    >>> updates(pipedream(4, 8)), updates(pipedream_2bw(4, 8)), updates(one_f_one_b(4, 8))
    (8, 2, 1)
    """
    kinds = [atom.kind for atom in atoms_of(schedule.rows[0])]
    return kinds.count(ActionKind.OPTIMIZER) if is_asynchronous(schedule) else 1


def update_groups(schedule: Schedule) -> Mapping[tuple[int, int], tuple[frozenset[int], ...]]:
    """Map each (rank, chunk) to the microbatches whose gradients each update takes.

    The last group belongs to no update.
    """
    return {(rank, chunk): taken for rank, row in enumerate(schedule.rows) for chunk, taken in _groups(row)}


def _groups(row: Row) -> Iterator[tuple[int, tuple[frozenset[int], ...]]]:
    atoms = list(atoms_of(row))
    for chunk in sorted({atom.chunk for atom in atoms if atom.kind in COMPUTES}):
        taken: list[set[int]] = [set()]
        for atom in atoms:
            if atom.kind is ActionKind.OPTIMIZER:
                taken.append(set())
            elif atom.chunk == chunk and atom.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                taken[-1].add(atom.microbatch)
        yield chunk, tuple(map(frozenset, taken))


def versions_used(schedule: Schedule, row: Row) -> Iterator[tuple[Action, int]]:
    """Yield the actions of a row separately, with the version of the weights that each uses.

    Version n is the version after n updates. An update is paired with the version that it makes. A microbatch's
    backward pass uses the version of its forward pass.
    """
    made = 0
    used: dict[tuple[int, int], int] = {}
    for atom in atoms_of(row):
        m, at = atom.microbatch, (atom.microbatch, atom.chunk)
        if atom.kind is ActionKind.FORWARD:
            used[at] = schedule.versions[m] if schedule.versions else made
        made += atom.kind is ActionKind.OPTIMIZER
        yield atom, used.get(at, made)


def held_version_counts(schedule: Schedule, row: Row) -> Iterator[int]:
    """Yield, after each action of a row, the number of versions held: the newest, and those that later actions use."""
    used = [*versions_used(schedule, row)]
    last = {version: n for n, (_, version) in enumerate(used)}
    made = 0
    for n, (atom, _) in enumerate(used):
        made += atom.kind is ActionKind.OPTIMIZER
        yield 1 + sum(version < made and at > n for version, at in last.items())


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return the largest number of versions of the weights that each rank holds at one time.

    >>> from meshwright.pipeline import one_f_one_b, pipedream, pipedream_2bw
    >>> weight_versions(pipedream(4, 8)), weight_versions(pipedream_2bw(4, 8)), weight_versions(one_f_one_b(4, 8))
    ((4, 3, 2, 1), (2, 2, 2, 2), (1, 1, 1, 1))
    """
    return tuple(max(held_version_counts(schedule, row), default=1) for row in schedule.rows)
