"""Control connections between every two ranks that make a call together, separate from the transport of data.

Each rank listens on one port. The higher rank of a pair connects to the lower one on first use. A link carries frames,
one per compared call. Frames go through shared memory if the two ranks can share some, otherwise through the
connection. The connection shows in both cases that a process has ended. Messages have their own connections. A question
(a short connection) is answered by a thread with the state of the rank, even while the rank computes.

A rank that does not answer does not count as dead: the system of its host reports whether its process exists.
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
from mmap import mmap
from typing import NamedTuple

from ..launcher.process_state import ProcessIdentity, ProcessState, own_identity
from ..launcher.rendezvous import RankAddress
from ..launcher.run_secret import run_token, sealed, unsealed
from ..torch_hooks import Store
from .listener import Hello, Listener
from .rank_state import RankState, read_state, silent
from .ring_buffer import RING, ConnectionClosedError, Ring, readable
from .shared_region import attach_region, create_region, host_identity, unlink_region

_HEADER = struct.Struct("<IiQQQQQQ")
"""Length of the text, length of the data or -1 without data, and the numbers of a frame."""
_NO_DATA = -1
_LINK, _QUESTION, _MESSAGES, _ABOUT = b"L", b"?", b"M", b"P"
"""Purposes of a connection: a link, a question about the rank, messages, a question about a process of its host."""
_YES, _NO = b"+", b"-"
_CONNECT_LIMIT, _ANSWER_LIMIT, _BUSY_LIMIT = 2.0, 5.0, 1.0
_SENT = 2**17
"""Bytes that a connection holds before a send waits for the reader: more than those of frames that may be unread."""
_SHORTLY = 1e-3
"""Seconds for which the fast path waits for a frame that arrives through a connection."""
_MOST_ANSWER = 2**16
_STOPPED = "its process is stopped"
_BUSY = "its process runs; perhaps a call holds Python's global interpreter lock"
_FAR = "its host accepts the connection, but its process does not answer"
_NO_HOST = "its host does not respond"


class Frame(NamedTuple):
    """Description of a call that a rank sends to its peers before the call.

    `took` is the microseconds of the rank's latest transfer of the group, 0 if they were not measured. `data` are the
    bytes that the rank contributes to a small call; None if the data of the call moves by a transport.
    """

    group: int
    number: int
    common: int
    identity: int
    balance: int
    text: bytes
    took: int = 0
    data: bytes | None = None

    def packed(self) -> bytes:
        """Return the frame as bytes, of which the last ones are the data."""
        group, number, common, identity, balance, text, took, data = self
        length = _NO_DATA if data is None else len(data)
        return _HEADER.pack(len(text), length, group, number, common, identity, balance, took) + text + (data or b"")


class Link:
    """A connection to a peer for frames, with shared memory if both ranks can share some."""

    def __init__(self, wire: socket.socket, ring: Ring | None = None) -> None:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT)
        self._wire = wire
        self._ring = ring
        self._rest = b""

    def send(self, data: bytes) -> None:
        if self._ring is not None:
            self._ring.send(data, self._wire)
            return
        try:
            self._wire.sendall(data)
        except OSError as error:
            raise ConnectionClosedError from error

    def close(self) -> None:
        with suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Close this process's copy of the connection alone."""
        self._wire.close()

    @property
    def has_memory(self) -> bool:
        """True if frames arrive through shared memory."""
        return self._ring is not None

    def read_behind(self, head: bytes, length: int, waits: bool) -> bytes | None:
        """Read the next frame if it consists of `head` and `length` bytes of data, and return the data; else None.

        With `waits`, wait shortly for the frame. The fast path of `receive`.
        """
        if self._ring is not None:
            return None if self._rest else self._ring.read_behind(head, length, waits)
        end = len(head) + length
        if len(self._rest) < end:
            with suppress(ConnectionClosedError):  # `receive` meets the end of the connection again
                self._rest += self._arriving(_SHORTLY if waits else 0.0)
        if len(self._rest) < end or not self._rest.startswith(head):
            return None
        data, self._rest = self._rest[len(head) : end], self._rest[end:]
        return data

    def receive(self, limit: float) -> Frame | None:
        """Return the next frame; None if none arrives within the limit. Raises ConnectionClosedError if none will."""
        while (frame := self._parse()) is None:
            data = self._arriving(limit) if self._ring is None else self._ring.receive(limit, self._wire)
            if not data:
                return None
            self._rest += data
        return frame

    def _arriving(self, limit: float) -> bytes:
        """Return bytes from the connection; b"" after the limit in seconds, at once if the limit is 0."""
        try:
            data = self._waiting()
            if data is None and limit > 0.0 and readable(self._wire, limit):
                data = self._waiting()
        except OSError as error:
            raise ConnectionClosedError from error
        if data is None:
            return b""
        if not data:
            raise ConnectionClosedError
        return data

    def _waiting(self) -> bytes | None:
        """Return the bytes that have arrived; b"" if the other end is closed, None if there are none."""
        try:
            return self._wire.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def _parse(self) -> Frame | None:
        if len(self._rest) < _HEADER.size:
            return None
        length, size, group, number, common, what, balance, took = _HEADER.unpack_from(self._rest)
        behind = _HEADER.size + length
        end = behind + max(size, 0)
        if len(self._rest) < end:
            return None
        text, data = self._rest[_HEADER.size : behind], None if size == _NO_DATA else self._rest[behind:end]
        self._rest = self._rest[end:]
        return Frame(group, number, common, what, balance, text, took, data)


