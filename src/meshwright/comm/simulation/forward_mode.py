"""Forward-mode derivatives in a simulation, whose ranks are threads of one process.

torch has one level of forward mode for the whole process, and it removes all tangents when the level is left. The
ranks of a simulation share that level: the first rank that enters opens it, and the last rank that leaves closes it.
A rank that leaves earlier waits for the others, so that the tangents of every rank live as long as its level.

A rank can be levels ahead of the others, because a level without communication needs no other rank. Before such a rank
enters its next level, the ranks behind run. Otherwise a rank behind would enter the same level and wait, as it leaves,
for the rank ahead, which may wait inside the level for a collective with the rank behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import NamedTuple

from meshwright.layout import TorchValue

from ..communicators.call import CommCall
from ..torch_hooks import ForwardState, forward_ad


def _no_rank() -> int | None:
    return None


class Scheduler(NamedTuple):
    """The functions of a simulation that decide which rank runs."""

    wait: Callable[[int, CommCall], None]
    """Let other ranks run until the given rank is released."""
    release: Callable[[int], None]
    """Let a waiting rank run again."""
    let_run: Callable[[int, Iterable[int]], bool]
    """Let other ranks run once; False, at once, if none of the given ranks can run."""
    failed: Callable[[], bool]
    """True once the simulation has failed; from then on no rank waits."""


def _no_effect(*_: object) -> None:
    return None


def _false(*_: object) -> bool:
    return False


_NO_SCHEDULER = Scheduler(_no_effect, _no_effect, _false, _false)


class SharedLevel:
    """The level of forward mode that the ranks of one simulation share.

    Args:
        ranks: Number of ranks of the simulation.
        rank: Returns the calling rank, or None for a thread that is no rank of the simulation.
        scheduler: The functions that decide which rank runs.
    """

    def __init__(self, ranks: int, rank: Callable[[], int | None], scheduler: Scheduler) -> None:
        self._rank, self._scheduler = rank, scheduler
        self._enter, self._exit = forward_ad.enter_dual_level, forward_ad.exit_dual_level
        self._inside: set[int] = set()
        self._waiting: set[int] = set()
        self._left = [0] * ranks  # the number of levels that each rank has left

    @contextmanager
    def installed(self) -> Generator[None]:
        """Share the level while the context is open."""
        hooks: TorchValue = forward_ad
        before = ForwardState.now()
        hooks.enter_dual_level, hooks.exit_dual_level = self.enter, self.leave
        try:
            yield
        finally:
            hooks.enter_dual_level, hooks.exit_dual_level = self._enter, self._exit
            if self._inside:  # a rank failed inside
                ForwardState(0, before.nesting).set()
                self._exit()
            before.set()
            # torch's dynamo may remember `enter` for ever, and with it the simulation
            self._rank, self._scheduler = _no_rank, _NO_SCHEDULER

    def enter(self) -> int:
        """Enter forward mode on the calling rank; the stand-in for `enter_dual_level`."""
        rank = self._rank()
        if rank is None or rank in self._inside:
            return self._enter()
        while self._scheduler.let_run(rank, self._behind(rank)):
            pass
        if self._inside:
            ForwardState(0, ForwardState.now().nesting).set()
        else:
            self._enter()
        self._inside.add(rank)
        return 0

    def leave(self, *, level: int | None = None) -> None:
        """Leave forward mode on the calling rank; the stand-in for `exit_dual_level`."""
        rank = self._rank()
        if rank is None or rank not in self._inside:
            return self._exit(level=level)
        self._left[rank] += 1
        if self._inside == {rank}:
            self._exit(level=level)
            self._inside.clear()
            for other in self._waiting:
                self._scheduler.release(other)
            self._waiting.clear()
            return None
        group = tuple(sorted(self._inside))
        self._inside.discard(rank)
        ForwardState(-1, ForwardState.now().nesting).set()
        if sys.exc_info()[0] is None and not self._scheduler.failed():
            self._waiting.add(rank)
            self._scheduler.wait(rank, CommCall("exit_dual_level", "", None, (), (), group))
        return None

    def _behind(self, rank: int) -> list[int]:
        """Return the ranks that have left fewer levels than `rank`."""
        return [other for other, left in enumerate(self._left) if left < self._left[rank]]
