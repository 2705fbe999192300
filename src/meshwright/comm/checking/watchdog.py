"""A thread that detects that a transport waits for a process that has ended or is stopped.

Once all ranks have agreed on a call, its data moves. Transports of this package ask the watchdog while they wait, and
raise the error that it has found. The transports of torch cannot be interrupted: the error is printed, and the process
ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from .._errors import CommError
from ..communicators.call import CommCall
from ..launcher.process_state import ProcessState
from ..torch_hooks import Store, another_connection
from ..transport.control_links import ControlLinks
from ..transport.rank_state import RankState
from .call_guard import Guard

_BETWEEN_LOOKS = 0.5
_BETWEEN_PUBLISHED = 2.0
_OWN_PAUSE = 5.0
_GRACE = 1.5
"""Seconds for the transport to detect an ended process itself."""
_TIME_TO_RAISE, _TIME_OF_BLOCKED = 1.0, 0.25
"""Seconds for a thread to raise an error, and seconds for a thread that waits in a transport of torch."""


class Watchdog:
    """Checks the processes of a call's group while its data moves; `kill` gets the error, and does not return."""

    def __init__(self, guard: Guard, links: ControlLinks, store: Store, kill: Callable[[CommError], None]) -> None:
        self._guard, self._links, self._kill = guard, links, kill
        self._moving: dict[int, tuple[CommCall, float]] = {}
        self._seen: dict[int, float] = {}
        self._asking: set[int] = set()
        """Threads whose transport has asked for errors while it waits."""
        self._errors: dict[int, CommError] = {}
        self._closed = threading.Event()
        self._store = another_connection(store)
        self._look_at_store = 0.0
        threading.Thread(target=self._watch, name="meshwright watchdog", daemon=True).start()

    def begin(self, call: CommCall) -> None:
        """Mark that the data of a call moves in this thread from now on."""
        self._moving[threading.get_ident()] = (call, time.monotonic())

    def end(self) -> None:
        """Mark that the data of this thread's call has moved."""
        self._moving.pop(threading.get_ident(), None)
        self._asking.discard(threading.get_ident())

    def check(self) -> None:
        """Raise the error that was found about the peers of this thread's call, if any."""
        self._asking.add(threading.get_ident())
        found = self._errors.get(threading.get_ident())
        if found is not None:
            raise found

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _watch(self) -> None:
        latest = time.monotonic()
        while not self._closed.wait(_BETWEEN_LOOKS):
            now = time.monotonic()
            if not self._moving or now - latest > _OWN_PAUSE:
                self._seen.clear()  # this process was stopped, so all others may have been
            latest = now
            self._publish(now)
            self._tend()
            for thread, moving in list(self._moving.items()):
                error = self._error_of_peers(*moving)
                if error is not None:
                    self._tell(thread, moving, error)

    def _publish(self, now: float) -> None:
        if now < self._look_at_store:
            return
        self._look_at_store = now + _BETWEEN_PUBLISHED
        with suppress(RuntimeError):
            self._links.publish(self._store)

    def _tend(self) -> None:
        """Read the frames of calls whose comparison lags; end the process if an error is not raised in time."""
        meetings = self._guard.meetings
        error = meetings.tend()
        if error is not None:
            self._closed.wait(self._time_to_raise())
            if meetings.failed is error:
                self._kill(error)

    def _tell(self, thread: int, moving: tuple[CommCall, float], error: CommError) -> None:
        """Let the thread raise the error; if it cannot, end the process."""
        self._errors[thread] = error
        self._closed.wait(self._time_to_raise())
        del self._errors[thread]
        if self._moving.get(thread) == moving:
            self._kill(error)

    def _time_to_raise(self) -> float:
        """Return the seconds for this rank to raise an error: fewer if a thread waits where no error reaches it."""
        is_blocked = any(thread not in self._asking for thread in list(self._moving))
        return _TIME_OF_BLOCKED if is_blocked else _TIME_TO_RAISE

    def _error_of_peers(self, call: CommCall, began: float) -> CommError | None:
        for peer in call.group:
            life = ProcessState.RUNNING if peer == self._guard.rank else self._links.life(peer)
            if life not in (ProcessState.GONE, ProcessState.STOPPED):
                self._seen.pop(peer, None)
                continue
            since = time.monotonic() - max(began, self._seen.setdefault(peer, time.monotonic()))
            if life is ProcessState.GONE and since > _GRACE and not self._ended_well(peer):
                return self._guard.examiner.gone(call, peer)
            if life is ProcessState.STOPPED and since > self._guard.check.limit:
                state = RankState("", (), 0, silence="its process is stopped")
                return self._guard.examiner.no_answer(call, peer, state, since)
        return None

    def _ended_well(self, peer: int) -> bool:
        """True if the rank has done its part and ended normally, though others of the group may not have."""
        return self._links.farewell_of(peer, 0.0) == "normally"
