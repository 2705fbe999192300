"""Before a collective moves data, its ranks compare what they are about to do.

torch answers a swapped, skipped or different call with silent garbage or a hang of half an hour. Here each rank
sends its peers a frame (group, number of the call in the group, hash of the call, the call as text) and reads
theirs. Two ranks that share several groups must meet in the same order, so the first frame that differs is the
first mistake, and its text says what the other rank did.

    a frame that differs                      DisagreementError, at once
    a closed link                             DeadPeerError; MissingCallError if the rank said that it ended
    no frame within `limit`, and then
        every rank waits for another          DeadlockError
        a debugger has stopped the rank       a warning; it is waited for without an end
        the rank computes                     a warning that names it; MissingCallError after `patience`

A message has no frame, since its two ranks need not come at the same time; who waits for one learns the same of ranks
that are gone, that wait too, or that are slow.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from meshwright.layout import user_frame

from ._call import Call, Group, common_part, is_pairwise, transfers
from ._errors import (
    CallError,
    CommError,
    DeadlockError,
    DeadPeerError,
    DisagreementError,
    MissingCallError,
    disagreement,
    missing,
)
from ._facts import Facts
from ._identity import identity
from ._links import Frame, GoneError, Links, State
from ._looking import in_debugger
from ._messages import Message, Messages
from ._side import Side

_MASK = (1 << 64) - 1
_PRIME = 1000003
_LONGEST_TEXT = 1000
_KEPT_PRINTS = 8192
_LOOKS_AFTER_FAILURE = 10
_SHOWN_MESSAGES = 8
_WRITE_FOR_COLLECTIVES = "the same collectives on every rank; MESHWRIGHT_PATIENCE=seconds if the other is only slow"
_OTHER_VALUES = (
    "the calls have one form, but are for other values: other operators, other tensors or another number of steps "
    "came before"
)
_WRITE_FOR_VALUES = "the same program, settings, seeds and whole tensors on every rank"
_WRITE_FOR_MESSAGES = (
    "a send for every receive, with the same tag; init_process(transfer_limit=seconds) if the other is only slow"
)


@dataclass(frozen=True, slots=True)
class Check:
    """How calls are compared: every `every`-th call of a group (0: none), and how long a peer is waited for.

    After `limit` seconds a dead peer, a deadlock or a rank that went elsewhere is an error and a slow rank a
    warning; after `patience` seconds the slow rank is an error too.

    >>> Check.parse("100")
    Check(every=100, limit=20.0, patience=1800.0)
    """

    every: int = 1
    limit: float = 20.0
    patience: float = 1800.0

    @staticmethod
    def parse(text: str | int, limit: float = 20.0, patience: float = 1800.0) -> Check:
        """ "every", "off", or a number N: every N-th call."""
        words = {"every": 1, "off": 0}
        every = words.get(str(text))
        if every is None and str(text).isdecimal():
            every = int(text)
        if every is None:
            raise CallError(
                f"check={text!r}",
                "no such check",
                "calls are compared always, sometimes or never",
                '"every", "off" or a number',
            )
        return Check(every, limit, patience)

    @staticmethod
    def from_environment(env: Mapping[str, str] | None = None) -> Check:
        """The check that MESHWRIGHT_CHECK, MESHWRIGHT_LIMIT and MESHWRIGHT_PATIENCE ask for."""
        env = os.environ if env is None else env
        limit, patience = float(env.get("MESHWRIGHT_LIMIT", "20")), float(env.get("MESHWRIGHT_PATIENCE", "1800"))
        return Check.parse(env.get("MESHWRIGHT_CHECK", "every"), limit, patience)


def _named(call: Call, name: str) -> str:
    """Return the text of a call, with the name of the operator or the program that makes it."""
    return f"{call} for {name}" if name else str(call)


def _told(call: Call) -> str:
    """Return this rank's call, with the line of the user's code that made it."""
    line, said = user_frame(), _named(call, identity.what[1])
    return f"{said} at {line}" if line else said


_States = dict[int, State | None]
"""By rank, what it is doing; None where nobody answers."""


class _Print(NamedTuple):
    common: int
    identity: int
    balance: int
    text: bytes


class Guard:
    """One rank's comparisons with its peers."""

    def __init__(self, rank: int, check: Check, messages: Messages, side: Side, facts: Facts) -> None:
        self.rank = rank
        self.check = check
        self._facts = facts
        self._messages, self._side = messages, side
        self._prints: dict[tuple[Call, str], _Print] = {}
        self._numbers: dict[Group, int] = {}
        self._chains: dict[Group, tuple[int, int, int]] = {}
        self._names: dict[Group, int] = {}
        self._call: Call | None = None
        self._is_aside = False
        self._waits_for: list[int] = []
        self._receive_call: Call | None = None
        self._calls = 0

    def connect(self, links: Links) -> None:
        """Use these links from now on."""
        self._links = links

    def state(self) -> State:
        """What the rank is doing, for those who ask."""
        call, receive = self._call, self._receive_call
        calls = [str(each) for each in (receive, call) if each is not None]
        meets = () if call is None else tuple(self._waits_for)
        sender = () if receive is None else (receive.message[0],)
        waits = receive is not None or (call is not None and not self._is_aside)
        works = self._messages.is_moving() or (self._side.is_busy() and not meets)
        what = " and in ".join(calls)
        return State(what, sender + meets, self._calls, receive is not None, waits and not works, in_debugger())

    def before(self, call: Call) -> None:
        """Compare `call` with the peers' calls; returns when all are about to make the same.

        If nobody came, the rank goes on counting as waiting in this call, so that its peers come to the same verdict.
        """
        self._waits_for = []
        self._call, self._is_aside = call, self._side.is_here()
        self._calls += 1
        if self.check.every == 0:
            return
        number = self._numbers[call.group] = self._numbers.get(call.group, 0) + 1
        what, name = identity.what
        mine = self._print_of(call, name)._replace(identity=what & _MASK)
        if self.check.every > 1:
            mine = self._chained(call.group, mine)
        if number % self.check.every:
            return
        frame = Frame(self._name_of(call.group), number, mine.common, mine.identity, mine.balance, mine.text)
        try:
            frames = self._swap(call, frame)
        except DisagreementError:
            self.after()
            raise
        if (mine.balance + sum(other.balance for other in frames.values())) & _MASK:
            self.after()
            raise self._unbalanced(call, frames)

    def after(self) -> None:
        """The call is over."""
        self._call = None

    def wait_for_message(self, call: Call, limit: float) -> Message:
        """The message of a receive, within the limit in seconds."""
        peer, *_ = call.message
        self._receive_call = call
        self._calls += 1
        watch = _Watch(self.check.limit, limit)
        try:
            while (found := self._messages.receive(peer, call.tag, watch.slice())) is None:
                if watch.is_late():
                    self._examine(call, [peer], watch)
        except GoneError:
            raise self.gone(call, peer) from None
        self._receive_call = None
        return found

    def explain(self, call: Call, error: Exception) -> CommError:
        """What to raise when the transport failed: the peer that is gone, if there is one."""
        peers = [peer for peer in call.group if peer != self.rank]
        for _ in range(_LOOKS_AFTER_FAILURE):
            for peer in peers:
                if self._links.ask(peer) is None:
                    return self.gone(call, peer)
            time.sleep(0.2)
        return CommError(
            f"rank {self.rank}: {call}",
            f"{type(error).__name__}: {error}",
            "the transport failed, with every rank of the group alive",
            "another backend, or a look at the network between the ranks",
        )

    def _swap(self, call: Call, frame: Frame) -> dict[int, Frame]:
        """Every peer's frame, each found equal to ours."""
        peers = [peer for peer in call.group if peer != self.rank]
        data = frame.packed()
        self._waits_for = list(peers)
        unsent = [peer for peer in peers if not self._send(call, peer, data)]
        frames: dict[int, Frame] = {}
        watch = _Watch(self.check.limit, self.check.patience)
        while self._waits_for:
            for peer in list(self._waits_for):
                found = self._receive(call, peer, data, unsent, watch.slice() / len(self._waits_for))
                if found is not None:
                    self._compare(call, frame, peer, found)
                    frames[peer] = found
                    self._waits_for.remove(peer)
            if self._waits_for and watch.is_late():
                self._examine(call, self._waits_for, watch)
        return frames

    def _send(self, call: Call, peer: int, data: bytes) -> bool:
        try:
            return self._links.send(peer, data)
        except GoneError:
            if not self._links.is_open(peer):
                raise self.gone(call, peer) from None
            return True  # what it sent before it went is still to be read, and may say why

    def _receive(self, call: Call, peer: int, data: bytes, unsent: list[int], limit: float) -> Frame | None:
        try:
            if peer in unsent:
                if not self._links.wait_open(peer, limit):
                    return None
                unsent.remove(peer)
                self._send(call, peer, data)
            return self._links.receive(peer, limit)
        except GoneError:
            raise self.gone(call, peer) from None

    def _compare(self, call: Call, mine: Frame, peer: int, other: Frame) -> None:
        if mine[:4] == other[:4]:
            return
        text = other.text.decode(errors="replace")
        if mine[:3] == other[:3]:
            raise self._other_values(call, mine, peer, text)
        if mine.text != other.text:
            why = "they are different calls, or calls in another order"
        elif mine.number != other.number:
            why = f"rank {self.rank} has made {mine.number} calls on this group and rank {peer} {other.number}"
        else:
            why = "the calls before this one, which were not compared, were different"
        raise disagreement(self.rank, _told(call), peer, text, why)

    def _other_values(self, call: Call, mine: Frame, peer: int, text: str) -> DisagreementError:
        """Return the error about a call that is made for other values than the peer's."""
        at = f"{mine.group}/{mine.number}"
        self._facts.tell(at)
        rows = self._facts.differences(at, peer)
        error = disagreement(self.rank, _told(call), peer, text, _OTHER_VALUES)
        found = f"{error.found}; {rows}" if rows else error.found
        return DisagreementError(error.asked, found, _OTHER_VALUES, _WRITE_FOR_VALUES)

    def _unbalanced(self, call: Call, frames: dict[int, Frame]) -> DisagreementError:
        sides = {peer: frame.text.decode(errors="replace") for peer, frame in frames.items()} | {self.rank: _told(call)}
        return DisagreementError(
            f"one {call.kind} of ranks {', '.join(map(str, call.group))}",
            "; ".join(f"rank {rank} calls {text}" for rank, text in sorted(sides.items())),
            "what a rank sends is not what its peer expects",
            "the shapes of every piece, taken from one layout on all ranks",
        )

    def _examine(self, call: Call, peers: Sequence[int], watch: _Watch) -> None:
        """Raise if the ranks that are waited for cannot come; warn, once, if they only take their time."""
        states = self._states_behind(call, peers)
        everyone = states | {self.rank: self.state()}
        ring = _is_ring(everyone)
        if ring and watch.is_still(everyone):
            raise DeadlockError(
                f"rank {self.rank}: {call}",
                self._say(states),
                f"every rank has waited for another for {watch.waited:.0f} s",
                "the same order of collectives on all ranks that share them, and sends before what they must wait for",
            )
        late = MissingCallError(
            f"rank {self.rank}: {call}",
            self._say(states),
            f"rank {self.rank} has waited for {watch.waited:.0f} s",
            _WRITE_FOR_MESSAGES if call.kind == "receive" else _WRITE_FOR_COLLECTIVES,
        )
        if any(state is not None and state.debugged for state in states.values()):
            watch.start_again()
        elif watch.waited > watch.patience:
            raise late
        if not ring and watch.warn_now():
            warnings.warn(str(late), RuntimeWarning, stacklevel=2)

    def _states_behind(self, call: Call, peers: Sequence[int]) -> _States:
        """What the ranks that we wait for are doing, and those that they wait for, and so on.

        One that has ended will not come to a collective; a message may be on its way all the same.
        """
        states: _States = {}
        ahead = [(peer, call.kind == "receive") for peer in peers]
        while ahead:
            peer, may_have_sent = ahead.pop(0)
            if peer == self.rank or peer in states:
                continue
            state = states[peer] = self._links.ask(peer)
            if state is not None:
                ahead += [(other, state.receives) for other in state.waits_for]
            elif not may_have_sent:
                raise self.gone(call, peer)
        return states

    def _say(self, states: _States) -> str:
        said = [f"rank {rank} {'has ended' if state is None else state}" for rank, state in sorted(states.items())]
        left = self._messages.not_received()
        if left:
            said.append(f"rank {self.rank} has not received: {', '.join(left[:_SHOWN_MESSAGES])}")
        return "; ".join(said)

    def gone(self, call: Call, peer: int) -> CommError:
        """The error about a peer that has ended, or died."""
        farewell = self._links.farewell_of(peer)
        asked, found = f"rank {self.rank}: {call}", f"rank {peer} ended {farewell}"
        if farewell is None:
            return DeadPeerError(
                asked,
                f"rank {peer} is dead",
                "its process is gone without a word",
                f"a look at the output of rank {peer}, and a restart",
            )
        return missing(asked, found, message=call.kind in ("send", "receive"))

    def _print_of(self, call: Call, name: str) -> _Print:
        found = self._prints.get((call, name))
        if found is None:
            if len(self._prints) >= _KEPT_PRINTS:
                self._prints.clear()
            balance = 0
            if is_pairwise(call):
                balance = sum(count * _hash(key) for key, count in transfers(call, self.rank).items()) & _MASK
            text = _named(call, name).encode()[:_LONGEST_TEXT]
            found = self._prints[call, name] = _Print(_hash(common_part(call)), 0, balance, text)
        return found

    def _chained(self, group: Group, mine: _Print) -> _Print:
        """A print of all calls of the group so far, so that a comparison now and then misses none."""
        common, what, balance = self._chains.get(group, (0, 0, 0))
        common, what = (common * _PRIME + mine.common) & _MASK, (what * _PRIME + mine.identity) & _MASK
        balance = (balance + mine.balance) & _MASK
        self._chains[group] = (common, what, balance)
        return mine._replace(common=common, identity=what, balance=balance)

    def _name_of(self, group: Group) -> int:
        name = self._names.get(group)
        if name is None:
            name = self._names[group] = _hash(group)
        return name


