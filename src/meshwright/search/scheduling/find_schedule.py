"""Search for the best schedule of a problem, with a proven lower bound."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.pipeline import Schedule, check_schedule

from .._errors import SearchError
from .bounds import lower_bound
from .cp_sat import is_installed, solve
from .hints import known_tables, squeezed_tables
from .problem import Problem

EQUAL = 1e-9


@dataclass(frozen=True)
class CertifiedSchedule:
    """A schedule with its certificate: no schedule for this problem takes less than `bound` seconds."""

    problem: Problem
    schedule: Schedule
    value: float
    bound: float
    start: str
    """Name of the known schedule from which the search started, or which is the best itself."""
    seconds: float
    """Seconds that the search took."""

    @property
    def gap(self) -> float:
        """Relative difference of the value from the bound; 0 for a schedule that is proved to be the best."""
        return max(0.0, self.value / self.bound - 1) if self.bound else 0.0

    @property
    def is_proved(self) -> bool:
        return self.gap <= EQUAL

    def __str__(self) -> str:
        proof = "proved shortest" if self.is_proved else f"at most {100 * self.gap:.1f} % above the shortest"
        better = "" if self.schedule.name != "found" else f" from {self.start}"
        return f"{self.schedule.name}{better}: {self.problem.objective} {self.value:g}, {proof} ({self.bound:g})"


def find_schedule(problem: Problem, seconds: float = 3.0, workers: int = 2) -> CertifiedSchedule:
    """Return the shortest schedule that `seconds` of search find: never longer than any known one that fits.

    Raises:
        SearchError: memory is too small for any schedule.
    """
    begin = time.monotonic()
    least = lower_bound(problem)
    value, start = _best_hint(problem, least, begin + seconds / 2)
    bound = min(least, value)
    schedule = start
    left = seconds - (time.monotonic() - begin)
    if value > bound * (1 + EQUAL) and is_installed() and left > 0.5:
        solved = solve(problem, start, bound, time.time() + left, workers)
        if solved.schedule is not None and problem.value(solved.schedule) < value:
            schedule = solved.schedule
            value = problem.value(schedule)
        bound = min(solved.bound, value)
    check_schedule(schedule, memory=problem.memory, capacity=problem.limits)
    return CertifiedSchedule(problem, schedule, value, bound, start.name, time.monotonic() - begin)


def find_placement(problems: Iterable[Problem], seconds: float = 3.0, workers: int = 2) -> CertifiedSchedule:
    """Return the best schedule over several problems that differ in placement; the most promising gets the most time.

    Raises:
        SearchError: no problem has a schedule.
    """
    candidates = list(problems)
    share = seconds / (4 * len(candidates) or 1)
    open_problems: list[tuple[float, Problem]] = []
    errors: list[SearchError] = []
    for problem in candidates:
        try:
            open_problems.append((_best_hint(problem, lower_bound(problem), time.monotonic() + share)[0], problem))
        except SearchError as error:
            errors.append(error)
    if not open_problems:
        raise errors[0]
    open_problems.sort(key=lambda found: found[0])
    best: CertifiedSchedule | None = None
    for share, (_, problem) in zip(_shares(len(open_problems)), open_problems, strict=True):
        if best is not None and lower_bound(problem) >= best.value:
            continue
        found = find_schedule(problem, seconds * share, workers)
        best = found if best is None or found.value < best.value else best
    assert best is not None
    return best


def _shares(count: int) -> list[float]:
    weights = [0.5**n for n in range(count)]
    return [w / sum(weights) for w in weights]


def _best_hint(problem: Problem, least: float, until: float) -> tuple[float, Schedule]:
    """Return the value and the schedule of the shortest known table, squeezed or not, found before the time `until`.

    `least` is a lower bound, at which the search stops.

    Raises:
        SearchError: no known table fits.
    """
    tables = sorted(((problem.value(s), n, s) for n, s in enumerate(known_tables(problem))), key=lambda t: t[:2])
    if not tables:
        raise SearchError(
            "a schedule",
            f"memory for {min(problem.limits):g} on a rank",
            "a rank must hold at least one microbatch of each of its chunks, from forward to backward",
            "provide more memory per rank, recompute, or use smaller microbatches or more ranks",
        )
    value, _, best = tables[0]
    for schedule in squeezed_tables(problem, (table for _, _, table in tables)):
        if value <= least * (1 + EQUAL) or time.monotonic() > until:
            break
        if (shorter := problem.value(schedule)) < value:
            value, best = shorter, schedule
    return value, best
