"""Cost model: share of pairs of plans that are predicted in the order of their measured step times.

Pairs that are at most 2 % apart, and rows whose authors call them noisy, do not count. Rows of one plan and one program
count once, with their mean time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from statistics import mean
from typing import Any

from ._fit import Constants
from ._published import Run, runs

GOALS = {0.05: 0.9, 0.02: 0.88}
"""Relative difference of two measured times → share of the pairs beyond it that must be in order."""
REGRET, WORST = 0.01, 0.07
APART = 0.02
Measured = tuple[Run, float, float]
"""A run, its measured seconds and its predicted seconds."""


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the share of pairs in the right order."""
    several = groups()
    orders = {apart: [order for group in several for order in in_order(group, apart)] for apart in GOALS}
    shares = {apart: mean(own) for apart, own in orders.items()}
    regrets = {group[0][0].row["sweep"] + f" {group[0][0].plan.batch}": regret(group) for group in several}
    goals = ", ".join(f"{goal} of {len(orders[x])} pairs beyond {100 * x:g} %" for x, goal in GOALS.items())
    in_goals = all(shares[x] >= goal for x, goal in GOALS.items())
    return {
        "name": "rank_plans",
        "value": round(shares[APART], 4),
        "goal": f">= {goals}; the plan predicted best within {REGRET} of the best on average, {WORST} at worst",
        "ok": in_goals and mean(regrets.values()) <= REGRET and max(regrets.values()) <= WORST,
        "details": {
            "groups": len(several),
            "shares": {f"beyond {100 * x:g} %": round(share, 4) for x, share in shares.items()},
            "mean regret": round(mean(regrets.values()), 4),
            "worst regret": round(max(regrets.values()), 4),
            "regrets": {name: round(r, 4) for name, r in regrets.items() if r > APART},
            "wrong pairs": {g[0][0].row["sweep"]: in_order(g).count(False) for g in several if False in in_order(g)},
        },
    }


def groups() -> list[list[Measured]]:
    """Return the groups of several runs that differ in their plan only."""
    found: dict[str, list[Run]] = defaultdict(list)
    for r in runs():
        if r.seconds and r.is_complete and not r.is_noisy:
            found[r.group].append(r)
    measured = ([*map(_mean, _by_plan(own))] for own in found.values())
    return [group for group in measured if len(group) > 1]


def _by_plan(own: Sequence[Run]) -> list[list[Run]]:
    """Return the rows of each plan and program."""
    found: dict[object, list[Run]] = defaultdict(list)
    for r in own:
        found[r.plan, r.software].append(r)
    return list(found.values())


def _mean(same: Sequence[Run]) -> Measured:
    """Return one run of several with the same plan, with their mean measured time."""
    return same[0], mean(r.seconds or 1.0 for r in same), Constants().seconds(same[0])


def in_order(group: Sequence[Measured], apart: float = APART) -> list[bool]:
    """Return, for every pair that is apart, whether the prediction has the order of the measurement."""
    found: list[bool] = []
    for (_, s, x), (_, t, y) in combinations(group, 2):
        if abs(s / t - 1) > apart and abs(t / s - 1) > apart:
            found.append((s < t) == (x < y))
    return found


def regret(group: Sequence[Measured]) -> float:
    """Return the extra time of the plan that is predicted best, relative to the best one."""
    chosen = min(group, key=lambda measured: measured[2])
    return chosen[1] / min(seconds for _, seconds, _ in group) - 1
