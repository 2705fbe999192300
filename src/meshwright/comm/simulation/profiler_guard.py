"""Guard of torch's profiler in a simulation: one rank at a time.

A process has one profiler, and two threads that use it crash the process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from .._errors import CallError
from ..torch_hooks import PROFILER, PROFILER_STARTS, PROFILER_STOP


@contextmanager
def one_profiler(rank: Callable[[], int | None]) -> Generator[None]:
    """Raise CallError if a second rank starts the profiler inside the block; `rank` returns the calling rank."""
    names: dict[str, Any] = PROFILER.__dict__
    originals = {name: names[name] for name in (*PROFILER_STARTS, PROFILER_STOP)}
    running: list[int | None] = []

    def starting(start: Callable[..., object]) -> Callable[..., object]:
        def begin(*args: object, **kwargs: object) -> object:
            here = rank()
            if running and running[0] != here:
                raise _second(here, running[0])
            out = start(*args, **kwargs)
            running[:] = [here]
            return out

        return begin

    def stop(*args: object, **kwargs: object) -> object:
        running.clear()
        return originals[PROFILER_STOP](*args, **kwargs)

    names.update({name: starting(originals[name]) for name in PROFILER_STARTS} | {PROFILER_STOP: stop})
    try:
        yield
    finally:
        names.update(originals)


def _second(here: int | None, other: int | None) -> CallError:
    return CallError(
        f"torch.profiler on rank {here} of a simulation",
        f"rank {other} is already profiling",
        "a process has one profiler, and simulated ranks are threads of one process",
        "profile on one rank or around mw.simulate, or run each rank in a process with meshwright run",
    )
