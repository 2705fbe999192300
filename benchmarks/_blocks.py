"""Timing of calls that take turns in short blocks. The best block counts: other work on the machine only adds time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

CALLS = 3
"""Calls in a block."""


def best_ms(calls: Mapping[str, Callable[[], Any]], blocks: int) -> dict[str, float]:
    """Return milliseconds of one call of each function, in its best block."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(blocks):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e3)
    return best
