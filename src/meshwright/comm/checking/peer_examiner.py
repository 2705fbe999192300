"""Examination of the peers of a waiting rank: an error if they cannot come, a warning if they are only slow.

the process has ended                     DeadPeerError; MissingCallError if the rank said that it ended
no call within `limit`, and then
    every rank waits for another          DeadlockError
    its process is stopped                NoAnswerError
    a debugger has stopped it             the rank waits without a limit
    it computes, or holds the lock        a warning after four limits; MissingCallError after `patience`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.layout import warn_user

from .._errors import CommError, DeadlockError, DeadPeerError, MissingCallError, NoAnswerError, missing_call_error
from ..communicators.call import CommCall
from ..launcher.process_state import ProcessState
from ..transport.control_links import ControlLinks
from ..transport.messages import Messages
from ..transport.rank_state import RankState
from .wait_timer import States, WaitTimer

_SHOWN_MESSAGES = 8
_WRITE_FOR_COLLECTIVES = (
    "make the same collectives on every rank; set MESHWRIGHT_PATIENCE=seconds if the other rank is only slow"
)
_WRITE_FOR_MESSAGES = (
    "write a send for every receive, with the same tag; "
    "call init_process(transfer_limit=seconds) if the other rank is only slow"
)


class Examiner:
    """Finds out whether the peers of a rank that waits in a call can still come."""

    def __init__(self, rank: int, links: ControlLinks, messages: Messages, own: Callable[[], RankState]) -> None:
        self.rank = rank
        self._links, self._messages, self._own = links, messages, own

    def look(self, call: CommCall, peers: Sequence[int], watch: WaitTimer) -> None:
        """Raise the error for a peer whose process has ended and whose calls have all been read."""
        for peer in peers:
            life = self._links.life(peer)
            watch.note_life(peer, life)
            if life is ProcessState.GONE or (life is ProcessState.UNKNOWN and self._has_refused(peer)):
                raise self.gone(call, peer)

    def examine(self, call: CommCall, peers: Sequence[int], watch: WaitTimer) -> None:
        """Raise an error if the awaited ranks cannot come; warn once if they are only slow."""
        states = self._states_behind(call, peers)
        for peer, state in states.items():
            if state is not None:
                self._check_answer(call, peer, state, watch)
        everyone = states | {self.rank: self._own()}
        ring = _is_ring(everyone)
        if ring and watch.is_still(everyone):
            raise DeadlockError(
                f"rank {self.rank}: {call}",
                self._say(states),
                f"every rank has waited for another rank for {watch.waited:.0f} s",
                "make collectives in the same order on all ranks that share them, and send before you wait",
            )
        self._check_patience(call, states, watch, ring)
        watch.examined()

    def gone(self, call: CommCall, peer: int) -> CommError:
        """Return the error for a peer that has ended or died."""
        farewell = self._links.farewell_of(peer)
        asked = f"rank {self.rank}: {call}"
        if farewell is not None:
            return missing_call_error(asked, f"rank {peer} ended {farewell}", message=call.kind in ("send", "receive"))
        life = self._links.life(peer)
        if life in (ProcessState.RUNNING, ProcessState.STOPPED, ProcessState.TRACED):
            return NoAnswerError(
                asked,
                f"rank {peer} has closed its connections, and its process is {life.value}",
                f"without connections rank {peer} cannot join the call",
                f"read the output of rank {peer}, and restart the run",
            )
        return DeadPeerError(
            asked,
            f"rank {peer} is dead",
            "its process has ended without a report",
            f"read the output of rank {peer}, and restart the run",
        )

    def no_answer(self, call: CommCall, peer: int, state: RankState, waited: float) -> NoAnswerError:
        """Return the error for a peer whose process exists but is stopped."""
        return NoAnswerError(
            f"rank {self.rank}: {call}",
            f"no answer from rank {peer} for {waited:.0f} s: {state.silence}",
            f"rank {self.rank} waits for rank {peer} in {call}",
            f"check rank {peer} on its host, for example with `ps -o pid,stat,wchan,cmd`, and restart the run",
        )

    def _check_answer(self, call: CommCall, peer: int, state: RankState, watch: WaitTimer) -> None:
        if not state.stopped:
            return
        watch.note_life(peer, ProcessState.STOPPED)
        if watch.is_still_stopped(peer):
            raise self.no_answer(call, peer, state, watch.waited)

    def _check_patience(self, call: CommCall, states: States, watch: WaitTimer, ring: bool) -> None:
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
            warn_user(str(late), RuntimeWarning)

    def _has_refused(self, peer: int) -> bool:
        """True if no process listens at the address of a rank of another host."""
        return not self._links.is_open(peer) and self._links.has_closed(peer)

    def _states_behind(self, call: CommCall, peers: Sequence[int]) -> States:
        """Return the states of the awaited ranks, of the ranks that these wait for, and so on.

        A rank that has ended will not join a collective, but its message may still be in flight.
        """
        states: States = {}
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

    def _say(self, states: States) -> str:
        said = [f"rank {rank} {'has ended' if state is None else state}" for rank, state in sorted(states.items())]
        left = self._messages.not_received()
        if left:
            said.append(f"rank {self.rank} has not received: {', '.join(left[:_SHOWN_MESSAGES])}")
        return "; ".join(said)


def _is_ring(states: States) -> bool:
    """True if every rank waits for another one. If a rank waits for a message, no rank may be able to send."""
    found = [state for state in states.values() if state is not None and state.call and state.waits_for]
    if len(found) < len(states):
        return False
    return all(state.stuck for state in found) or not any(state.receives for state in found)
