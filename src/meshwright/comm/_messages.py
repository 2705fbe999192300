"""Messages between processes: each waits in the memory of the rank that it is for, until it is received.

The first send to a rank opens a connection to it. A send writes what the system takes at once, and leaves the rest to
a thread; another one at the other end reads messages as they come and puts them into boxes, one for each (rank, tag).
Nobody waits for a rank that does something else, whatever the orders of sends and receives are.

The tagged sends of Gloo are something else: data moves only once the receiver asks for it, its sender cannot ask
whether it has left, and a receiver that expects fewer bytes is aborted.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from ._life import Life
from ._links import Links
from ._ring import GoneError

_HEADER = struct.Struct("<IIQ")
"""A message's tag, the length of what its sender says of it, and the length of its data."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""How soon a host that is gone without a word is found out, in seconds, where the system lets one say so."""


class Message(NamedTuple):
    """What its sender says of a message, and its data as bytes."""

    said: str
    data: Tensor


class _Outbox:
    """The messages to one rank, and the thread that writes what could not be written at once."""

    def __init__(self, wire: socket.socket, peer: int) -> None:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wire = wire
        self._queue: SimpleQueue[tuple[bytes, Tensor] | None] = SimpleQueue()
        self._put = self._written = 0
        self._broken = False
        self._one_sender = threading.Lock()
        self._thread = threading.Thread(target=self._write, name=f"meshwright messages to {peer}", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether there is something that can still be written."""
        return self._written < self._put and not self._broken

    def put(self, head: bytes, data: Tensor) -> None:
        """One more message; GoneError if nobody can get it. `data` may be written to afterwards."""
        with self._one_sender:
            done = 0 if self.is_busy else self._write_now(head, data)
            if self._broken:
                raise GoneError
            if done < len(head) + data.numel():
                self._put += 1
                self._queue.put((head[done:], data[max(0, done - len(head)) :].clone()))

    def finish(self, limit: float) -> None:
        """Wait, within the limit, until everything is written."""
        self._queue.put(None)
        self._thread.join(limit)

    def close(self) -> None:
        with suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)
        self._wire.close()

    def _write_now(self, head: bytes, data: Tensor) -> int:
        """How many bytes the system has taken."""
        try:
            return self._wire.sendmsg([head, data.numpy().data], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise GoneError from error

    def _write(self) -> None:
        try:
            while self._write_one():
                self._written += 1
        except OSError:
            self._broken = True

    def _write_one(self) -> bool:
        waiting = self._queue.get()
        if waiting is None:
            return False
        head, data = waiting
        self._wire.sendall(head)
        self._wire.sendall(data.numpy().data)
        return True


class Messages:
    """This rank's messages: those that are leaving, and those that wait here."""

    def __init__(self) -> None:
        self._outboxes: dict[int, _Outbox] = {}
        self._boxes: dict[tuple[int, int], deque[Message]] = {}
        self._inboxes: dict[int, socket.socket | None] = {}
        """By rank, the connection that it has opened; None once it is closed."""
        self._arriving: set[int] = set()
        """Ranks of whose messages a part is here."""
        self._changed = threading.Condition()
        self._closed_before: set[int] = set()

    def connect(self, links: Links) -> None:
        """Use these links from now on."""
        self._links = links

    def welcome(self, peer: int, wire: socket.socket) -> None:
        """Read from now on what `peer` sends on a connection."""
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self._changed:
            self._inboxes[peer] = wire
        name = f"meshwright messages from {peer}"
        threading.Thread(target=self._read, args=(peer, wire), name=name, daemon=True).start()

    def send(self, peer: int, tag: int, message: Message, limit: float) -> None:
        """Let a message leave; GoneError if `peer` is known to be gone.

        The first one waits, within the limit, until the process of `peer` has come up.
        """
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = _Outbox(self._links.open_for_messages(peer, limit), peer)
        said = message.said.encode()
        outbox.put(_HEADER.pack(tag, len(said), message.data.numel()) + said, message.data)

    def receive(self, peer: int, tag: int, limit: float) -> Message | None:
        """The first message with the tag; None if none has come within the limit, GoneError if none will."""
        key = (peer, tag)
        with self._changed:
            self._changed.wait_for(lambda: key in self._boxes or self._is_over(peer), limit)
            box = self._boxes.get(key)
            if box is not None:
                found = box.popleft()
                if not box:
                    del self._boxes[key]
                return found
            if self._is_over(peer):
                raise GoneError
            has_opened = peer in self._inboxes
        gone = self._links.life(peer) is Life.GONE if has_opened else self._links.has_closed(peer)
        if gone and peer not in self._arriving:
            self._note_closed(peer)
        return None

    def is_moving(self) -> bool:
        """Whether messages of this rank are on the way."""
        return bool(self._arriving) or any(outbox.is_busy for outbox in list(self._outboxes.values()))

    def not_received(self) -> list[str]:
        """What was sent to this rank and not received."""
        with self._changed:
            return [f"rank {peer} calls {said}" for (peer, _), box in self._boxes.items() for said, _ in box]

    def finish(self, limit: float) -> None:
        """Wait, within the limit, until what is leaving has left. A rank that is gone is not waited for."""
        end = time.monotonic() + limit
        for outbox in self._outboxes.values():
            outbox.finish(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Nothing leaves or arrives any more."""
        for outbox in self._outboxes.values():
            outbox.close()
        with self._changed:
            arriving = [wire for wire in self._inboxes.values() if wire is not None]
        for wire in arriving:
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)

    def _is_over(self, peer: int) -> bool:
        return peer in self._inboxes and self._inboxes[peer] is None

    def _note_closed(self, peer: int) -> None:
        """A rank that has ended may have sent something just before: it counts as gone at the second look."""
        if peer in self._closed_before:
            raise GoneError
        self._closed_before.add(peer)

    def _read(self, peer: int, wire: socket.socket) -> None:
        try:
            with wire, suppress(OSError, EOFError):
                while True:
                    self._read_one(peer, wire)
        finally:
            with self._changed:
                self._inboxes[peer] = None
                self._arriving.discard(peer)
                self._changed.notify_all()

    def _read_one(self, peer: int, wire: socket.socket) -> None:
        tag, length, nbytes = _HEADER.unpack(_read_bytes(wire, _HEADER.size))
        self._arriving.add(peer)
        said = _read_bytes(wire, length).decode()
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        _fill(wire, data.numpy().data)
        with self._changed:
            self._arriving.discard(peer)
            self._boxes.setdefault((peer, tag), deque()).append(Message(said, data))
            self._changed.notify_all()


def _read_bytes(wire: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    _fill(wire, memoryview(data))
    return data


def _fill(wire: socket.socket, room: memoryview) -> None:
    """Read until the room is full; EOFError if the connection ends before."""
    done = 0
    while done < len(room):
        count = wire.recv_into(room[done:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise EOFError
        done += count
