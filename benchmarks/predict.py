"""Cost model: median error of predicted step times of published runs, from model, cluster and plan alone.

Rows are complete if their plan is fully given. Other rows count apart: with what their program usually does, or with
the settings of its recipes. The constants of the model are the same for all rows of a device; the second number of each
source comes from constants that were fitted without it. The rival is the guess that every run reaches the same share of
its device's peak. The slope of a source is the change of the error per doubling of the devices, between rows of one
model on one kind of device, whose schedule and degrees are known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import log, log2
from statistics import mean, median
from typing import Any

import numpy as np

from meshwright.search import model_flops

from ._fit import Constants, fitted
from ._published import Run, runs

MEDIAN, MEAN, MEDIAN_EXPERTS, MEAN_EXPERTS, MEAN_UNKNOWN, SLOPE = 0.05, 0.065, 0.10, 0.14, 0.08, 0.01
UNKNOWN = ["recompute"]
"""What is missing in rows that count with the complete ones."""
PEAK = {"fp8": "peak_tflops_fp8", "mxfp8": "peak_tflops_fp8", "nvfp4": "peak_tflops_fp8"}


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the median error over all complete rows."""
    rows = [r for r in runs() if r.seconds]
    complete = [r for r in rows if r.is_complete]
    errors = {r.name: error(r, Constants().seconds(r)) for r in rows}
    guesses = dict(zip((r.name for r in complete), constant_share(complete), strict=True))
    sources = {s: _source(own, errors, guesses) for s, own in by_source(complete).items()}
    if not quick:
        for source, own in by_source(complete).items():
            without = fitted([r for r in complete if r.source != source], Constants(), rounds=1)
            sources[source]["mean, fitted without it"] = round(mean(abs(error(r, without.seconds(r))) for r in own), 4)
    found = [abs(errors[r.name]) for r in complete]
    experts = [r for r in rows if r.model.experts]
    known = [r for r in rows if r.is_complete or r.row["missing"] == UNKNOWN]
    behind = [s for s, told in sources.items() if told["mean"] > told["constant share"]]
    slopes = {s: round(slope, 4) for s, own in by_source(known).items() if (slope := slope_of(own, errors)) is not None}
    steep = {s: slope for s, slope in slopes.items() if abs(slope) > SLOPE}
    told, unknown = _summary(experts, errors), _summary(known, errors)
    within = median(found) <= MEDIAN and mean(found) <= MEAN and unknown["mean"] <= MEAN_UNKNOWN
    return {
        "name": "predict",
        "value": round(median(found), 4),
        "goal": f"<= {MEDIAN} median, <= {MEAN} mean over {len(found)} complete runs, <= {MEAN_UNKNOWN} mean with those"
        f" of unknown recomputation; <= {MEDIAN_EXPERTS} median, <= {MEAN_EXPERTS} mean over {len(experts)} runs with"
        f" experts; every source better than a constant share of the peak, and its error changes by <= {SLOPE} per"
        " doubling of the devices",
        "ok": within and told["median"] <= MEDIAN_EXPERTS and told["mean"] <= MEAN_EXPERTS and not behind and not steep,
        "rival": {"constant share of the peak, mean": round(mean(map(abs, guesses.values())), 4)},
        "details": {
            "mean": round(mean(found), 4),
            "with experts": told,
            "models with experts": {
                name: _summary([r for r in experts if r.row["model"]["name"] == name], errors)
                for name in sorted({r.row["model"]["name"] for r in experts})
            },
            "complete, or of unknown recomputation": unknown,
            "change of the error per doubling of the devices": slopes,
            "behind the constant share": behind,
            "sources": sources,
            "incomplete rows": {
                s: _summary(own, errors) for s, own in by_source([r for r in rows if not r.is_complete]).items()
            },
        },
    }


def error(run: Run, seconds: float) -> float:
    """Return the relative error of the prediction: positive if it is longer than measured."""
    return seconds / (run.seconds or 1.0) - 1


def by_source(rows: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = defaultdict(list)
    for r in rows:
        found[r.source].append(r)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def slope_of(own: Sequence[Run], errors: dict[str, float]) -> float | None:
    """Return the change of the error per doubling of the devices, or None if all rows of a model have as many.

    Rows of one model on one kind of device are compared with their mean.
    """
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for r in own:
        name = r.row["model"]["name"], r.row["hardware"]["gpu"], r.plan.precision, str(r.row["train"].get("release"))
        groups[name].append((log2(r.row["hardware"]["n_gpus"]), log(1 + errors[r.name])))
    products = squares = 0.0
    for points in groups.values():
        x, y = mean(p[0] for p in points), mean(p[1] for p in points)
        products += sum((a - x) * (b - y) for a, b in points)
        squares += sum((a - x) ** 2 for a, _ in points)
    return products / squares if squares > 0 else None


def _summary(own: Sequence[Run], errors: dict[str, float]) -> dict[str, Any]:
    found = [errors[r.name] for r in own]
    return {
        "rows": len(own),
        "median": round(median(map(abs, found)), 4),
        "mean": round(mean(map(abs, found)), 4),
        "bias": round(mean(found), 4),
    }


def _source(own: Sequence[Run], errors: dict[str, float], guesses: dict[str, float]) -> dict[str, Any]:
    guess = mean(abs(guesses[r.name]) for r in own)
    return {**_summary(own, errors), "constant share": round(guess, 4)}


def constant_share(rows: Sequence[Run]) -> list[float]:
    """Return the errors of the guess that all runs reach one share of the peak, the best share for all of them."""
    ideal = [float(np.asarray(model_flops(r.model, r.plan))) / peak(r) for r in rows]
    shares = [t / (r.seconds or 1.0) for t, r in zip(ideal, rows, strict=True)]
    best = min(sorted(shares)[:: max(1, len(shares) // 64)], key=lambda s: mean(abs(x / s - 1) for x in shares))
    return [x / best - 1 for x in shares]


def peak(run: Run) -> float:
    """Return the operations per second of all devices, in the precision of the run."""
    hardware = run.row["hardware"]
    rate = hardware[PEAK.get(run.plan.precision, "peak_tflops_bf16")] or hardware["peak_tflops_bf16"]
    return rate * 1e12 * hardware["n_gpus"]
