"""A thin wire between every two ranks that meet, beside the transport: who is there, and what are they doing.

Each rank listens on one port. The higher rank of a pair connects to the lower one on first use. A link carries
frames, one per checked call: through memory where the two ranks share some, else through the connection, which tells
in both cases that a process is gone. Messages have connections of their own. A question (a short-lived connection) is
answered from a thread with what the rank is doing, also while the rank itself computes.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ._region import attach, create, forget, home
from ._rendezvous import Place, listen
from ._ring import RING, GoneError, Ring
from .torch_hooks import Store

_HEADER = struct.Struct("<IQQQQQ")
_HELLO = struct.Struct("<16scI64s")
"""The run's token, what for, the caller's rank, and the name of the memory for both."""
_LINK, _QUESTION, _MESSAGES = b"L", b"?", b"M"
_YES, _NO = b"+", b"-"
_ANSWER_LIMIT = 5.0


class Frame(NamedTuple):
    """What one rank tells its peers of the call that it is about to make."""

    group: int
    number: int
    common: int
    identity: int
    balance: int
    text: bytes

    def packed(self) -> bytes:
        """The frame as bytes."""
        return _HEADER.pack(len(self.text), *self[:5]) + self.text


class State(NamedTuple):
    """What a rank is doing: the call it is in, the ranks it waits for there, and how many calls it has made.

    With conversions on the side a rank may be in two calls, or go on computing while it is in one: it is `stuck` if
    all of it waits, and nothing of its messages is on the way. It is `debugged` while a debugger has stopped it.
    """

    call: str
    waits_for: tuple[int, ...]
    calls: int
    receives: bool = False
    stuck: bool = False
    debugged: bool = False

    def __str__(self) -> str:
        if self.debugged:
            return f"is stopped in a debugger, after {self.calls} collectives"
        if not self.call:
            return f"is in no collective, after {self.calls} of them"
        waits = f", waiting for {', '.join(map(str, self.waits_for))}" if self.waits_for else ""
        return f"is in {self.call}{waits}"


class _Link:
    def __init__(self, wire: socket.socket, ring: Ring | None = None) -> None:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wire = wire
        self._ring = ring
        self._waits = 0.0
        self._rest = b""

    def send(self, data: bytes) -> None:
        if self._ring is not None:
            self._ring.send(data, self._wire)
            return
        try:
            self._wire.sendall(data)
        except OSError as error:
            raise GoneError from error

    def close(self) -> None:
        with suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)

    def receive(self, limit: float) -> Frame | None:
        """The next frame; None if none has come within the limit, GoneError if none will."""
        while (frame := self._parse()) is None:
            data = self._arriving(limit) if self._ring is None else self._ring.receive(limit, self._wire)
            if not data:
                return None
            self._rest += data
        return frame

    def _arriving(self, limit: float) -> bytes:
        """What comes through the connection; nothing after the limit."""
        if limit != self._waits:
            self._wire.settimeout(limit)
            self._waits = limit
        try:
            data = self._wire.recv(65536)
        except TimeoutError:
            return b""
        except OSError as error:
            raise GoneError from error
        if not data:
            raise GoneError
        return data

    def _parse(self) -> Frame | None:
        if len(self._rest) < _HEADER.size:
            return None
        length, group, number, common, what, balance = _HEADER.unpack_from(self._rest)
        end = _HEADER.size + length
        if len(self._rest) < end:
            return None
        text, self._rest = self._rest[_HEADER.size : end], self._rest[end:]
        return Frame(group, number, common, what, balance, text)


class Links:
    """This rank's end of all its links.

    From another thread, `answer` says what the rank is doing, and `welcome` takes a rank's connection for messages.
    """

    def __init__(
        self,
        place: Place,
        store: Store,
        answer: Callable[[], State],
        welcome: Callable[[int, socket.socket], None],
    ) -> None:
        self.rank = place.rank
        self._store = store
        self._answer, self._take = answer, welcome
        self._links: dict[int, _Link] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._arrived = threading.Condition()
        host = "127.0.0.1" if place.loopback else _own_address(place)
        self._server = listen(host)
        if self.rank == 0:
            store.set("token", os.urandom(16).hex())
        self._token = bytes.fromhex(store.get("token").decode())
        store.set(f"at/{self.rank}", json.dumps(self._server.getsockname()))
        self._thread = threading.Thread(target=self._serve, name="meshwright links", daemon=True)
        self._thread.start()

    def send(self, peer: int, data: bytes) -> bool:
        """Whether the bytes went to `peer`; not if there is no link yet, which `wait_open` waits for."""
        link = self._links.get(peer) or self._open(peer)
        if link is None:
            return False
        link.send(data)
        return True

    def is_open(self, peer: int) -> bool:
        """Whether there is a link to `peer`, be it alive or dead."""
        return peer in self._links

    def wait_open(self, peer: int, limit: float) -> bool:
        """Whether the link to `peer` is open, within the limit: opened by `peer`, or by us once `peer` listens."""
        if peer < self.rank:
            if self._links.get(peer) is None and self._open(peer) is None:
                time.sleep(min(limit, 0.05))
            return peer in self._links
        with self._arrived:
            return self._arrived.wait_for(lambda: peer in self._links, limit)

    def receive(self, peer: int, limit: float) -> Frame | None:
        """The next frame from `peer`, or None after the limit; GoneError if `peer` has closed its end."""
        return self._links[peer].receive(limit)

    def ask(self, peer: int) -> State | None:
        """What `peer` is doing; None if nobody answers."""
        try:
            if not self._listens(peer):
                return State("", (), 0)
            with self._connect(peer, _QUESTION) as wire:
                wire.settimeout(_ANSWER_LIMIT)
                call, waits_for, *more = json.loads(_read_all(wire))
                return State(call, tuple(waits_for), *more)
        except (OSError, ValueError, RuntimeError):
            return None

    def open_for_messages(self, peer: int, limit: float) -> socket.socket:
        """A connection for messages to `peer`, once its process has come up; GoneError if there is none to be had."""
        end = time.monotonic() + limit
        try:
            while not self._listens(peer):
                if time.monotonic() > end:
                    raise GoneError
                time.sleep(0.02)
            return self._connect(peer, _MESSAGES)
        except (OSError, RuntimeError) as error:
            raise GoneError from error

    def has_closed(self, peer: int) -> bool:
        """Whether nobody listens any more where `peer` did; the system listens for a busy process."""
        try:
            if self._listens(peer):
                self._connect(peer, _QUESTION).close()
        except (ConnectionError, TimeoutError):
            return True
        except (OSError, RuntimeError):
            return False
        return False

    def say_farewell(self, error: str | None) -> None:
        """Tell the store that this rank has ended, and how; then close every link."""
        with suppress(RuntimeError):
            if error is not None:
                self._store.set(f"failed/{self._store.add('failures', 1)}", str(self.rank))
            self._store.set(f"ended/{self.rank}", "normally" if error is None else f"with {error}")
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=1.0)
        self._server.close()
        for link in list(self._links.values()):
            link.close()

    def farewell_of(self, peer: int, limit: float = 1.0) -> str | None:
        """How `peer` said that it ended; None if it went without a word."""
        end = time.monotonic() + limit
        with suppress(RuntimeError):
            while not self._store.check([f"ended/{peer}"]):
                if time.monotonic() > end:
                    return None
                time.sleep(0.05)
            return self._store.get(f"ended/{peer}").decode()
        return None

    def _open(self, peer: int) -> _Link | None:
        """A new link to a lower rank that listens already."""
        if peer > self.rank or not self._listens(peer):
            return None
        try:
            link = self._links[peer] = self._link_to(peer)
        except OSError as error:
            raise GoneError from error
        return link

    def _link_to(self, peer: int) -> _Link:
        """A link with memory for both, where the other rank can have it."""
        made = create(2 * RING) if home() else None
        name, memory = ("", None) if made is None else made
        try:
            wire = self._connect(peer, _LINK, name)
            wire.settimeout(_ANSWER_LIMIT)
            shared = memory is not None and wire.recv(1) == _YES
            wire.settimeout(None)
        finally:
            if made is not None:
                forget(name)
        return _Link(wire, Ring(memory, first=True) if memory is not None and shared else None)

    def _listens(self, peer: int) -> bool:
        if peer not in self._addresses and self._store.check([f"at/{peer}"]):
            host, port = json.loads(self._store.get(f"at/{peer}"))
            self._addresses[peer] = (host, port)
        return peer in self._addresses

    def _connect(self, peer: int, purpose: bytes, memory: str = "") -> socket.socket:
        wire = socket.create_connection(self._addresses[peer], timeout=_ANSWER_LIMIT)
        wire.settimeout(None)
        wire.sendall(_HELLO.pack(self._token, purpose, self.rank, memory.encode()))
        return wire

    def _serve(self) -> None:
        while True:
            try:
                wire, _ = self._server.accept()
            except OSError:
                return
            with suppress(OSError, struct.error):
                self._welcome(wire)

    def _welcome(self, wire: socket.socket) -> None:
        wire.settimeout(_ANSWER_LIMIT)
        token, purpose, peer, name = _HELLO.unpack(wire.recv(_HELLO.size, socket.MSG_WAITALL))
        wire.settimeout(None)
        if token != self._token:
            wire.close()
        elif purpose == _QUESTION:
            with wire:
                wire.sendall(json.dumps(self._answer()).encode())
        elif purpose == _MESSAGES:
            self._take(peer, wire)
        else:
            memory = attach(name.rstrip(b"\0").decode(), 2 * RING) if home() else None
            if name.strip(b"\0"):
                wire.sendall(_NO if memory is None else _YES)
            with self._arrived:
                self._links[peer] = _Link(wire, None if memory is None else Ring(memory, first=False))
                self._arrived.notify_all()


def _read_all(wire: socket.socket) -> bytes:
    data = b""
    while part := wire.recv(65536):
        data += part
    return data


def _own_address(place: Place) -> str:
    """The address of the interface that leads to the run's host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.host, place.port))
        return str(probe.getsockname()[0])