class _Watch:
    """How long a rank has waited, when to look again, and whether anything has moved since."""

    def __init__(self, limit: float, patience: float) -> None:
        self.patience = patience
        self._started = time.monotonic()
        self._look_at = min(limit, patience)
        self._before: _States | None = None
        self._warned = False
        self.waited = 0.0

    def is_late(self) -> bool:
        self.waited = time.monotonic() - self._started
        if self.waited < self._look_at:
            return False
        self._look_at = self.waited + 1.0
        return True

    def start_again(self) -> None:
        """What was waited does not count: a person looks at a rank."""
        self._started = time.monotonic()
        self._look_at = 1.0

    def slice(self) -> float:
        """Seconds to wait before the next look."""
        return min(max(self._look_at - self.waited, 0.05), 1.0)

    def is_still(self, states: _States) -> bool:
        still, self._before = states == self._before, states
        return still

    def warn_now(self) -> bool:
        warned, self._warned = self._warned, True
        return not warned


def _is_ring(states: _States) -> bool:
    """Whether every rank waits for another one. Where one waits for a message, nobody may be about to send."""
    found = [state for state in states.values() if state is not None and state.call and state.waits_for]
    if len(found) < len(states):
        return False
    return all(state.stuck for state in found) or not any(state.receives for state in found)


def _hash(value: object) -> int:
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little")
