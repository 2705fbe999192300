"""Communicator with one process per rank, over shared memory or Gloo on the CPU, or the platform's transport.

On a device with streams, collectives are queued on a communication stream (`QueuedCommunicator`), and the host waits
for none of them.

Tensors on the CPU use shared memory if all ranks of the group are on one host, and Gloo otherwise. If every call is
compared, the data of small collectives travels with the comparison instead (`small_calls.py`). Messages use their own
connections, between the memories of the hosts, and are copied from and to other devices: NCCL has no tags, and its
senders wait for their receivers. With Gloo as backend, collectives of tensors on a device are copied in the same way.

If a transport does not reduce a dtype exactly, the data is moved as bytes and reduced here, in the order of the group.
Gloo loses NaN in max and min, and does not support int16, float8, or the product of complex numbers.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha1
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from meshwright.layout import (
    CPU,
    MeshwrightError,
    PlacedMessage,
    Transport,
    TransportGroup,
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
from ..communicators.call import CommCall, Group, Shape
from ..communicators.call_purpose import call_purpose, calls_are_compared
from ..communicators.communicator import Communicator, PendingConversion, Receive, check_message, contiguous_copy
from ..communicators.current_communicator import current_communicator, install_communicator, installed_communicator
from ..communicators.queued_communicator import QueuedCommunicator, current_device
from ..communicators.reductions import reduce_terms
from ..communicators.stragglers import Straggler, is_slow
from ..launcher.process_state import ProcessState
from ..launcher.rendezvous import RankAddress, open_store, read_rank_address
from ..streams.host_copy import begin_host_copy
from ..torch_hooks import PrefixStore, Store, another_connection, open_backend
from ..transport.background_thread import BackgroundThread
from ..transport.control_links import ConnectionClosedError, ControlLinks
from ..transport.direct_exchange import DirectExchange
from ..transport.host_transport import HostTransport
from ..transport.messages import Message, Messages
from ..transport.shared_memory import Peers, SharedMemoryTransport, contiguous_values, open_shared
from .device_choice import CPU_BACKEND, Opener, default_transport, use_device
from .flat_tensors import as_bytes, flat, flat_joined, joint_bytes, numel, unpacked
from .flight_record import Noted, NotedCall, Record
from .late_messages import LateMessages
from .retained_memory import keep_memory
from .small_calls import data_of, is_small, results_of

T = TypeVar("T")

_AS_SUM, _AS_BYTES = "avg", {"any": "max", "all": "min"}
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
        self._opened: dict[tuple[str | Opener, Group], Transport] = {}
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
        self._opened.clear()  # their threads end here; at the interpreter's end they would abort the process

    def _settle_at_end(self) -> None:
        try:
            self._settle()
        except CommError as error:
            self._end_at_once(error)

    def _all_reduce(self, x: Tensor, call: CommCall) -> Tensor:
        if _has_streams(x.device):
            return super()._all_reduce(x, call)
        if self._is_small(call, x.device):
            return self._in_frames(call, x)[0]
        return self._carried(call, lambda: self._reduce_all(x, call, None), x)

    def _all_reduce_over(self, x: Tensor, call: CommCall) -> Tensor:
        if _has_streams(x.device):
            return super()._all_reduce_over(x, call)
        if self._is_small(call, x.device):
            return self._in_frames(call, x)[0]
        return self._carried(call, lambda: self._reduce_all(x, call, x), x)

    def _all_gather(self, x: Tensor, call: CommCall) -> list[Tensor]:
        if _has_streams(x.device):
            return super()._all_gather(x, call)
        if self._is_small(call, x.device):
            return self._in_frames(call, x)
        return self._carried(call, lambda: self._gather(x, call.receives, call.group), x)

    def _reduce_scatter(self, pieces: Sequence[Tensor], call: CommCall) -> Tensor:
        if _has_streams(pieces[0].device):
            return super()._reduce_scatter(pieces, call)
        return self._carried(call, lambda: self._scatter(pieces, call), pieces[0])

    def _all_to_all(self, pieces: Sequence[Tensor], call: CommCall) -> list[Tensor]:
        if _has_streams(pieces[0].device):
            return super()._all_to_all(pieces, call)
        return self._carried(call, lambda: self._swap(pieces, call.receives, call.group), pieces[0])

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], call: CommCall
    ) -> list[Tensor]:
        if _has_streams(self._device_of_exchange([x.device for _, x in sends] + [each[-1] for each in receives])):
            return super()._exchange(sends, receives, call)
        return self._carried(call, lambda: self._post(sends, receives, call.group))

    def _device_of_exchange(self, devices: Sequence[torch.device]) -> torch.device:
        """Return the device of an exchange. A member without messages takes part on the device of its transport."""
        return devices[0] if devices else torch.device(CPU) if self._backend == CPU_BACKEND else current_device()

    def _call_into(self, call: CommCall, sends: Sequence[Tensor], out: Sequence[Tensor]) -> list[Tensor]:
        if _has_streams(self._device_of_exchange([x.device for x in (*sends, *out)])):
            return super()._call_into(call, sends, out)
        return Communicator._call_into(self, call, sends, out)

    def _queue(self, call: CommCall, sends: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Write the results of a collective to `out`, on the current stream; in place if the transport can do it."""
        first = sends[0] if sends else None
        if first is not None and self._is_small(call, first.device):
            found: Sequence[Tensor] = self._in_frames(call, first)
        else:
            found = self._carried(call, lambda: self._results(call, sends, out), first)
        for target, result in zip(out, found, strict=True):
            if result is not target:
                target.copy_(result)

    def _results(self, call: CommCall, sends: Sequence[Tensor], out: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results of a collective, which are the tensors `out` themselves if they can be written to."""
        if call.kind == "all_reduce":
            return [self._reduce_all(sends[0], call, out[0] if out[0].is_contiguous() else None)]
        if call.kind == "all_gather":
            return self._gather(sends[0], call.receives, call.group, out)
        if call.kind == "reduce_scatter":
            return [self._scatter(sends, call, out[0] if out[0].is_contiguous() else None)]
        if call.kind == "all_to_all":
            return self._swap(sends, call.receives, call.group)
        sent = [(peer, x) for (peer, *_), x in zip(call.messages[0], sends, strict=True)]
        return self._post(sent, [(*each, x.device) for each, x in zip(call.messages[1], out, strict=True)], call.group)

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

    def _is_small(self, call: CommCall, device: torch.device) -> bool:
        """True if the data of a call travels in the frames that compare it, and through the memory of the host."""
        return self._guard.check.every == 1 and is_small(call) and self._backend_for(device) == CPU_BACKEND

    def _in_frames(self, call: CommCall, x: Tensor) -> list[Tensor]:
        """Return the results of a small call, in new memory."""
        return self._swapped(call, data_of(x), lambda found: results_of(call, found, x.device))

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
        self._carried(call, lambda: self._open(CPU_BACKEND, call.group).barrier())

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

    def _reduce_all(self, x: Tensor, call: CommCall, into: Tensor | None) -> Tensor:
        """Return the reduction of every rank's `x`, in the memory of `into` if possible."""
        op = "sum" if call.op == _AS_SUM else call.op
        if op in _AS_BYTES and self._is_exact(_AS_BYTES[op], torch.uint8, x.device, call.group):
            flags = (x != 0).to(torch.uint8)
            return self._total(flags, _AS_BYTES[op], call.group, into=flags).to(x.dtype)
        if not self._is_exact(op, x.dtype, x.device, call.group):
            shapes = (tuple(x.shape),) * len(call.group)
            return reduce_terms(self._gather(x, shapes, call.group), call.op)
        total = self._total(x, op, call.group, into)
        return total.div_(len(call.group)) if call.op == _AS_SUM else total

    def _is_exact(self, op: str, dtype: torch.dtype, device: torch.device, group: Group) -> bool:
        """True if the transport's own reduction is exact. Complex numbers are summed as pairs of reals."""
        backend = self._backend_for(device)
        if isinstance(self._open(backend, group), SharedMemoryTransport):
            return True
        carried = dtype.to_real() if dtype.is_complex and op == "sum" else dtype
        reducing = torch.device(CPU) if backend == CPU_BACKEND else device
        return carried in platform_of(reducing).reductions.get(op, ())

    def _total(self, x: Tensor, op: str, group: Group, into: Tensor | None) -> Tensor:
        """Return the transport's reduction of every rank's `x`, in the memory of `into` if `x` is contiguous."""
        data = contiguous_values(x)
        new_memory = torch.empty_like(data) if data is x and into is None else into
        out = new_memory if data is x and new_memory is not None else data
        sent = flat(data, op)
        received = sent if out is data else flat(out, op)
        self._open_for(x.device, group).all_reduce(received, sent, op)
        return out

    def _gather(self, x: Tensor, shapes: Sequence[Shape], group: Group, into: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return every rank's part; the tensors `into` with the parts, if all are one after the other in memory."""
        data = as_bytes(x)
        if all(shape == shapes[0] for shape in shapes):
            joint = joint_bytes(into)
            out = data.new_empty(len(group) * data.numel()) if joint is None else joint
            self._open_for(x.device, group).all_gather(out, data)
            if joint is not None:
                return list(into)
            return [part.view(shape) for part, shape in zip(out.view(x.dtype).chunk(len(group)), shapes, strict=True)]
        owners = [place for place, shape in enumerate(shapes) if numel(shape)]
        if len(owners) == 1:
            return self._gather_from_one(x, shapes, group, owners[0])
        return self._gather_uneven(x, shapes, group)

    def _gather_uneven(self, x: Tensor, shapes: Sequence[Shape], group: Group) -> list[Tensor]:
        """Return every rank's part; the parts are sent as messages."""
        sends = [(peer, x) for peer in group if peer != self.rank]
        receives = [(peer, s, x.dtype, x.device) for peer, s in zip(group, shapes, strict=True) if peer != self.rank]
        arrived = iter(self._post(sends, receives, group))
        return [contiguous_copy(x) if peer == self.rank else next(arrived) for peer in group]

    def _gather_from_one(self, x: Tensor, shapes: Sequence[Shape], group: Group, owner: int) -> list[Tensor]:
        """Return every rank's part, where all parts are empty but that of the rank at place `owner`."""
        parts = [x.new_empty(shape) for shape in shapes]
        if group[owner] == self.rank:
            parts[owner] = contiguous_copy(x)
        self._open_for(x.device, group).broadcast(parts[owner].view(-1).view(torch.uint8), owner)
        return parts

    def _scatter(self, pieces: Sequence[Tensor], call: CommCall, into: Tensor | None = None) -> Tensor:
        shape, dtype = call.receives[0], pieces[0].dtype
        even = all(sent == shape for sent in call.sends)
        device, is_sum = pieces[0].device, call.op in ("sum", _AS_SUM)
        if not (even and is_sum and self._is_exact("sum", dtype, device, call.group)):
            return reduce_terms(self._swap(pieces, (shape,) * len(call.group), call.group), call.op)
        packed = flat_joined([contiguous_values(piece).view(-1) for piece in pieces])
        out = packed.new_empty(shape) if into is None else into
        self._open_for(device, call.group).reduce_scatter(flat(out, "sum"), flat(packed, "sum"))
        return out.div_(len(call.group)) if call.op == _AS_SUM else out

    def _swap(self, pieces: Sequence[Tensor], shapes: Sequence[Shape], group: Group) -> list[Tensor]:
        flat = [as_bytes(piece) for piece in pieces]
        dtype = pieces[0].dtype
        arriving = [numel(shape) * dtype.itemsize for shape in shapes]
        out = flat[0].new_empty(sum(arriving))
        self._open_for(out.device, group).all_to_all(out, torch.cat(flat), arriving, [data.numel() for data in flat])
        return unpacked(out, arriving, shapes, dtype)

    def _post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], group: Group) -> list[Tensor]:
        """Post all messages at once.

        The n-th message between two ranks has tag n. Empty messages and messages to itself do not travel.
        """
        out = [torch.empty(tuple(shape), dtype=dtype, device=device) for _, shape, dtype, device in receives]
        expected = [(peer, x) for (peer, *_), x in zip(receives, out, strict=True)]
        for target, source in zip(self._to_itself(expected), self._to_itself(sends), strict=True):
            target.copy_(source)
        leaving, awaited = self._tagged(sends, group), self._tagged(expected, group)
        if len(group) > 1:
            # a member whose messages are all empty opens the transport too, because the others wait for it
            device = next((x.device for _, x in (*sends, *expected)), None)
            transport = self._open(self._backend, group) if device is None else self._open_for(device, group)
            transport.exchange(leaving, awaited)
        return out

    def _to_itself(self, messages: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Return the messages of this rank to itself."""
        return [x for peer, x in messages if peer == self.rank]

    def _tagged(self, messages: Sequence[tuple[int, Tensor]], group: Group) -> list[PlacedMessage]:
        """Return (place in the group, number of earlier messages with that peer, bytes) of the messages that travel."""
        counts: dict[int, int] = {}
        found: list[PlacedMessage] = []
        for peer, x in messages:
            if peer == self.rank or x.numel() == 0:
                continue
            tag = counts[peer] = counts.get(peer, -1) + 1
            found.append((group.index(peer), tag, as_bytes(x)))
        return found

    def _peers_of(self, group: Group) -> Peers:
        return Peers(self._watchdog.check, lambda place: self._links.life(group[place]) is ProcessState.GONE)

    def _open_for(self, device: torch.device, group: Group) -> Transport:
        backend = self._backend_for(device)
        found = self._open(backend, group)
        return HostTransport(found) if device.type != CPU and backend == CPU_BACKEND else found

    def _backend_for(self, device: torch.device) -> str | Opener:
        return CPU_BACKEND if device.type == CPU else self._backend

    def _open(self, backend: str | Opener, group: Group) -> Transport:
        """Return the group's transport; its members open it on their first call."""
        found = self._opened.get((backend, group))
        if found is None:
            found = self._opened[backend, group] = self._new_transport(backend, group)
        return found

    def _new_transport(self, backend: str | Opener, group: Group) -> Transport:
        key = sha1(repr(group).encode(), usedforsecurity=False).hexdigest()
        name = backend if isinstance(backend, str) else "devices"
        # the transport blocks the connection to the store: other threads use another one
        store = PrefixStore(f"{name}/{key}", another_connection(self._store))
        place, size = group.index(self.rank), len(group)
        if not isinstance(backend, str):
            return backend(TransportGroup(place, size, store, self._limit))
        is_for_cpu = backend == CPU_BACKEND
        if is_for_cpu:
            shared = open_shared(store, place, size, self._limit, self._peers_of(group))
            if shared is not None:
                return shared
        opened = open_backend(backend, store, place, size, self._limit, self._place.loopback)
        return DirectExchange(opened, place, size) if is_for_cpu else opened


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
