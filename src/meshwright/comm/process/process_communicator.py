"""Communicator with one process per rank, over shared memory or Gloo on the CPU, or the platform's transport.

On a device with streams, collectives are queued on a communication stream (`QueuedCommunicator`), and the host waits
for none of them.

Tensors on the CPU use shared memory if all ranks of the group are on one host, and Gloo otherwise. If every call is
compared, the data of small collectives travels with the comparison instead (`small_calls.py`). Messages use their own
connections, between the memories of the hosts, and are copied from and to other devices: NCCL has no tags, and its
senders wait for their receivers. With Gloo as backend, collectives of tensors on a device are copied in the same way.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from meshwright.layout import (
    CPU,
    MeshwrightError,
    platform_of,
    user_place,
    warn_user,
)
from meshwright.reshard import ConversionPlan

from .._errors import CommError, DisagreementError, StragglerWarning
from ..checking.call_forecast import CallForecast
from ..checking.call_guard import Guard
from ..checking.check_settings import Check
from ..checking.one_caller import OneCaller
from ..checking.rank_facts import RankFacts
from ..checking.watchdog import Watchdog
from ..communicators.call import CommCall, Group
from ..communicators.call_purpose import call_purpose, calls_are_compared
from ..communicators.communicator import Communicator, PendingConversion, Receive, check_message
from ..communicators.current_communicator import current_communicator, install_communicator, installed_communicator
from ..communicators.queued_communicator import QueuedCommunicator, current_device
from ..communicators.stragglers import Straggler, is_slow
from ..launcher.process_state import ProcessState
from ..launcher.rendezvous import RankAddress, open_store, read_rank_address
from ..streams.host_copy import begin_host_copy
from ..torch_hooks import Store
from ..transport.background_thread import BackgroundThread
from ..transport.control_links import ConnectionClosedError, ControlLinks
from ..transport.messages import Message, Messages
from ..transport.shared_memory import Peers
from .device_choice import CPU_BACKEND, Opener, default_transport, use_device
from .flat_tensors import as_bytes
from .flight_record import Noted, NotedCall, Record
from .late_messages import LateMessages
from .retained_memory import keep_memory
from .small_calls import data_of, is_small, results_of
from .transfers import Transfers

T = TypeVar("T")

_TIME_FOR_LAST_MESSAGES = 60.0
_BETWEEN_WARNINGS, _BETWEEN_QUESTIONS = 60.0, 5.0


class ProcessCommunicator(QueuedCommunicator):
    """Communicator of one process of a run; `init_process` creates it."""

    kind = "process"

    def __init__(self, place: RankAddress, backend: str | Opener, check: Check, limit: timedelta) -> None:
        super().__init__(place.rank, place.size)
        self.local_rank = place.local_rank
        self._place = place
        self._backend = backend
        self._limit = limit
        self._store: Store = open_store(place, limit)
        self._side = BackgroundThread()
        self._caller = OneCaller()
        self._messages = Messages()
        self._guard = Guard(place.rank, check, self._messages, self._side, RankFacts(place.rank, self._store))
        self._record = Record(place)
        self._process = os.getpid()
        self._lags = True
        self._late: dict[int, LateMessages] = {}
        """Rank → the messages from it for which a stream of a device waits."""
        self._receives = CallForecast()
        self._links = ControlLinks(place, self._store, self._guard.state, self._messages.welcome)
        self._messages.connect(self._links)
        self._guard.connect(self._links)
        self._watchdog = Watchdog(self._guard, self._links, self._store, self._end_at_once)
        self._transfers = Transfers(place, self._store, backend, limit, self._peers_of)

    @property
    def replayed(self) -> frozenset[Literal["collectives", "messages"]]:
        is_on_devices = isinstance(self._backend, str) and self._backend != CPU_BACKEND
        return frozenset({"collectives"} if is_on_devices else ())

    def compare_settings(self) -> None:
        """Raise DisagreementError if rank 0 compares other calls than this rank: then one would wait for frames."""
        mine = str(self._guard.check.every)
        if self.rank == 0:
            self._store.set("check", mine)
            return
        other = self._store.get("check").decode()
        if other != mine:
            raise DisagreementError(
                f"the start of rank {self.rank}",
                f"check is {other} on rank 0 and {mine} on rank {self.rank}",
                "ranks compare the same calls of a group: every N-th one, or none for 0",
                "set MESHWRIGHT_CHECK, or init_process(check=...), to the same value on every rank",
            )

    @contextmanager
    def checking(self, check: Check | str | int) -> Generator[None]:
        """Use another check inside the block; every rank enters and leaves it at the same place."""
        before, self._guard.check = self._guard.check, _check_of(check)
        try:
            yield
        finally:
            self._guard.check = before

    def start(self, way: ConversionPlan, x: Tensor) -> PendingConversion:
        """Begin a conversion: in a separate thread on the CPU, on a communication stream on other devices."""
        if x.device.type != CPU or not way.rounds:
            return super().start(way, x)
        plain, what = x.as_subclass(Tensor), call_purpose.what

        def convert() -> Tensor:
            call_purpose.what = what
            return self.convert(way, plain)

        return self._side.begin(convert)

    def close(self) -> None:
        """Tell the other ranks that this one has ended; called at the exit of the process."""
        if os.getpid() != self._process:
            return  # in a forked process
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is None:
            self._settle_at_end()
        self._watchdog.close()
        if error is None:
            self._messages.finish(_TIME_FOR_LAST_MESSAGES)
        elif self._record.path is None:
            self._record.write(_error_text(error), self._about())
        self._links.say_farewell(None if error is None else _error_text(error))
        self._messages.close()
        self._transfers.close()

    def _settle_at_end(self) -> None:
        try:
            self._settle()
        except CommError as error:
            self._end_at_once(error)

    def _all_reduce(self, x: Tensor, call: CommCall) -> Tensor:
        return super()._all_reduce(x, call) if _has_streams(x.device) else self._moved(call, [x])[0]

    def _all_reduce_over(self, x: Tensor, call: CommCall) -> Tensor:
        return super()._all_reduce_over(x, call) if _has_streams(x.device) else self._moved(call, [x], [x])[0]

    def _all_gather(self, x: Tensor, call: CommCall) -> list[Tensor]:
        return super()._all_gather(x, call) if _has_streams(x.device) else [*self._moved(call, [x])]

    def _reduce_scatter(self, pieces: Sequence[Tensor], call: CommCall) -> Tensor:
        queued = _has_streams(pieces[0].device)
        return super()._reduce_scatter(pieces, call) if queued else self._moved(call, pieces)[0]

    def _all_to_all(self, pieces: Sequence[Tensor], call: CommCall) -> list[Tensor]:
        queued = _has_streams(pieces[0].device)
        return super()._all_to_all(pieces, call) if queued else [*self._moved(call, pieces)]

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], call: CommCall
    ) -> list[Tensor]:
        if _has_streams(self._device_of_exchange([x.device for _, x in sends] + [each[-1] for each in receives])):
            return super()._exchange(sends, receives, call)
        return self._carried(call, lambda: self._transfers.post(sends, receives, call.group))

    def _device_of_exchange(self, devices: Sequence[torch.device]) -> torch.device:
        """Return the device of an exchange. A member without messages takes part on the device of its transport."""
        return devices[0] if devices else torch.device(CPU) if self._backend == CPU_BACKEND else current_device()

    def _call_into(self, call: CommCall, sends: Sequence[Tensor], out: Sequence[Tensor]) -> list[Tensor]:
        if _has_streams(self._device_of_exchange([x.device for x in (*sends, *out)])):
            return super()._call_into(call, sends, out)
        return Communicator._call_into(self, call, sends, out)

    def _queue(self, call: CommCall, sends: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Write the results of a collective to `out`, on the current stream; in place if the transport can do it."""
        found = self._moved(call, sends, out)
        for target, result in zip(out, found, strict=True):
            if result is not target:
                target.copy_(result)

    def _send(self, x: Tensor, call: CommCall) -> None:
        self._guard.meetings.raise_failed()
        message = self._message_with(x, call)
        with self._noted(call):
            try:
                self._messages.send(call.message[0], call.tag, message, self._limit.total_seconds())
            except ConnectionClosedError:
                raise self._guard.examiner.gone(call, call.message[0]) from None

    def _message_with(self, x: Tensor, call: CommCall) -> Message:
        """Return the message with the values of `x`; on a device with streams, a thread waits for them."""
        if not _has_streams(x.device):
            return Message(str(call), as_bytes(x).cpu())
        return Message(str(call), *begin_host_copy(as_bytes(x), self.streams, f"messages to {call.message[0]}"))

    def _receive(self, call: CommCall, device: torch.device) -> Tensor:
        self._guard.meetings.raise_failed()
        _, shape, dtype = call.message
        noted = self._noted(call)
        late = self._late_messages(call, device)
        if late is not None and self._receives.expects(hash(call)) and self._lags:
            out = torch.empty(shape, dtype=dtype, device=device)
            late.queue(out, lambda: self._message_of(call, noted, is_late=True))
            return out
        self._await_late(call.message[0])  # earlier messages may have the same tag
        data = self._message_of(call, noted)
        if _has_streams(device) and platform_of(device).pins_memory:
            data = data.pin_memory()
        return data.view(dtype).view(shape).to(device, non_blocking=True)

    def _late_messages(self, call: CommCall, device: torch.device) -> LateMessages | None:
        """Return the messages that a stream of the device waits for; None if no stream can wait for the host."""
        platform, peer = platform_of(device), call.message[0]
        if platform.signal is None or not (_has_streams(device) and platform.pins_memory):
            return None
        found = self._late.get(peer)
        if found is None or found.device != device:
            self._await_late(peer)
            signal, fail = platform.signal(device), self._guard.meetings.fail
            if signal is None:
                return None
            found = self._late[peer] = LateMessages(peer, device, signal, self.streams, fail)
        return found

    def _await_late(self, *peers: int) -> None:
        """Wait until the threads have received all messages from these ranks, or have failed to."""
        late = [self._late[peer] for peer in peers if peer in self._late]
        with self._guard.awaiting_late(peers):
            for each in late:
                each.drain()

    def _message_of(self, call: CommCall, noted: NotedCall, is_late: bool = False) -> Tensor:
        """Wait for the message of a receive, and return its bytes."""
        with noted:
            sent, data, _ = self._guard.wait_for_message(call, self._limit.total_seconds(), is_late)
            check_message(call, self.rank, sent)
        return data

    def _moved(self, call: CommCall, sends: Sequence[Tensor], out: Sequence[Tensor] = ()) -> Sequence[Tensor]:
        """Return the results of a collective, which are the tensors `out` themselves if they can be written to."""
        first = sends[0] if sends else None
        if first is None or not self._is_small(call, first.device):
            return self._carried(call, lambda: self._transfers.results(call, sends, out), first)
        return self._swapped(call, data_of(first), lambda found: results_of(call, found, first.device))

    def _is_small(self, call: CommCall, device: torch.device) -> bool:
        """True if the data of a call travels in the frames that compare it, and through the memory of the host."""
        through_host = self._transfers.backend_for(device) == CPU_BACKEND
        return self._guard.check.every == 1 and through_host and is_small(call)

    def _swapped(self, call: CommCall, data: bytes, result: Callable[[list[bytes]], T]) -> T:
        """Return the result of a call for the data of every rank, which travels in the frames that compare the call."""
        return self._in_turn(call, lambda: self._swapped_in_turn(call, data, result))

    def _swapped_in_turn(self, call: CommCall, data: bytes, result: Callable[[list[bytes]], T]) -> T:
        with self._noted(call) as noted:
            found = self._guard.swap(call, data)
            noted.agreed = time.time()
            try:
                return result(found)
            except RuntimeError as error:
                raise self._guard.explain(call, error) from error

    def _barrier(self, call: CommCall) -> None:
        if self._is_small(call, torch.device(CPU)):
            self._swapped(call, b"", len)
            return
        self._carried(call, lambda: self._transfers.open(CPU_BACKEND, call.group).barrier())

    def any_true(self, flag: bool, group: Group) -> bool:
        self._check_group(group)
        if len(group) == 1 or self._guard.check.every != 1:
            return super().any_true(flag, group)
        call = CommCall("any_true", "", None, (), (), group)
        with self.seen.note(call, 0):
            return self._swapped(call, bytes([flag]), lambda flags: any(map(any, flags)))

    def settle(self) -> None:
        try:
            self._settle()
        except CommError as error:
            self._record.name_in(error, self._about())
            raise

    def _settle(self) -> None:
        self._await_late(*self._late)
        self._guard.meetings.settle()

    @contextmanager
    def comparing_first(self) -> Generator[None]:
        before, self._lags = self._lags, False
        try:
            yield
        finally:
            self._lags = before

    def _is_queued(self, x: Tensor) -> bool:
        """True if a call with `x` is only queued on its device."""
        return x.device.type != "cpu" and self._backend != CPU_BACKEND

    def _carried(self, call: CommCall, carry: Callable[[], T], x: Tensor | None = None) -> T:
        """Run `carry()` once all ranks of the call are about to make it; at once if the call of `x` is queued."""
        return self._in_turn(call, lambda: self._carried_in_turn(call, carry, x))

    def _in_turn(self, call: CommCall, run: Callable[[], T]) -> T:
        """Return `run()`. Conversions in the background finish before, and no other thread makes a call meanwhile."""
        self._side.drain()
        self._caller.begin(call)
        try:
            return run()
        finally:
            self._caller.end()

    def _carried_in_turn(self, call: CommCall, carry: Callable[[], T], x: Tensor | None) -> T:
        with self._noted(call) as noted:
            self._guard.before(call, lags=self._lags and x is not None and self._is_queued(x))
            noted.agreed = None if self._guard.is_behind else time.time()
            self._watchdog.begin(call)
            try:
                found = carry()
                self._guard.moved(call)
                noted.agreed = noted.agreed or time.time()
                return found
            except MeshwrightError:
                raise
            except (RuntimeError, OSError) as error:
                raise self._guard.explain(call, error) from error
            finally:
                self._watchdog.end()
                self._guard.after()

    def _peers_of(self, group: Group) -> Peers:
        return Peers(self._watchdog.check, lambda place: self._links.life(group[place]) is ProcessState.GONE)

    def _noted(self, call: CommCall) -> NotedCall:
        """Return a context for a call, which is added to the record. The record is written if the call fails."""
        return NotedCall(self._record.begin(call), self._ended)

    def _ended(self, noted: Noted, error: BaseException | None) -> None:
        """Complete the record of a call."""
        if isinstance(error, CommError):
            self._record.name_in(error, self._about())
        if error is not None:
            return
        noted.ended = time.time()
        if self._guard.waits.is_suspicious():
            self._warn_of_stragglers()

    def _about(self) -> dict[str, Any]:
        """Return the entries of the record beside the calls."""
        peers = self._guard.waits.by_peer().values()
        return {"state": str(self._guard.state()), "waits": {each.rank: round(each.share, 4) for each in peers}}

    def has_ended(self, rank: int) -> bool:
        with suppress(RuntimeError):  # the store has ended before this rank needed the address
            return self._links.life(rank) is ProcessState.GONE
        return False

    def stragglers(self) -> list[Straggler]:
        """Return the ranks that this rank waits for although they wait for nobody; the slowest first."""
        return self._guard.waits.stragglers(self._waiting_share)

    def _waiting_share(self, peer: int) -> float | None:
        state = self._links.ask(peer)
        return None if state is None or state.silence else state.waits

    def _warn_of_stragglers(self) -> None:
        found = [each for each in self.stragglers() if is_slow(each)]
        self._guard.waits.warned(_BETWEEN_WARNINGS if found else _BETWEEN_QUESTIONS)
        if found:
            text = "; ".join(map(str, found))
            warn_user(f"rank {self.rank} waits for slower ranks: {text}", StragglerWarning)

    def _end_at_once(self, error: CommError) -> None:
        """End the process, whose call cannot be interrupted; runs in the watchdog's thread."""
        self._record.name_in(error, self._about())
        print(f"meshwright: rank {self.rank} ends with an error:\n{error}", file=sys.stderr, flush=True)
        self._links.say_farewell(f"{type(error).__name__}: {error.found}")
        os._exit(1)


