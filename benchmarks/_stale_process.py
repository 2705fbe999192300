"""Kinds of change: environment variables, files, the clock, context variables; iterators, counters, random numbers."""

from __future__ import annotations

import contextvars
import json
import logging
import os
import random
import tempfile
import threading
import time
from itertools import count, cycle, repeat
from pathlib import Path
from typing import Any

import numpy as np

from ._stale_case import Case, Change, Run, attribute, item, kind, reads, replaces


def by_variable(run: Run, name: str) -> Change:
    """Return the change that sets an environment variable, which the run removes."""
    run.set_item(os.environ, name, "1")
    return lambda factor: item(os.environ, name)(str(factor))


@kind
def environment_variable(run: Run) -> Case:
    return reads(run, lambda self: float(os.environ["STALE_SCALE"]), by_variable(run, "STALE_SCALE"))


@kind
def environment_variable_by_getenv(run: Run) -> Case:
    return reads(run, lambda self: float(os.getenv("STALE_SCALE", "1")), by_variable(run, "STALE_SCALE"))


@kind
def environment_variable_that_is_there_or_not(run: Run) -> Case:
    change = by_variable(run, "STALE_SCALE")
    return reads(run, lambda self: 1.0 if os.environ.get("STALE_SCALE", "1") == "1" else 2.0, change)


@kind
def text_in_a_file(run: Run) -> Case:
    path = Path(run.enter_context(tempfile.TemporaryDirectory())) / "settings.json"

    def change(factor: float) -> None:
        path.write_text(json.dumps({"scale": factor}))

    change(1.0)
    return reads(run, lambda self: json.loads(self.path.read_text())["scale"], change, path=path)


@kind
def file_that_is_there_or_not(run: Run) -> Case:
    path = Path(run.enter_context(tempfile.TemporaryDirectory())) / "double"

    def change(factor: float) -> None:
        path.unlink() if factor == 1 else path.touch()

    return reads(run, lambda self: 2.0 if self.path.exists() else 1.0, change, path=path)


@kind
def time_of_the_clock(run: Run) -> Case:
    now = [1.0]
    run.set_attribute(time, "time", lambda: now[0])
    return reads(run, lambda self: 1.0 if time.time() < 1.5 else 2.0, item(now, 0))


@kind
def level_of_a_logger(run: Run) -> Case:
    logger = logging.getLogger("stale")
    run.callback(logger.setLevel, logger.level)

    def change(factor: float) -> None:
        logger.setLevel(logging.WARNING if factor == 1 else logging.DEBUG)

    change(1.0)
    return reads(run, lambda self: 2.0 if logger.isEnabledFor(logging.DEBUG) else 1.0, change)


CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
LOCAL = threading.local()
calls_so_far = 0


@kind
def context_variable(run: Run) -> Case:
    run.callback(CONTEXT.reset, CONTEXT.set(1.0))
    return reads(run, lambda self: CONTEXT.get(), CONTEXT.set)


@kind
def attribute_of_a_thread_local(run: Run) -> Case:
    LOCAL.scale = 1.0
    return reads(run, lambda self: LOCAL.scale, attribute(LOCAL, "scale"))


# --- iterators, counters and random numbers: a program may refuse them -----------------------------------------------


@kind
def next_of_an_iterator(run: Run) -> Case:
    return reads(run, lambda self: next(self.factors), lambda factor: None, factors=iter(run.factors))


@kind
def next_of_a_generator(run: Run) -> Case:
    return reads(run, lambda self: next(self.factors), lambda factor: None, factors=(f for f in run.factors))


@kind
def count_of_itertools(run: Run) -> Case:
    return reads(run, lambda self: run.factors[next(self.steps)], lambda factor: None, steps=count())


@kind
def cycle_of_itertools(run: Run) -> Case:
    return reads(run, lambda self: next(self.factors), lambda factor: None, factors=cycle(run.factors[1:4]))


@kind
def iterator_replaced(run: Run) -> Case:
    return replaces(run, lambda self: next(self.factors), "factors", repeat)


@kind
def counter_of_calls(run: Run) -> Case:
    def read(self: Any) -> float:
        self.calls += 1
        return run.factors[self.calls - 1]

    return reads(run, read, lambda factor: None, calls=0)


@kind
def counter_of_calls_in_a_list(run: Run) -> Case:
    counted: list[int] = []

    def read(self: Any) -> float:
        counted.append(1)
        return run.factors[len(counted) - 1]

    return reads(run, read, lambda factor: None)


@kind
def counter_of_calls_in_a_global(run: Run) -> Case:
    run.set_item(globals(), "calls_so_far", 0)

    def read(self: Any) -> float:
        global calls_so_far  # noqa: PLW0603
        calls_so_far += 1
        return run.factors[calls_so_far - 1]

    return reads(run, read, lambda factor: None)


@kind
def random_number_of_python(run: Run) -> Case:
    return reads(run, lambda self: 1.0 + random.random() * (max(run.factors) - 1.0), lambda factor: None)


@kind
def random_number_of_numpy(run: Run) -> Case:
    return reads(run, lambda self: 1.0 + np.random.rand() * (max(run.factors) - 1.0), lambda factor: None)


@kind
def random_number_of_a_generator_of_the_model(run: Run) -> Case:
    drawn = random.Random(0)
    return reads(
        run, lambda self: 1.0 + self.drawn.random() * (max(run.factors) - 1.0), lambda factor: None, drawn=drawn
    )


@kind
def random_number_of_a_numpy_generator(run: Run) -> Case:
    drawn = np.random.default_rng(0)
    return reads(
        run, lambda self: 1.0 + self.drawn.random() * (max(run.factors) - 1.0), lambda factor: None, drawn=drawn
    )