OpenLinks = tuple[tuple[int, Link], ...]
"""Ranks, and the links to them."""


class _Opening(NamedTuple):
    """A link that the other rank has not yet accepted."""

    wire: socket.socket
    name: str
    memory: mmap | None

    def accepted(self, limit: float) -> Link | None:
        """Return the link once the other rank reports whether it shares memory; None before that.

        Raises OSError if the other rank has closed the connection.
        """
        if not readable(self.wire, limit):
            return None
        answer = self.wire.recv(1)
        if not answer:
            raise ConnectionResetError
        shared = self.memory is not None and answer == _YES
        return Link(self.wire, Ring(self.memory, first=True) if self.memory is not None and shared else None)

    def end(self) -> None:
        """Remove the name of the shared memory: both ranks have opened it, or never will."""
        if self.name:
            unlink_region(self.name)


class _Peer(NamedTuple):
    """Address and process of a rank."""

    address: tuple[str, int]
    identity: ProcessIdentity


class ControlLinks:
    """This rank's end of all its links.

    Another thread calls `answer` for the state of the rank, and `welcome` for a new connection with messages.
    """

    def __init__(
        self,
        place: RankAddress,
        store: Store,
        answer: Callable[[], RankState],
        welcome: Callable[[int, socket.socket], None],
    ) -> None:
        self.rank, self._size = place.rank, place.size
        self._store = store
        self._answer, self._take = answer, welcome
        self._links: dict[int, Link] = {}
        self._open_groups: dict[tuple[int, ...], OpenLinks] = {}
        self.has_wire = False
        """True once there is a link without shared memory."""
        self._opening: dict[int, _Opening] = {}
        self._peers: dict[int, _Peer] = {}
        self._arrived = threading.Condition()
        self._token = run_token(place, store)
        self._listener = Listener(
            "127.0.0.1" if place.loopback else _own_address(place), self._token, place.size, self._welcome
        )
        self._address = json.dumps([*self._listener.address, *own_identity()])
        self.publish()
        os.register_at_fork(after_in_child=self._leave)

    def publish(self, store: Store | None = None) -> None:
        """Write this rank's address to the store, unless it is there; another process may have removed it."""
        store, key = store or self._store, f"at/{self.rank}"
        if not store.check([key]):
            store.set(key, sealed(self._token, key, self._address))

    def send(self, peer: int, data: bytes) -> bool:
        """Send the bytes to `peer`; False if there is no link yet (see `wait_open`)."""
        link = self._links.get(peer) or self._open(peer, 0.0)
        if link is None:
            return False
        link.send(data)
        return True

    def is_open(self, peer: int) -> bool:
        """True if there was ever a link to `peer`, open or closed."""
        return peer in self._links

    def open_to(self, group: tuple[int, ...]) -> OpenLinks | None:
        """Return the other ranks of a group with the links to them; None if one of the links is not open yet."""
        found = self._open_groups.get(group)
        if found is None:
            peers = [peer for peer in group if peer != self.rank]
            if not all(peer in self._links for peer in peers):
                return None
            found = self._open_groups[group] = tuple((peer, self._links[peer]) for peer in peers)
        return found

    def needs_round_trip(self, peer: int) -> bool:
        """True if there is a link to `peer` whose frames arrive through the connection."""
        link = self._links.get(peer)
        return link is not None and not link.has_memory

    def wait_open(self, peer: int, limit: float) -> bool:
        """Wait for the link to `peer`; True if it is open within the limit.

        The higher rank opens the link once the lower rank listens.
        """
        if peer < self.rank:
            if self._links.get(peer) is None and self._open(peer, limit) is None:
                time.sleep(min(limit, 0.02))
            return peer in self._links
        with self._arrived:
            return self._arrived.wait_for(lambda: peer in self._links, limit)

    def receive(self, peer: int, limit: float) -> Frame | None:
        """Return the next frame from `peer`; None after the limit.

        Raises ConnectionClosedError if `peer` has closed its end.
        """
        return self._links[peer].receive(limit)

    def life(self, peer: int) -> ProcessState:
        """Return the state of the process of `peer` that the system reports, at once."""
        found = self._peer(peer)
        return ProcessState.UNKNOWN if found is None else found.identity.life

    def ask(self, peer: int) -> RankState | None:
        """Return the state of `peer`; None if its process has ended or accepts no connection any more."""
        found = self._peer(peer)
        if found is None:
            return silent("its process has not joined the run yet")
        life = found.identity.life
        if life is ProcessState.GONE:
            return None
        if life is ProcessState.STOPPED:
            return silent(_STOPPED, stopped=True)
        if life is ProcessState.TRACED:
            return RankState("", (), 0, debugged=True)
        return self._asked(peer, life)

    def open_for_messages(self, peer: int, limit: float) -> socket.socket:
        """Return a connection for messages to `peer`, once its process is up.

        Raises ConnectionClosedError if there is none.
        """
        end = time.monotonic() + limit
        while time.monotonic() < end:
            wire = self._accepted(peer, end) if self._listens(peer) else None
            if wire is not None:
                return wire
            if self.life(peer) is ProcessState.GONE:
                break
            time.sleep(0.02)
        raise ConnectionClosedError

    def has_closed(self, peer: int) -> bool:
        """True if no process listens any more at the address of `peer`. The system listens for a busy process."""
        if self.life(peer) is ProcessState.GONE:
            return True
        try:
            if self._listens(peer):
                self._connect(peer, _QUESTION).close()
        except ConnectionError:
            return True
        except (OSError, RuntimeError):
            return False
        return False

    def say_farewell(self, error: str | None) -> None:
        """Write to the store that this rank has ended, and how; then close every link."""
        with suppress(RuntimeError):
            self._publish(f"ended/{self.rank}", "normally" if error is None else f"with {error}")
        with suppress(RuntimeError):
            if error is not None:
                self._store.set(f"failed/{self._store.add('failures', 1)}", str(self.rank))
        self._listener.close()
        for link in list(self._links.values()):
            link.close()

    def farewell_of(self, peer: int, limit: float = 1.0) -> str | None:
        """Return the farewell that `peer` wrote to the store; None if it ended without one."""
        key, end = f"ended/{peer}", time.monotonic() + limit
        gone = self.life(peer) is ProcessState.GONE
        with suppress(RuntimeError):
            while not self._store.check([key]):
                if gone or time.monotonic() > end:
                    return None
                time.sleep(0.05)
            return unsealed(self._token, key, self._store.get(key))
        return None

    def _open(self, peer: int, limit: float) -> Link | None:
        """Return a new link to a lower rank if it accepts within the limit.

        Raises ConnectionClosedError if it never will.
        """
        if peer > self.rank or not self._listens(peer):
            return None
        try:
            begun = self._opening.get(peer)
            if begun is None:
                begun = self._opening[peer] = self._begin(peer)
            link = begun.accepted(limit)
        except (TimeoutError, ConnectionResetError, BrokenPipeError):
            self._end_opening(peer)
            return None
        except OSError as error:
            self._end_opening(peer)
            raise ConnectionClosedError from error
        if link is not None:
            self._end_opening(peer)
            self._add(peer, link)
        return link

    def _add(self, peer: int, link: Link) -> None:
        self.has_wire = self.has_wire or not link.has_memory
        self._links[peer] = link
        self._open_groups.clear()

    def _begin(self, peer: int) -> _Opening:
        """Request a link, with shared memory if this rank can share some."""
        name, memory = (create_region(2 * RING) if host_identity() else None) or ("", None)
        try:
            return _Opening(self._connect(peer, _LINK, name), name, memory)
        except OSError:
            unlink_region(name)
            raise

    def _end_opening(self, peer: int) -> None:
        begun = self._opening.pop(peer, None)
        if begun is not None:
            begun.end()

    def _accepted(self, peer: int, end: float) -> socket.socket | None:
        """Return a connection for messages that `peer` has accepted; None if it may still accept."""
        try:
            wire = self._connect(peer, _MESSAGES)
        except (TimeoutError, ConnectionResetError):
            return None
        except OSError as error:
            raise ConnectionClosedError from error
        while not readable(wire, _BUSY_LIMIT) and time.monotonic() < end and self.life(peer) is not ProcessState.GONE:
            pass
        with suppress(OSError):
            if readable(wire, 0.0) and wire.recv(1) == _YES:
                return wire
        wire.close()
        return None

    def _asked(self, peer: int, life: ProcessState) -> RankState | None:
        """Return the answer of a process that may be busy."""
        try:
            wire = self._connect(peer, _QUESTION)
        except TimeoutError:
            return silent(_NO_HOST, stopped=True)
        except (OSError, RuntimeError):
            return None
        limit = _BUSY_LIMIT if life is ProcessState.RUNNING else _ANSWER_LIMIT
        with wire, suppress(OSError, ValueError):
            return read_state(json.loads(_read_all(wire, limit)))
        return silent(_BUSY) if life is ProcessState.RUNNING else self._told_by_neighbour(peer)

    def _told_by_neighbour(self, peer: int) -> RankState | None:
        """Return the state of the process of `peer` as another rank on its host sees it."""
        known = self._peers[peer].identity
        for rank in range(self._size):
            found = self._peer(rank)
            if rank in (peer, self.rank) or found is None or found.identity.system != known.system:
                continue
            with suppress(OSError, ValueError), self._connect(rank, _ABOUT, f"{peer}") as wire:
                life = ProcessState[_read_all(wire, _ANSWER_LIMIT).decode()]
                return (
                    None if life is ProcessState.GONE else silent(_SEEN.get(life, _FAR), life is ProcessState.STOPPED)
                )
        return silent(_FAR)

    def _publish(self, key: str, value: str) -> None:
        self._store.set(key, sealed(self._token, key, value))

    def _listens(self, peer: int) -> bool:
        return self._peer(peer) is not None

    def _peer(self, peer: int) -> _Peer | None:
        """Return the address and process of `peer`; None before it is up."""
        found = self._peers.get(peer)
        if found is None and self._store.check([f"at/{peer}"]):
            text = unsealed(self._token, f"at/{peer}", self._store.get(f"at/{peer}"))
            host, port, *process = json.loads(text)
            found = self._peers[peer] = _Peer((host, port), ProcessIdentity(*process))
        return found

    def _connect(self, peer: int, purpose: bytes, name: str = "") -> socket.socket:
        wire = socket.create_connection(self._peers[peer].address, timeout=_CONNECT_LIMIT)
        wire.settimeout(None)
        wire.sendall(Hello(purpose, self.rank, name).packed(self._token))
        return wire

    def _welcome(self, hello: Hello, wire: socket.socket) -> None:
        """Handle a connection from a rank of the run; runs in the listener's thread."""
        if hello.purpose == _QUESTION:
            with wire:
                wire.sendall(json.dumps(self._answer()).encode())
        elif hello.purpose == _ABOUT:
            with wire:
                wire.sendall(self.life(int(hello.name) if hello.name.isdecimal() else self.rank).name.encode())
        elif hello.purpose == _MESSAGES:
            wire.sendall(_YES)
            wire.settimeout(None)
            self._take(hello.rank, wire)
        elif hello.purpose == _LINK:
            self._link(hello, wire)
        else:
            wire.close()

    def _link(self, hello: Hello, wire: socket.socket) -> None:
        memory = attach_region(hello.name, 2 * RING) if host_identity() else None
        wire.sendall(_NO if memory is None else _YES)
        wire.settimeout(None)
        with self._arrived:
            self._add(hello.rank, Link(wire, None if memory is None else Ring(memory, first=False)))
            self._arrived.notify_all()

    def _leave(self) -> None:
        """Close the sockets in a forked process; open copies would hide the end of this process from its peers."""
        self._listener.leave()
        for link in list(self._links.values()):
            link.leave()


_SEEN = {ProcessState.STOPPED: _STOPPED, ProcessState.RUNNING: _BUSY}


def _read_all(wire: socket.socket, limit: float) -> bytes:
    """Return all bytes until the connection ends. Raises OSError after the limit or beyond 64 KiB."""
    end, data = time.monotonic() + limit, b""
    while len(data) < _MOST_ANSWER:
        wire.settimeout(max(end - time.monotonic(), 0.001))
        part = wire.recv(_MOST_ANSWER)
        if not part:
            return data
        data += part
    raise OSError(f"the answer has more than {_MOST_ANSWER} bytes")


def _own_address(place: RankAddress) -> str:
    """Return the address of the interface that leads to the run's host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((place.host, place.port))
        return str(probe.getsockname()[0])