def init_process(
    backend: str | None = None,
    check: Check | str | int | None = None,
    transfer_limit: float = 1800.0,
    place: RankAddress | None = None,
) -> Communicator:
    """Return the communicator of this process, and install it for all its threads; reads the launcher's variables.

    Under `simulate` or `meshwright run`, returns the existing communicator and ignores the arguments. A process that
    was started alone, as by `python script.py`, is the only rank.

    Args:
        backend: name of a backend of `torch.distributed` for tensors that are not on the CPU; by default the transport
            of the accelerator's platform.
        check: "every", "off", a number N (every N-th call of a group) or a `Check`; by default MESHWRIGHT_CHECK.
        transfer_limit: seconds that one transfer may take once all its ranks have agreed on it.
        place: rank, size and addresses; by default those of the environment.

    Raises:
        LaunchError: the process can see several devices, and its local rank is none of them.
    """
    there = installed_communicator()
    if there is not None:
        return there
    check = Check.from_environment() if check is None else _check_of(check)
    transport = backend or default_transport()
    place = place or read_rank_address()
    use_device(place.local_rank, may_share=transport == CPU_BACKEND)
    keep_memory()
    communicator = ProcessCommunicator(place, transport, check, timedelta(seconds=transfer_limit))
    install_communicator(communicator)
    atexit.register(communicator.close)
    communicator.compare_settings()
    if place.size > 1 and check.every:
        calls_are_compared()
    return communicator


def stragglers() -> list[Straggler]:
    """Return the ranks that are slower than this one, the slowest first, from the waits of the last seconds.

    A `Straggler` has the `rank`, the `share` of this rank's time that it costs, and the mean `wait` in seconds. Each
    rank may call this at any time, and alone. The list is empty in the first seconds, if ranks are slow in turns, and
    on simulated ranks. A `StragglerWarning` reports the same, at most once a minute, if a rank costs a fifth of the
    time.
    """
    return current_communicator().stragglers()


def _error_text(error: BaseException) -> str:
    """Return the text of an error, and the line of the user's code that raised it."""
    at = user_place(error.__traceback__)
    return f"{type(error).__name__}: {str(error)[:300]}" + (f", at {at}" if at else "")


def _check_of(check: Check | str | int) -> Check:
    return check if isinstance(check, Check) else Check.parse(check)


def _has_streams(device: torch.device) -> bool:
    return device.type != CPU and platform_of(device).has_streams
