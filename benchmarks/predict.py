"""Cost model: median error of predicted step times of published runs, from model, cluster and plan alone.

Only complete rows count: those whose plan is fully given. The constants of the model are the same for all rows of a
device; the second number of each source comes from constants that were fitted without it. The rival is the guess that
every run reaches the same share of its device's peak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from meshwright.search import model_flops

from ._fit import Constants, fitted
from ._published import Run, runs

MEDIAN, MEAN, MEDIAN_EXPERTS = 0.08, 0.12, 0.12
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
    experts = [abs(errors[r.name]) for r in complete if r.model.experts]
    behind = [s for s, told in sources.items() if told["mean"] > told["constant share"]]
    within = median(found) <= MEDIAN and mean(found) <= MEAN and median(experts) <= MEDIAN_EXPERTS
    return {
        "name": "predict",
        "value": round(median(found), 4),
        "goal": f"<= {MEDIAN} median, <= {MEAN} mean, <= {MEDIAN_EXPERTS} median with experts, over {len(found)} runs;"
        " every source better than a constant share of the peak",
        "ok": within and not behind,
        "rival": {"constant share of the peak, mean": round(mean(map(abs, guesses.values())), 4)},
        "details": {
            "mean": round(mean(found), 4),
            "median with experts": round(median(experts), 4),
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
