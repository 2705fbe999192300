"""Byte streams in both directions between two processes, through shared memory."""

from __future__ import annotations

import mmap
import select
import socket

from .shared_region import wait_for, wait_shortly

RING = 5 * 2**13
"""Bytes of memory for one direction. The frames of calls that lag fit, and the frame of one small call behind them."""
_COUNTS, _WRITTEN, _READ = 128, 0, 8
"""Bytes for two counts in separate cache lines, and their indices in words of 8 bytes.

One counts the bytes written since the beginning, the other the bytes read.
"""
_ROOM = RING - _COUNTS
_LONG = 86400.0


class ConnectionClosedError(Exception):
    """The other end has closed the connection."""


class _Direction:
    """One direction: a ring buffer with one writer and one reader."""

    def __init__(self, memory: memoryview) -> None:
        self.counts = memory[:_COUNTS].cast("Q")
        self.data = memory[_COUNTS:]
        self.done = 0
        """Total bytes that this end has written, or read."""

    def space(self) -> int:
        """Return the number of bytes that can be written now."""
        return _ROOM - (self.done - self.counts[_READ])

    def write(self, data: bytes) -> None:
        at, length = self.done % _ROOM, len(data)
        left = _ROOM - at
        if length <= left:
            self.data[at : at + length] = data
        else:
            self.data[at:], self.data[: length - left] = data[:left], data[left:]
        self.done += length
        self.counts[_WRITTEN] = self.done  # becomes visible after the bytes

    def read_behind(self, head: bytes, length: int) -> bytes | None:
        """Read `head` and `length` more bytes, and return these; None if the unread bytes begin with others.

        None also if the bytes cross the end of the ring.
        """
        at, end = self.done % _ROOM, self.done + len(head) + length
        found = bytes(self.data[at : at + len(head) + length])
        if len(found) < len(head) + length or not found.startswith(head):
            return None
        self.done = self.counts[_READ] = end
        return found[len(head) :]

    def read(self) -> bytes:
        """Return all unread bytes."""
        count = self.counts[_WRITTEN] - self.done
        at, left = self.done % _ROOM, _ROOM - self.done % _ROOM
        found = bytes(self.data[at : at + min(left, count)])
        if left < count:
            found += bytes(self.data[: count - left])
        self.done += count
        self.counts[_READ] = self.done
        return found


class Ring:
    """One end of the shared memory; `first` is True for one of the two ends.

    The connection between the two processes shows whether the other one has ended.
    """

    def __init__(self, memory: mmap.mmap, first: bool) -> None:
        ways = [_Direction(memoryview(memory)[n * RING : (n + 1) * RING]) for n in (0, 1)]
        self._out, self._in = ways if first else reversed(ways)

    def send(self, data: bytes, wire: socket.socket) -> None:
        """Write the bytes once there is space for them. Raises ConnectionClosedError if the other end is closed."""
        if self._out.space() < len(data):
            wait_for(lambda: self._out.space() >= len(data), lambda: _check(wire), _LONG)
        self._out.write(data)

    def read_behind(self, head: bytes, length: int, waits: bool) -> bytes | None:
        """Read `head` and `length` more bytes, and return these; None if the unread bytes begin with others.

        With `waits`, wait shortly for them.
        """
        counts, end = self._in.counts, self._in.done + len(head) + length
        if counts[_WRITTEN] >= end or (waits and wait_shortly(lambda: counts[_WRITTEN] >= end)):
            return self._in.read_behind(head, length)
        return None

    def receive(self, limit: float, wire: socket.socket) -> bytes:
        """Return the unread bytes; b"" after the limit in seconds, at once if it is 0.

        Raises ConnectionClosedError if none will come.
        """
        counts, done = self._in.counts, self._in.done
        if counts[_WRITTEN] == done and limit > 0.0:
            try:
                wait_for(lambda: counts[_WRITTEN] != done, lambda: _check(wire), limit)
            except ConnectionClosedError:
                if counts[_WRITTEN] == done:
                    raise
        return self._in.read()


def _check(wire: socket.socket) -> None:
    """Raise ConnectionClosedError if the connection is closed; no data ever comes through it."""
    try:
        if readable(wire, 0.0) and not wire.recv(1, socket.MSG_PEEK):
            raise ConnectionClosedError
    except (OSError, ValueError) as error:
        raise ConnectionClosedError from error


def readable(wire: socket.socket, limit: float) -> bool:
    """True if data arrives, or the connection ends, within `limit` seconds."""
    poll = select.poll()  # `select.select` takes no number above 1023
    poll.register(wire, select.POLLIN)
    return bool(poll.poll(limit * 1000.0))
