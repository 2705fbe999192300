"""Cost model: share of pairs of plans that are predicted in the order of their measured step times.

Pairs that are at most 2 % apart, and rows whose authors call them noisy, do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from statistics import mean
from typing import Any

from ._fit import Constants
from ._published import Run, runs

PAIRS, REGRET, WORST = 0.9, 0.02, 0.08
APART = 0.02


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the share of pairs in the right order."""
    groups: dict[str, list[tuple[Run, float]]] = defaultdict(list)
    for r in runs():
        if r.seconds and r.is_complete and not r.is_noisy:
            groups[r.group].append((r, Constants().seconds(r)))
    several = [group for group in groups.values() if len(group) > 1]
    orders = [order for group in several for order in in_order(group)]
    regrets = {group[0][0].row["sweep"] + f" {group[0][0].plan.batch}": regret(group) for group in several}
    share = mean(orders)
    return {
        "name": "rank_plans",
        "value": round(share, 4),
        "goal": f">= {PAIRS} of {len(orders)} pairs; the plan predicted best within {REGRET} of the best on average,"
        f" {WORST} at worst",
        "ok": share >= PAIRS and mean(regrets.values()) <= REGRET and max(regrets.values()) <= WORST,
        "details": {
            "groups": len(several),
            "mean regret": round(mean(regrets.values()), 4),
            "worst regret": round(max(regrets.values()), 4),
            "regrets": {name: round(r, 4) for name, r in regrets.items() if r > APART},
            "wrong pairs": {g[0][0].row["sweep"]: in_order(g).count(False) for g in several if False in in_order(g)},
        },
    }


def in_order(group: Sequence[tuple[Run, float]]) -> list[bool]:
    """Return, for every pair that is apart, whether the prediction has the order of the measurement."""
    found: list[bool] = []
    for (a, x), (b, y) in combinations(group, 2):
        s, t = a.seconds or 1.0, b.seconds or 1.0
        if abs(s / t - 1) > APART and abs(t / s - 1) > APART:
            found.append((s < t) == (x < y))
    return found


def regret(group: Sequence[tuple[Run, float]]) -> float:
    """Return the extra time of the plan that is predicted best, relative to the best one."""
    chosen = min(group, key=lambda pair: pair[1])[0]
    return (chosen.seconds or 1.0) / min(r.seconds or 1.0 for r, _ in group) - 1
