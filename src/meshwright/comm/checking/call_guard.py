"""Comparison of calls before a collective moves data.

torch answers a swapped, skipped or different call with wrong data or a hang of half an hour. Here each rank sends its
peers a frame: group, number of the call in the group, hash of the call, the call as text. Then it reads their frames.
Two ranks that share several groups must make their calls in the same order. So the first frame that differs is the
first mistake, and its text names the other rank's call.

    a frame that differs                      DisagreementError, at once
    a closed link                             DeadPeerError; MissingCallError if the rank said that it ended
    no frame                                  the result of `peer_examiner.py`

The data of a small call is part of its frames (`swap`). A larger call that was predicted is compared behind its
transfer instead (`comparison_order.py`). If a call is only queued on a device, its frames may lag behind it
(`call_frames.py`). A message has no frame, since its two ranks make their calls at different times. A rank that waits
for a message detects ended, waiting and slow ranks in the same manner.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

from meshwright.layout import user_frame

from .._errors import CommError, DisagreementError, disagreement_error
from ..communicators.call import CommCall, Group, common_part, expected_transfers, is_pairwise
from ..communicators.call_purpose import call_purpose
from ..communicators.stragglers import Waits
from ..launcher.rank_console import in_debugger
from ..transport.background_thread import BackgroundThread
from ..transport.control_links import ConnectionClosedError, ControlLinks, Frame
from ..transport.messages import Message, Messages
from ..transport.rank_state import RankState
from .call_frames import CallFrames, PendingCallFrames
from .check_settings import Check
from .comparison_order import ComparisonOrder, Order
from .peer_examiner import Examiner
from .rank_facts import RankFacts
from .transfer_waits import TransferWaits
from .wait_timer import WaitTimer

_MASK = (1 << 64) - 1
_PRIME = 1000003
_LONGEST_TEXT = 1000
_KEPT_PRINTS = 8192
_LOOKS_AFTER_FAILURE = 10
_LONGEST_SAID = 300
_OTHER_VALUES = (
    "the calls have the same form but are for different values: the operators, the tensors or the number of steps "
    "before them differ"
)
_WRITE_FOR_VALUES = "use the same program, settings, seeds and whole tensors on every rank"


def _named(call: CommCall, name: str) -> str:
    """Return the text of a call, with the name of the operator or program that makes it."""
    return f"{call} for {name}" if name else str(call)


class _Print(NamedTuple):
    """The part of a frame that depends on the call and the name of its operator alone."""

    common: int
    balance: int
    text: bytes


class Guard:
    """Comparisons of one rank's calls with those of its peers."""

    def __init__(self, rank: int, check: Check, messages: Messages, side: BackgroundThread, facts: RankFacts) -> None:
        self.rank = rank
        self.check = check
        self._facts = facts
        self._messages, self._side = messages, side
        self._prints: dict[tuple[CommCall, str], _Print] = {}
        self._numbers: dict[Group, int] = {}
        self._chains: dict[Group, tuple[int, int, int]] = {}
        self._names: dict[Group, int] = {}
        self._call: CommCall | None = None
        self._is_aside = False
        self._receive_call: CommCall | None = None
        self._late: dict[int, CommCall] = {}
        """Rank → the message from it for which a thread waits."""
        self._awaited_peers: tuple[int, ...] = ()
        """Ranks without whose messages in `_late` this rank does not go on."""
        self._last: CommCall | None = None
        self._calls = 0
        self._present = Order.FIRST
        """Order of the present call."""
        self.waits = Waits()
        self._transfer_waits = TransferWaits(self.waits)

    def connect(self, links: ControlLinks) -> None:
        """Set the links to use from now on."""
        self._links = links
        self.examiner = Examiner(self.rank, links, self._messages, self.state)
        self.meetings = PendingCallFrames(links, self.examiner, self.waits, self._compare, self._finish)
        self._order = ComparisonOrder(links)

    def state(self) -> RankState:
        """Return the current state of the rank, for peers that ask."""
        call, receives = self._call, self._awaited_messages()
        calls = [str(each) for each in (*receives, call) if each is not None]
        meets = () if call is None else self.meetings.awaited()
        senders = tuple(each.message[0] for each in receives)
        waits = bool(receives) or (call is not None and not self._is_aside)
        works = self._messages.is_moving() or (self._side.is_busy() and not meets)
        what = " and in ".join(calls)
        stuck, last, at = waits and not works, self._last, "" if calls else _line_of_main()
        said = "" if last is None else str(last)[:_LONGEST_SAID]
        return RankState(
            what, senders + meets, self._calls, bool(receives), stuck, in_debugger(), said, at, self.waits.share()
        )

    def _awaited_messages(self) -> list[CommCall]:
        """Return the messages without which this rank does not go on."""
        late = [self._late.get(peer) for peer in self._awaited_peers]
        return [call for call in (self._receive_call, *late) if call is not None]

    def before(self, call: CommCall, lags: bool = False) -> None:
        """Compare `call` with the peers' calls; return when all peers are about to make it, or earlier with `lags`.

        A predicted call is compared by `moved`, after its data has moved.
        If a peer did not come, the rank still counts as waiting in this call, so that its peers reach the same result.
        """
        self._call, self._is_aside, self._present = call, self._side.is_here(), Order.FIRST
        self._calls += 1
        frame = self._frame_of(call) if self.check.every else None
        if frame is None:
            return
        order = self._order.of_call(call, frame.common) if self.check.every == 1 else Order.FIRST
        if order is not Order.FIRST and not lags:
            self._present = order
            frame = frame._replace(took=self._transfer_waits.begin(call.group))
        limits = (self.check.limit, self.check.patience)
        try:
            is_first = self._present is not Order.BEHIND
            self.meetings.begin(call, frame, limits, waits=not lags, reads=is_first)
            if is_first:
                self.meetings.look() if lags else self.meetings.settle()
        except DisagreementError:
            self.after()
            raise

    @property
    def is_behind(self) -> bool:
        """True if the present call is compared behind its transfer."""
        return self._present is Order.BEHIND

    def moved(self, call: CommCall) -> None:
        """Mark that the data of the present call has moved. If the call `is_behind`, compare it now."""
        if self._present is Order.FIRST:
            return
        self._transfer_waits.end(call.group, self.is_behind)
        if self.is_behind:
            self.meetings.settle()

    def swap(self, call: CommCall, data: bytes) -> list[bytes]:
        """Compare `call` with the peers' calls, and return every rank's data in the order of the group.

        The data is part of the frames, so it needs no transfer.
        """
        self._call, self._is_aside = call, self._side.is_here()
        self._calls += 1
        frame = self._frame_of(call, data)
        assert frame is not None
        limits = (self.check.limit, self.check.patience)
        try:
            frames = self.meetings.swap(call, frame, limits)
        except DisagreementError:
            self.after()
            raise
        self.after()
        return [data if peer == self.rank else frames[peer].data or b"" for peer in call.group]

    def after(self) -> None:
        """Mark the call as finished."""
        self._last, self._call, self._present = self._call, None, Order.FIRST

    @contextmanager
    def awaiting_late(self, peers: tuple[int, ...]) -> Generator[None]:
        """Count this rank, inside the block, as waiting for the messages from these ranks for which threads wait."""
        self._awaited_peers = peers
        try:
            yield
        finally:
            self._awaited_peers = ()

    def wait_for_message(self, call: CommCall, limit: float, is_late: bool = False) -> Message:
        """Return the message of a receive, within `limit` seconds.

        With `is_late`, the caller is a thread, and the rank itself goes on.
        """
        self._calls += 1
        if is_late:
            self._late[call.message[0]] = call
            try:
                return self._message(call, limit)
            finally:
                del self._late[call.message[0]]
        self._receive_call = call
        found = self._message(call, limit)
        self._receive_call, self._last = None, call
        return found

    def _message(self, call: CommCall, limit: float) -> Message:
        peer, *_ = call.message
        watch = WaitTimer(self.check.limit, limit)
        try:
            while (found := self._messages.receive(peer, call.tag, watch.slice())) is None:
                if watch.is_time():
                    watch.note_life(peer, self._links.life(peer))
                if watch.is_late():
                    self.examiner.examine(call, [peer], watch)
        except ConnectionClosedError:
            raise self.examiner.gone(call, peer) from None
        return found

    def explain(self, call: CommCall, error: Exception) -> CommError:
        """Return the error to raise after a failure of the transport; it names an ended peer, if there is one.

        Raises CommError if a peer has made another call, or none.
        """
        if self.is_behind:
            self.meetings.settle()
        peers = [peer for peer in call.group if peer != self.rank]
        for _ in range(_LOOKS_AFTER_FAILURE):
            for peer in peers:
                if self._links.ask(peer) is None:
                    return self.examiner.gone(call, peer)
            time.sleep(0.2)
        return CommError(
            f"rank {self.rank}: {call}",
            f"{type(error).__name__}: {error}",
            "the transport failed, although every rank of the group is alive",
            "use another backend, or check the network between the ranks",
        )

    def _compare(self, meeting: CallFrames, peer: int) -> None:
        """Raise DisagreementError if the frame of a peer differs."""
        mine, other = meeting.frame, meeting.frames[peer]
        moves_alike = (mine.data is None) == (other.data is None)
        if mine[:4] == other[:4] and moves_alike:
            return
        self._order.forget(meeting.call.group)
        text = other.text.decode(errors="replace")
        if mine[:3] == other[:3] and moves_alike:
            raise self._other_values(meeting, peer, text)
        if mine.text != other.text:
            why = "the ranks make different calls, or the same calls in different orders"
        elif mine.number != other.number:
            why = f"on this group, rank {self.rank} has made {mine.number} calls and rank {peer} {other.number} calls"
        elif mine[:3] != other[:3]:
            why = "earlier calls differ, which were not compared"
        else:
            why = "the tensors of the ranks are on devices with different transports"
        raise disagreement_error(self.rank, self._call_text(meeting), peer, text, why)

    def _call_text(self, meeting: CallFrames) -> str:
        """Return this rank's call, with the line of the user's code if the call is the current one."""
        line, said = user_frame(), meeting.frame.text.decode(errors="replace")
        return f"{said} at {line}" if line and meeting.call is self._call else said

    def _other_values(self, meeting: CallFrames, peer: int, text: str) -> DisagreementError:
        """Return the error for a call that is made for other values than the peer's."""
        at = f"{meeting.frame.group}/{meeting.frame.number}"
        self._facts.tell(at)
        rows = self._facts.differences(at, peer)
        error = disagreement_error(self.rank, self._call_text(meeting), peer, text, _OTHER_VALUES)
        found = f"{error.found}; {rows}" if rows else error.found
        return DisagreementError(error.asked, found, _OTHER_VALUES, _WRITE_FOR_VALUES)

    def _finish(self, meeting: CallFrames) -> None:
        """Count the waits in the transfer before this call, and compare the pieces that ranks send and expect."""
        call, frames = meeting.call, meeting.frames
        if is_pairwise(call):
            self._check_balance(meeting)
            return
        took = {peer: frames[peer].took for peer in call.group if peer in frames}
        self._transfer_waits.note(call.group, meeting.frame.took, took)

    def _check_balance(self, meeting: CallFrames) -> None:
        """Raise DisagreementError if a rank sends something else than its peer expects."""
        call, frames = meeting.call, meeting.frames
        if not (meeting.frame.balance + sum(other.balance for other in frames.values())) & _MASK:
            return
        sides = {peer: frame.text.decode(errors="replace") for peer, frame in frames.items()}
        told = sorted((sides | {self.rank: self._call_text(meeting)}).items())
        raise DisagreementError(
            f"one {call.kind} of ranks {', '.join(map(str, call.group))}",
            "; ".join(f"rank {rank} calls {text}" for rank, text in told),
            "the pieces that one rank sends differ from the pieces that its peer expects",
            "take the shapes of all pieces from one layout on all ranks",
        )

    def _frame_of(self, call: CommCall, data: bytes | None = None) -> Frame | None:
        """Return the frame of the next call, with its data; None if the call is not compared."""
        group = call.group
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        what, name = call_purpose.what
        common, balance, text = self._print_of(call, name)
        what &= _MASK
        if self.check.every > 1:
            common, what, balance = self._chained(group, common, what, balance)
        if number % self.check.every:
            return None
        return Frame(self._name_of(group), number, common, what, balance, text, data=data)

    def _print_of(self, call: CommCall, name: str) -> _Print:
        found = self._prints.get((call, name))
        if found is None:
            if len(self._prints) >= _KEPT_PRINTS:
                self._prints.clear()
            balance = 0
            if is_pairwise(call):
                balance = sum(count * _hash(key) for key, count in expected_transfers(call, self.rank).items()) & _MASK
            text = _named(call, name).encode()[:_LONGEST_TEXT]
            found = self._prints[call, name] = _Print(_hash(common_part(call)), balance, text)
        return found

    def _chained(self, group: Group, common: int, what: int, balance: int) -> tuple[int, int, int]:
        """Return hashes of all calls of the group so far, which cover the calls that were not compared."""
        commons, whats, balances = self._chains.get(group, (0, 0, 0))
        found = (commons * _PRIME + common) & _MASK, (whats * _PRIME + what) & _MASK, (balances + balance) & _MASK
        self._chains[group] = found
        return found

    def _name_of(self, group: Group) -> int:
        name = self._names.get(group)
        if name is None:
            name = self._names[group] = _hash(group)
        return name


def _line_of_main() -> str:
    """Return the line of the user's code that the main thread executes."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else user_frame(frame)


def _hash(value: object) -> int:
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little")
