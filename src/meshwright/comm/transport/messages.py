"""Messages between processes. A message is buffered in the memory of its receiver until it is received.

The first send to a rank opens a connection to it. A send writes as much as the system takes at once, and leaves the
rest to a thread. A thread of the receiver reads messages as they arrive and puts them into queues, one for each (rank,
tag). No rank blocks another one that does something else, in any order of sends and receives.

The tagged sends of Gloo cannot do this. Their data moves only when the receiver asks for it, the sender cannot ask
whether it has left, and a receiver that expects fewer bytes is aborted.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from ..launcher.process_state import ProcessState
from .control_links import ControlLinks
from .ring_buffer import ConnectionClosedError

_HEADER = struct.Struct("<IIQ")
"""A message's tag, the length of its description, and the length of its data."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds (and probes) until a silent host counts as gone, on systems with these settings."""


class Message(NamedTuple):
    """A message: the sender's description of it, and its data as bytes.

    If the data is still being computed, `ready` waits for it. A thread calls `ready` before it sends the data.
    """

    said: str
    data: Tensor
    ready: Callable[[], None] | None = None


class _Outbox:
    """The messages to one rank, and the thread that writes those that could not be written at once."""

    def __init__(self, wire: socket.socket, peer: int) -> None:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wire = wire
        self._queue: SimpleQueue[tuple[bytes, Tensor, Callable[[], None] | None] | None] = SimpleQueue()
        self._put = self._written = 0
        self._broken = False
        self._one_sender = threading.Lock()
        self._thread = threading.Thread(target=self._write, name=f"meshwright messages to {peer}", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """True if unwritten messages can still be written."""
        return self._written < self._put and not self._broken

    def put(self, head: bytes, data: Tensor, ready: Callable[[], None] | None) -> None:
        """Send one more message.

        `data` may be written to afterwards, unless there is a function `ready` that waits for it.

        Raises ConnectionClosedError if the peer has closed the connection.
        """
        with self._one_sender:
            done = 0 if self.is_busy or ready is not None else self._write_now(head, data)
            if self._broken:
                raise ConnectionClosedError
            if done < len(head) + data.numel():
                self._put += 1
                rest = data[max(0, done - len(head)) :]
                self._queue.put((head[done:], rest.clone() if ready is None else rest, ready))

    def finish(self, limit: float) -> None:
        """Wait, for at most `limit` seconds, until everything is written."""
        self._queue.put(None)
        self._thread.join(limit)

    def close(self) -> None:
        with suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)
        self._wire.close()

    def _write_now(self, head: bytes, data: Tensor) -> int:
        """Return the number of bytes that the system has taken."""
        try:
            return self._wire.sendmsg([head, data.numpy().data], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionClosedError from error

    def _write(self) -> None:
        try:
            while self._write_one():
                self._written += 1
        except (OSError, RuntimeError):  # the peer has ended, or the device of `ready` has failed
            self._broken = True

    def _write_one(self) -> bool:
        waiting = self._queue.get()
        if waiting is None:
            return False
        head, data, ready = waiting
        if ready is not None:
            ready()
        self._wire.sendall(head)
        self._wire.sendall(data.numpy().data)
        return True


class Messages:
    """The outgoing messages of this rank, and the received ones that it has not taken yet."""

    def __init__(self) -> None:
        self._outboxes: dict[int, _Outbox] = {}
        self._boxes: dict[tuple[int, int], deque[Message]] = {}
        self._inboxes: dict[int, socket.socket | None] = {}
        """Rank → the connection that it has opened; None once it is closed."""
        self._arriving: set[int] = set()
        """Ranks with a message that has arrived in part."""
        self._changed = threading.Condition()
        self._closed_before: set[int] = set()

    def connect(self, links: ControlLinks) -> None:
        """Set the links to use from now on."""
        self._links = links

    def welcome(self, peer: int, wire: socket.socket) -> None:
        """Read the messages of `peer` from this connection from now on."""
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self._changed:
            self._inboxes[peer] = wire
        name = f"meshwright messages from {peer}"
        threading.Thread(target=self._read, args=(peer, wire), name=name, daemon=True).start()

    def send(self, peer: int, tag: int, message: Message, limit: float) -> None:
        """Send a message. Raises ConnectionClosedError if `peer` is known to have ended.

        The first message to a rank waits, for at most `limit` seconds, until the process of the rank is up.
        """
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = _Outbox(self._links.open_for_messages(peer, limit), peer)
        said = message.said.encode()
        outbox.put(_HEADER.pack(tag, len(said), message.data.numel()) + said, message.data, message.ready)

    def receive(self, peer: int, tag: int, limit: float) -> Message | None:
        """Return the first message with the tag; None if none arrives within the limit.

        Raises ConnectionClosedError if none will.
        """
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
                raise ConnectionClosedError
            has_opened = peer in self._inboxes
        gone = self._links.life(peer) is ProcessState.GONE if has_opened else self._links.has_closed(peer)
        if gone and peer not in self._arriving:
            self._note_closed(peer)
        return None

    def is_moving(self) -> bool:
        """True if messages to or from this rank are in flight."""
        return bool(self._arriving) or any(outbox.is_busy for outbox in list(self._outboxes.values()))

    def not_received(self) -> list[str]:
        """Return descriptions of the messages that were sent to this rank and not received."""
        with self._changed:
            return [f"rank {peer} calls {said}" for (peer, _), box in self._boxes.items() for said, *_ in box]

    def finish(self, limit: float) -> None:
        """Wait, for at most `limit` seconds, until all messages have left. Ranks that have ended are skipped."""
        end = time.monotonic() + limit
        for outbox in self._outboxes.values():
            outbox.finish(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Close all connections."""
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
        """Raise ConnectionClosedError at the second call for a peer.

        A message sent just before its end may still arrive after the first.
        """
        if peer in self._closed_before:
            raise ConnectionClosedError
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


def _fill(wire: socket.socket, buffer: memoryview) -> None:
    """Read until the buffer is full. Raises EOFError if the connection ends before."""
    done = 0
    while done < len(buffer):
        count = wire.recv_into(buffer[done:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise EOFError
        done += count
