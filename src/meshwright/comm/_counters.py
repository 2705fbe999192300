"""What a rank has asked of its carrier: exact counts without a clock."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from ._call import Call


class Counters:
    """Calls and received bytes of one rank, by kind of call; a group of one is no communication and is not counted.

    >>> import torch
    >>> seen = Counters()
    >>> seen.note(Call("all_reduce", "sum", torch.float32, ((4,),), ((4,),), (0, 1)), 16)
    >>> seen
    all_reduce: 1 call, 16 B
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.received: dict[str, int] = {}
        self._listeners: list[Callable[[Call, int], None]] = []

    @property
    def total_calls(self) -> int:
        """Calls of every kind."""
        return sum(self.calls.values())

    @property
    def total_received(self) -> int:
        """Bytes received from other ranks by calls of every kind."""
        return sum(self.received.values())

    def note(self, call: Call, received: int) -> None:
        """One more call, by which the rank received so many bytes."""
        self.calls[call.kind] = self.calls.get(call.kind, 0) + 1
        self.received[call.kind] = self.received.get(call.kind, 0) + received
        for listener in self._listeners:
            listener(call, received)

    def reset(self) -> None:
        """Back to nothing seen; those who listen are told what comes next, too."""
        self.calls.clear()
        self.received.clear()

    @contextmanager
    def record_calls(self) -> Generator[list[Call]]:
        """The list that every call made inside the block is added to."""
        log: list[Call] = []
        with self.telling(lambda call, _: log.append(call)):
            yield log

    @contextmanager
    def telling(self, listener: Callable[[Call, int], None]) -> Generator[None]:
        """Inside, `listener` is told each call and the bytes that the rank receives by it, before it is carried out."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def __repr__(self) -> str:
        lines = [
            f"{kind}: {count} call{'s' if count > 1 else ''}, {self.received[kind]:,} B"
            for kind, count in sorted(self.calls.items())
        ]
        return "; ".join(lines) or "no calls"
