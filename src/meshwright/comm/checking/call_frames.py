"""The frames of calls: each rank sends its own to the peers of a call, and reads theirs, at once or later.

A transport that blocks the process, as on the CPU, waits for all ranks anyway. There the frames are read before the
data moves, or behind it if the call was predicted (`comparison_order.py`). On devices with streams a call is only
queued, and the process continues. There frames may lag behind (`begin` without `settle`): they are read when they
arrive, and all of them before a parameter is written. Meanwhile the watchdog reads them (`tend`), since the process may
end up waiting for the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .._errors import CommError
from ..communicators.call import CommCall
from ..communicators.stragglers import Waits
from ..transport.control_links import ConnectionClosedError, ControlLinks, Frame, OpenLinks
from .peer_examiner import Examiner
from .wait_timer import WaitTimer

_MOST = 16
"""Upper bound on the calls that lag. Their frames fit into the buffer of a link, so no rank waits for a reader."""


@dataclass(slots=True)
class CallFrames:
    """One call and the frames of its peers; `waits_for` are the peers whose frames have not been read."""

    call: CommCall
    frame: Frame
    watch: WaitTimer
    waits_for: list[int]
    unsent: list[int]
    waited: dict[int, float]
    frames: dict[int, Frame]


class PendingCallFrames:
    """The calls of this rank with unread frames, the oldest first.

    `compare(meeting, peer)` raises if the frame of a peer differs. `finish(meeting)` is called once all frames are
    read, and raises if they do not match together.
    """

    def __init__(
        self,
        links: ControlLinks,
        examiner: Examiner,
        waits: Waits,
        compare: Callable[[CallFrames, int], None],
        finish: Callable[[CallFrames], None],
    ) -> None:
        self._links, self._examiner, self._waits = links, examiner, waits
        self._compare, self._finish = compare, finish
        self._open = deque[CallFrames]()
        self._lock = threading.RLock()
        self._given_up: tuple[int, ...] = ()
        self._outdated: set[tuple[int, int, int]] = set()
        """Peer, group and number of unread frames whose calls have failed; they are skipped when they arrive."""
        self._unsent: dict[int, bytes] = {}
        """Peer to which no link was open → frames of calls that have failed, which it still waits for."""
        self.failed: CommError | None = None
        """The error that another thread has found and this rank has not raised yet."""

    def awaited(self) -> tuple[int, ...]:
        """Return the peers whose frames the oldest call waits for, or waited for until it failed."""
        try:
            return tuple(self._open[0].waits_for)  # another thread may ask while this one reads
        except IndexError:
            return self._given_up

    def begin(
        self, call: CommCall, frame: Frame, limits: tuple[float, float], waits: bool, reads: bool = True
    ) -> Mapping[int, Frame]:
        """Send the frame of a call to its peers, and return the peers' frames, which `settle` completes.

        The call is open until all frames are read. Nearly always all peers send the same bytes before their data at
        nearly the same time, so these are compared first, unless `reads` is False. With `waits`, wait shortly for them.
        `limits` are those of `WaitTimer`.
        """
        with self._lock:
            self.raise_failed()
            self._given_up = ()
            data, links = frame.packed(), self._links.open_to(call.group)
            found: dict[int, Frame] = {}
            if links is not None and reads and not (self._open or self._unsent or frame.balance):
                waited, unsent = self._swap(links, frame, data, waits, found), []
                if not waited:
                    return found
            else:
                waited = {peer: 0.0 for peer in call.group if peer != self._links.rank}
                unsent = [peer for peer in waited if not self._send(call, peer, data)]
            self._open.append(CallFrames(call, frame, WaitTimer(*limits), list(waited), unsent, waited, found))
            return found

    def swap(self, call: CommCall, frame: Frame, limits: tuple[float, float]) -> Mapping[int, Frame]:
        """Send the frame of a call to its peers, and return the peers' frames once all are read and match."""
        with self._lock:
            found = self.begin(call, frame, limits, waits=True)
            self.settle()
            return found

    def settle(self) -> None:
        """Wait until all frames of all open calls have been read and match.

        Raises:
            CommError: a peer makes another call, or none. The error is raised once; all open calls are over then.
        """
        if not self._open and self.failed is None:
            return
        with self._lock:
            self.raise_failed()
            while self._open:
                self._read(self._open[0], waits=True)

    def look(self) -> None:
        """Read the frames that have arrived; wait if too many calls are open, or if one of them has no link yet."""
        with self._lock:
            self.raise_failed()
            if len(self._open) > _MOST or any(meeting.unsent for meeting in self._open):
                self.settle()
            while self._open and self._read(self._open[0], waits=False):
                pass

    def tend(self) -> CommError | None:
        """Read the frames that have arrived, and return the error, if any; for the watchdog's thread."""
        if not self._open or not self._lock.acquire(blocking=False):
            return self.failed
        try:
            while self._open and self._read(self._open[0], waits=False):
                pass
            if self._open:
                self._examine(self._open[0])
        except CommError as error:
            self.failed = error
            self._open.clear()
        finally:
            self._lock.release()
        return self.failed

    def _swap(
        self, links: OpenLinks, frame: Frame, data: bytes, waits: bool, found: dict[int, Frame]
    ) -> dict[int, float]:
        """Send a frame to peers, and read to `found` their frames that consist of the same bytes before their data.

        Returns the other peers, with the seconds waited for each.
        """
        others: dict[int, float] = {}
        for _, link in links:
            try:
                link.send(data)
            except ConnectionClosedError:
                continue  # the last frames of the peer are still unread, and may say why
        has_data, length = frame.data is not None, len(frame.data or b"")
        head = data[: len(data) - length]
        begin = time.perf_counter()
        for peer, link in links:
            theirs = link.read_behind(head, length, waits)
            end = time.perf_counter()
            if theirs is None:
                others[peer] = end - begin
            else:
                self._waits.note(peer, end - begin)
                found[peer] = Frame(*frame[:-1], theirs) if has_data else frame
            begin = end
        return others

    def fail(self, error: CommError) -> None:
        """Make the next call of this rank raise an error of another thread, unless there is an earlier one."""
        self.failed = self.failed or error

    def raise_failed(self) -> None:
        """Raise the error that another thread has found, once."""
        error, self.failed = self.failed, None
        if error is not None:
            raise error

    def _read(self, meeting: CallFrames, waits: bool) -> bool:
        """Read frames of the oldest call; True if all are read.

        With `waits`, wait until the next check of the peers.
        """
        try:
            for peer in list(meeting.waits_for):
                limit = meeting.watch.slice() / len(meeting.waits_for) if waits else 0.0
                begin = time.perf_counter()
                found = self._receive(meeting, peer, limit)
                meeting.waited[peer] += time.perf_counter() - begin
                if found is not None:
                    self._note(meeting, peer, found)
            if meeting.waits_for:
                if waits:
                    self._examine(meeting)
                return False
            self._finish(meeting)
        except CommError:
            self._give_up(meeting)
            raise
        self._open.popleft()
        return True

    def _give_up(self, failed: CallFrames) -> None:
        """Close all open calls. The frames of the one that failed are still sent to all its peers, and are not read."""
        group, number = failed.frame.group, failed.frame.number
        self._outdated |= {(peer, group, number) for peer in failed.waits_for if peer not in failed.frames}
        for peer in failed.unsent:
            self._unsent[peer] = self._unsent.get(peer, b"") + failed.frame.packed()
        self._given_up = tuple(failed.waits_for)
        self._open.clear()

    def _note(self, meeting: CallFrames, peer: int, found: Frame) -> None:
        self._waits.note(peer, meeting.waited[peer])
        meeting.frames[peer] = found
        self._compare(meeting, peer)
        meeting.waits_for.remove(peer)

    def _examine(self, meeting: CallFrames) -> None:
        """Raise an error if an awaited peer will never come."""
        call, watch = meeting.call, meeting.watch
        if watch.is_time():
            self._examiner.look(call, meeting.waits_for, watch)
        if watch.is_late():
            self._examiner.examine(call, meeting.waits_for, watch)

    def _send(self, call: CommCall, peer: int, data: bytes) -> bool:
        try:
            before = self._unsent.get(peer)
            is_sent = self._links.send(peer, data if before is None else before + data)
            if is_sent and before is not None:
                del self._unsent[peer]
            return is_sent
        except ConnectionClosedError:
            if not self._links.is_open(peer):
                raise self._examiner.gone(call, peer) from None
            return True  # its last frames are still unread, and may say why

    def _receive(self, meeting: CallFrames, peer: int, limit: float) -> Frame | None:
        call = meeting.call
        try:
            if peer in meeting.unsent:
                if not self._links.wait_open(peer, limit):
                    return None
                meeting.unsent.remove(peer)
                self._send(call, peer, meeting.frame.packed())
            while (found := self._links.receive(peer, limit)) is not None:
                key = peer, found.group, found.number
                if key not in self._outdated:
                    break
                self._outdated.remove(key)
            return found
        except ConnectionClosedError:
            raise self._examiner.gone(call, peer) from None
