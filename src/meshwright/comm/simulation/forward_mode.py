"""Forward-mode derivatives in a simulation, whose ranks are threads of one process.

torch has one level of forward mode for the whole process, and it removes all tangents when the level is left. The
ranks of a simulation share that level: the first rank that enters opens it, and the last rank that leaves closes it.
A rank that leaves earlier waits for the others, so that the tangents of every rank live as long as its level.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from meshwright.layout import TorchValue

from ..communicators.call import CommCall
from ..torch_hooks import ForwardState, forward_ad


def _no_rank() -> int | None:
    return None


def _never_called(*_: object) -> bool:
    return True


class SharedLevel:
    """The level of forward mode that the ranks of one simulation share.

    Args:
        rank: Returns the calling rank, or None for a thread that is no rank of the simulation.
        wait: Lets other ranks run until the calling rank is released.
        release: Lets a waiting rank run again.
        failed: Returns True once the simulation has failed; from then on no rank waits.
    """

    def __init__(
        self,
        rank: Callable[[], int | None],
        wait: Callable[[int, CommCall], None],
        release: Callable[[int], None],
        failed: Callable[[], bool],
    ) -> None:
        self._rank, self._wait, self._release, self._failed = rank, wait, release, failed
        self._enter, self._exit = forward_ad.enter_dual_level, forward_ad.exit_dual_level
        self._inside: set[int] = set()
        self._waiting: set[int] = set()

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
            self._rank = _no_rank  # torch's dynamo may remember `enter` for ever, and with it the simulation
            self._wait = self._release = self._failed = _never_called

    def enter(self) -> int:
        """Enter forward mode on the calling rank; the stand-in for `enter_dual_level`."""
        rank = self._rank()
        if rank is None or rank in self._inside:
            return self._enter()
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
        if self._inside == {rank}:
            self._exit(level=level)
            self._inside.clear()
            for other in self._waiting:
                self._release(other)
            self._waiting.clear()
            return None
        group = tuple(sorted(self._inside))
        self._inside.discard(rank)
        ForwardState(-1, ForwardState.now().nesting).set()
        if sys.exc_info()[0] is None and not self._failed():
            self._waiting.add(rank)
            self._wait(rank, CommCall("exit_dual_level", "", None, (), (), group))
        return None
