"""Counters of a rank's calls: exact numbers of calls and bytes, without a clock."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from .call import CommCall

Ended = Callable[[], None] | None
"""Callback of a listener for the end of a call or piece of work."""
OfCall = Callable[[CommCall, int], Ended]
OfWork = Callable[[str, str], Ended]


class _ListenedCall:
    """Context that calls the listeners' end callbacks on exit."""

    __slots__ = ("_ends",)

    def __init__(self, ends: list[Ended]) -> None:
        self._ends = ends

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            if end is not None:
                end()


_UNTOLD = nullcontext()


class Counters:
    """Calls and received bytes of one rank, by kind of call; calls of a group of one rank are not counted.

    >>> import torch
    >>> seen = Counters()
    >>> with seen.note(CommCall("all_reduce", "sum", torch.float32, ((4,),), ((4,),), (0, 1)), 16):
    ...     pass
    >>> seen
    all_reduce: 1 call, 16 B
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.received: dict[str, int] = {}
        self._listeners: list[OfCall] = []
        self._watchers: list[OfWork] = []

    @property
    def total_calls(self) -> int:
        """Return the number of calls of all kinds."""
        return sum(self.calls.values())

    @property
    def total_received(self) -> int:
        """Bytes received from other ranks by calls of all kinds."""
        return sum(self.received.values())

    def note(self, call: CommCall, received: int) -> AbstractContextManager[None]:
        """Count a call by which the rank receives this number of bytes; the call runs inside the returned context."""
        kind = call.kind
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.received[kind] = self.received.get(kind, 0) + received
        return _ListenedCall([listener(call, received) for listener in self._listeners]) if self._listeners else _UNTOLD

    def doing(self, kind: str, name: str) -> AbstractContextManager[None]:
        """Return a context for a named piece of work of the rank, which is reported to the watchers."""
        return _ListenedCall([watcher(kind, name) for watcher in self._watchers]) if self._watchers else _UNTOLD

    def reset(self) -> None:
        """Set all counters to zero; listeners stay registered."""
        self.calls.clear()
        self.received.clear()

    @contextmanager
    def record_calls(self) -> Generator[list[CommCall]]:
        """Yield a list to which every call inside the block is appended."""
        log: list[CommCall] = []
        with self.telling(lambda call, _: log.append(call)):
            yield log

    @contextmanager
    def telling(self, listener: OfCall, watcher: OfWork | None = None) -> Generator[None]:
        """Report each call inside the block to `listener`, with the bytes that the rank receives, before the call runs.

        `watcher` gets the kind and the name of each piece of work. Both may return a callback for its end.
        """
        watchers = [] if watcher is None else [watcher]
        self._listeners.append(listener)
        self._watchers += watchers
        try:
            yield
        finally:
            self._listeners.remove(listener)
            for own in watchers:
                self._watchers.remove(own)

    def __repr__(self) -> str:
        lines = [
            f"{kind}: {count} call{'s' if count > 1 else ''}, {self.received[kind]:,} B"
            for kind, count in sorted(self.calls.items())
        ]
        return "; ".join(lines) or "no calls"
