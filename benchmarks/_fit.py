"""Constants of the cost model, fitted to published runs by coordinate descent.

They are shares and delays of all devices (`Habits`) and, per device, the share of the peak that matrix products of 16
bits, narrower products and fused attention reach. To evaluate a source, fit the constants without its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import log

from meshwright.cost import Habits
from meshwright.search import predict

from ._published import Run

NARROW = frozenset({"fp8", "mxfp8", "nvfp4"})
STEPS = (0.8, 0.9, 1.1, 1.25)
OUTLIER = 0.25
"""Largest error that counts: most sources have one outlier."""
NUMBERS = ("writes", "emptiness", "ragged", "streamed")
OF_EXPERTS = ("grouped", "exchange", "expert", "wait", "biased")
"""Numbers of all models, and those of models with experts."""
TIMES = {"emptiness": 1.0, "ragged": 1.0, "streamed": 0.95}
"""Upper bounds of shares."""


@dataclass(frozen=True)
class Constants:
    """Fitted constants; a device without published runs keeps its values."""

    habits: Habits = field(default_factory=Habits)
    reach: tuple[tuple[str, float], ...] = ()
    narrow: tuple[tuple[str, float], ...] = ()
    attention: tuple[tuple[str, float], ...] = ()

    def seconds(self, run: Run) -> float:
        device = run.cluster.device
        reach, narrow, attention = (
            dict(own).get(device.name, 1.0) for own in (self.reach, self.narrow, self.attention)
        )
        forward, backward = device.attention
        device = replace(
            device,
            reach=device.reach * reach,
            reach8=device.reach8 * narrow,
            reach4=device.reach4 * narrow,
            attention=(forward * attention, backward * attention),
        )
        cluster = replace(run.cluster, device=device)
        return float(predict(run.model, run.plan, cluster, run.software, self.habits).seconds)


def misfit(constants: Constants, runs: Sequence[Run]) -> float:
    """Return the mean absolute log error of the runs; a source weighs as the square root of its number of runs."""
    counted = {run.source: 0 for run in runs}
    for run in runs:
        counted[run.source] += 1
    total = weights = 0.0
    for run in runs:
        weight = counted[run.source] ** -0.5
        total += weight * min(abs(log(constants.seconds(run) / (run.seconds or 1.0))), OUTLIER)
        weights += weight
    return total / weights


def fitted(runs: Sequence[Run], start: Constants, rounds: int = 2) -> Constants:
    """Return the constants that fit best, found by coordinate descent from `start`."""
    best, least = start, misfit(start, runs)
    sparse = [run for run in runs if run.model.experts]
    moves = [(move, runs) for move in (*map(_number, NUMBERS), _host)]
    moves += [(_number(name), sparse) for name in OF_EXPERTS if sparse]
    devices = sorted({run.cluster.device.name for run in runs})
    for _ in range(rounds):
        for move, own in moves:
            best, least = _best_step(best, least, move, runs, own)
        for name in devices:
            own = [run for run in runs if run.cluster.device.name == name]
            several = ("reach", "attention", *(["narrow"] if any(r.plan.precision in NARROW for r in own) else []))
            for what in several:
                best, least = _best_step(best, least, _of_device(what, name), runs, own)
    return best


Move = Callable[[Constants, float], Constants]


def _best_step(
    best: Constants, least: float, move: Move, runs: Sequence[Run], own: Sequence[Run]
) -> tuple[Constants, float]:
    """Return the best of a few steps along one constant, judged by `own`, the runs that the constant affects."""
    base = misfit(best, own)
    tried = [(misfit(c, own), n, c) for n, c in enumerate(move(best, step) for step in STEPS)]
    value, _, found = min(tried, key=lambda t: t[:2])
    return (found, misfit(found, runs)) if value < base - 1e-5 else (best, least)


def _number(name: str) -> Move:
    def move(constants: Constants, step: float) -> Constants:
        value = min(getattr(constants.habits, name) * step, TIMES.get(name, 1e9))
        return replace(constants, habits=replace(constants.habits, **{name: value}))

    return move


def _host(constants: Constants, step: float) -> Constants:
    forward, backward = constants.habits.host
    return replace(constants, habits=replace(constants.habits, host=(forward * step, backward * step)))


def _of_device(what: str, name: str) -> Move:
    def move(constants: Constants, step: float) -> Constants:
        now = dict(getattr(constants, what))
        return replace(constants, **{what: tuple((now | {name: now.get(name, 1.0) * step}).items())})

    return move
