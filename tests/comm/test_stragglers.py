"""Detection of slow ranks over patterns of slowness, with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from meshwright.comm import simulate, stragglers
from meshwright.comm.communicators.stragglers import Straggler, Waits, is_slow

Slowness = Callable[[int, int], float]
"""Additional seconds of a rank in a step."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def reported_stragglers(ranks: int, steps: int, extra: Slowness, step_s: float = 0.1) -> dict[int, list[int]]:
    """Return by rank the ranks that it would warn of after all-reduces of all ranks."""
    clock = Clock()
    waits = [Waits(clock) for _ in range(ranks)]
    for step in range(steps):
        arrivals = [step_s + extra(rank, step) for rank in range(ranks)]
        clock.now += max(arrivals)
        for rank in range(ranks):
            latest = arrivals[rank]
            for peer in range(ranks):
                if peer != rank:
                    waits[rank].note(peer, max(arrivals[peer] - latest, 0.0))
                    latest = max(latest, arrivals[peer])
    found = [each.stragglers(lambda peer: waits[peer].share()) for each in waits]
    return {rank: [each.rank for each in of_rank if is_slow(each)] for rank, of_rank in enumerate(found)}


@pytest.mark.parametrize(("ranks", "slow"), [(n, r) for n in (2, 3, 4, 8) for r in range(n)])
def test_a_slow_rank_is_named_by_all_others(ranks: int, slow: int) -> None:
    found = reported_stragglers(ranks, 60, lambda rank, step: 0.2 * (rank == slow))
    assert found == {rank: [] if rank == slow else [slow] for rank in range(ranks)}


@pytest.mark.parametrize(("ranks", "period"), list(product((2, 3, 4), (1, 2, 3, 5))))
def test_ranks_that_take_turns_are_not_named(ranks: int, period: int) -> None:
    found = reported_stragglers(ranks, 60 * period, lambda rank, step: 0.2 * (step // period % ranks == rank))
    assert not any(found.values()), found


@pytest.mark.parametrize("pause", [0.5, 2.0, 26.0, 60.0])
@pytest.mark.parametrize("at", [5, 40, 58])
def test_one_pause_is_not_reported(pause: float, at: int) -> None:
    assert not any(reported_stragglers(3, 100, lambda rank, step: pause * (rank == 1 and step == at)).values())


def test_equal_ranks_of_uneven_steps_are_not_named() -> None:
    found = reported_stragglers(3, 400, lambda rank, step: 0.2 * ((step * 7 + rank * 3) % 11) / 11)
    assert not any(found.values()), found


def test_the_first_steps_give_no_report() -> None:
    assert not any(reported_stragglers(2, 4, lambda rank, step: 0.2 * rank).values())


def test_a_rank_that_does_not_answer_is_not_named() -> None:
    clock = Clock()
    waits = Waits(clock)
    for _ in range(100):
        clock.now += 0.3
        waits.note(1, 0.2)
    assert waits.stragglers(lambda peer: None) == []
    assert waits.is_suspicious()
    waits.warned()
    assert not waits.is_suspicious()
    clock.now += 61
    assert waits.is_suspicious()


def test_the_report_gives_the_cost_of_a_straggler() -> None:
    assert str(Straggler(2, 0.25, 0.2)) == "rank 2 costs 25% of the time (200 ms for each wait)"


def test_simulated_ranks_have_no_stragglers() -> None:
    assert simulate(stragglers, 2) == [[], []]
