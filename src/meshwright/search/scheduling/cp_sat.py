"""CP-SAT solver for scheduling problems, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.pipeline import Schedule

from .._errors import SearchError
from .integer_model import IntegerModel
from .problem import Problem

WORKER = Path(__file__).with_name("cp_sat_worker.py")
PATIENCE = 60.0
"""Seconds that the solver may take beyond its limit."""


@dataclass(frozen=True, slots=True)
class Solved:
    """Result of the solver: a schedule, if it found one, and a bound that it proved."""

    schedule: Schedule | None
    bound: float


def is_installed() -> bool:
    """True if OR-tools is installed."""
    return find_spec("ortools") is not None


def solve(problem: Problem, start: Schedule, bound: float, until: float, workers: int = 2) -> Solved:
    """Return the best schedule that CP-SAT finds from `start`.

    `until` is the deadline, as a value of `time.time`. `bound` is the lower bound that is proved already.

    Raises:
        SearchError: OR-tools is not installed, or the solver's process failed.
    """
    if not is_installed():
        raise SearchError(
            "a schedule from a solver",
            "OR-tools is not installed",
            "the solver is part of OR-tools",
            "run pip install meshwright[solver]",
        )
    model = IntegerModel(problem, start)
    answer = _run_worker({**_worker_input(model, bound), "until": until, "workers": workers}, until)
    # the start of a span is rounded as well
    off = 0 if model.tick.exact or problem.objective == "makespan" else 1
    proved = max(bound, (answer["bound"] - off) * model.tick.size)
    if answer["starts"] is None:
        return Solved(None, proved)
    found = model.schedule(answer["starts"], "found")
    return Solved(found if problem.allows(found) else None, proved)


def _worker_input(model: IntegerModel, bound: float) -> dict[str, Any]:
    """Return the input of the worker."""
    return {
        "operations": [[model.problem.way[a.chunk], n] for a, n in zip(model.actions, model.lengths(), strict=True)],
        "before": list(model.before()),
        "fixed": list(model.fixed()),
        "memory_constraints": list(model.memory_constraints()),
        "held": model.held(),
        "limits": model.limits(),
        "windows": list(model.windows()),
        "hint": model.hint(),
        "horizon": model.horizon(),
        "cost": [max(0, min(model.tick.up(bound), model.most())), model.most()],
    }


def _run_worker(question: dict[str, Any], until: float) -> Mapping[str, Any]:
    """Run the worker and return its answer.

    Raises:
        SearchError: the solver's process failed.
    """
    try:
        ran = subprocess.run(
            [sys.executable, str(WORKER)],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            check=True,
            timeout=until - time.time() + PATIENCE,
        )
        answer: Mapping[str, Any] = json.loads(ran.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines()
        raise SearchError(
            "a schedule from a solver",
            said[-1] if said else str(error),
            "the solver's process failed",
            "run python -m pip check, or search without the solver",
        ) from error
    return answer
