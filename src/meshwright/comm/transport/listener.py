"""The port of a rank. Ranks of the run connect to it; connections of other processes end after two seconds.

A connection begins with a hello, which holds the run's secret. One thread waits for all hellos, so a silent connection
delays no other. At most 64 connections wait for their hello; then the oldest one is closed.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from ..launcher.rendezvous import listen

_HELLO = struct.Struct("<16scI64s")
"""The run's token, the purpose, the caller's rank, and a name."""
MOST_WAITING = 64
HELLO_LIMIT = 2.0
_SEND_LIMIT = 2.0


class Hello(NamedTuple):
    """First bytes of a connection: its purpose, the caller's rank, and a name."""

    purpose: bytes
    rank: int
    name: str = ""

    def packed(self, token: bytes) -> bytes:
        """Return the hello as bytes."""
        return _HELLO.pack(token, self.purpose, self.rank, self.name.encode())


@dataclass(slots=True)
class _Waiting:
    """A connection without a complete hello, the bytes so far, and its deadline."""

    wire: socket.socket
    until: float
    data: bytes = b""


class Listener:
    """A listening port on `host`; `take` gets every connection from one of the `size` ranks of the run."""

    def __init__(self, host: str, token: bytes, size: int, take: Callable[[Hello, socket.socket], None]) -> None:
        self._token, self._size, self._take = token, size, take
        self._server = listen(host)
        self._server.setblocking(False)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._waiting: dict[socket.socket, _Waiting] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, woken = socket.socketpair()
        for each in (self._server, woken):
            self._selector.register(each, selectors.EVENT_READ)
        self._woken = woken
        self._thread = threading.Thread(target=self._serve, name="meshwright links", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port."""
        with suppress(OSError):
            self._wake.close()
        self._thread.join(timeout=1.0)
        with suppress(OSError):
            self._server.close()

    def leave(self) -> None:
        """Close this process's copies of the sockets, after a fork."""
        for each in [self._server, self._wake, self._woken, *self._waiting]:
            each.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(HELLO_LIMIT / 4 if self._waiting else None):
                found = key.fileobj
                if found is self._woken:
                    self._end()
                    return
                if found is self._server:
                    self._accept()
                elif isinstance(found, socket.socket) and found in self._waiting:
                    self._hear(self._waiting[found])
            self._expire()

    def _accept(self) -> None:
        try:
            wire, _ = self._server.accept()
        except OSError:
            time.sleep(0.01)  # no connection is left, or no file descriptor is free; waiting connections will end
            return
        wire.setblocking(False)
        if len(self._waiting) >= MOST_WAITING:
            self._drop(next(iter(self._waiting)))
        self._waiting[wire] = _Waiting(wire, time.monotonic() + HELLO_LIMIT)
        self._selector.register(wire, selectors.EVENT_READ)
        self._hear(self._waiting[wire])

    def _hear(self, waiting: _Waiting) -> None:
        try:
            data = waiting.wire.recv(_HELLO.size - len(waiting.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        waiting.data += data
        if not data:
            self._drop(waiting.wire)
        elif len(waiting.data) == _HELLO.size:
            self._welcome(waiting)

    def _welcome(self, waiting: _Waiting) -> None:
        """Pass the connection to `take` if its hello belongs to the run."""
        token, purpose, rank, name = _HELLO.unpack(waiting.data)
        text = name.rstrip(b"\0").decode(errors="replace")
        if not hmac.compare_digest(token, self._token) or rank >= self._size:
            self._drop(waiting.wire)
            return
        del self._waiting[waiting.wire]
        self._selector.unregister(waiting.wire)
        waiting.wire.settimeout(_SEND_LIMIT)
        with suppress(OSError):
            self._take(Hello(purpose, rank, text), waiting.wire)

    def _expire(self) -> None:
        now = time.monotonic()
        for waiting in [each for each in self._waiting.values() if each.until < now]:
            self._drop(waiting.wire)

    def _drop(self, wire: socket.socket) -> None:
        del self._waiting[wire]
        self._selector.unregister(wire)
        wire.close()

    def _end(self) -> None:
        for wire in list(self._waiting):
            self._drop(wire)
        self._selector.close()
        self._woken.close()
