"""Communicators that queue their collectives on communication streams, so that nothing waits on the host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.layout import accelerators_in_use, platform_of
from meshwright.reshard import ConversionPlan, prepare

from ..streams.communication_streams import COLLECTIVES, CommunicationStreams
from ..streams.stream_times import StreamTimes
from ..streams.ticket import Ticket
from .call import CommCall
from .communicator import Communicator, PendingConversion, Receive


class QueuedCommunicator(Communicator):
    """Communicator of one rank that queues its collectives on a communication stream.

    All collectives of a device run on one such stream. The stream that is current when a collective is called allocates
    its results. A subclass queues each collective on the current stream (`_queue`); this class makes the communication
    stream current, and makes the streams wait for each other. On a device without streams, nothing is queued.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.streams = CommunicationStreams()

    @contextmanager
    def timing_streams(self) -> Generator[StreamTimes | None]:
        if not accelerators_in_use() or not platform_of(current_device()).has_streams:
            yield None
            return
        self.streams.times = StreamTimes(current_device())
        try:
            yield self.streams.times
        finally:
            self.streams.times = None

    def start(self, way: ConversionPlan, x: Tensor) -> PendingConversion:
        """Queue a conversion; `wait()` of the result makes the current stream wait for it, and the host never."""
        ready = prepare(way, x, self) if platform_of(x.device).has_streams else None
        if ready is None:
            return super().start(way, x)
        where = f"a started {ready.kind}"
        here = torch.accelerator.current_stream(x.device)
        with self.streams.after_current(x.device, COLLECTIVES, where) as done:
            ready.call()
        return Ticket(done, here, [ready.x, *ready.operands, *ready.results], ready.finish, where)

    @abstractmethod
    def _queue(self, call: CommCall, sends: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Queue a collective, which writes its results to `out`, on the current stream.

        If the tensors are on a device without streams, the results are complete when this returns.
        """

    def _call_into(self, call: CommCall, sends: Sequence[Tensor], out: Sequence[Tensor]) -> list[Tensor]:
        device = next((x.device for x in (*sends, *out)), None) or current_device()
        if platform_of(device).has_streams:
            with self.streams.between_waits(device, COLLECTIVES, call.kind):
                self._queue(call, sends, out)
        else:
            self._queue(call, sends, out)
        return list(out)

    def _in_new_memory(self, call: CommCall, sends: Sequence[Tensor]) -> list[Tensor]:
        out = [torch.empty(shape, dtype=call.dtype, device=sends[0].device) for shape in call.receives]
        return self._call_into(call, sends, out)

    def _all_reduce(self, x: Tensor, call: CommCall) -> Tensor:
        return self._in_new_memory(call, [x])[0]

    def _all_reduce_over(self, x: Tensor, call: CommCall) -> Tensor:
        return self._call_into(call, [x], [x])[0] if x.is_contiguous() else self._all_reduce(x, call)

    def _all_gather(self, x: Tensor, call: CommCall) -> list[Tensor]:
        shapes = set(call.receives)
        if len(shapes) > 1:
            return self._in_new_memory(call, [x])
        rows = torch.empty((len(call.group), *shapes.pop()), dtype=call.dtype, device=x.device)  # one after the other
        return self._call_into(call, [x], rows.unbind())

    def _reduce_scatter(self, pieces: Sequence[Tensor], call: CommCall) -> Tensor:
        return self._in_new_memory(call, pieces)[0]

    def _all_to_all(self, pieces: Sequence[Tensor], call: CommCall) -> list[Tensor]:
        return self._in_new_memory(call, pieces)

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], call: CommCall
    ) -> list[Tensor]:
        out = [torch.empty(tuple(shape), dtype=dtype, device=device) for _, shape, dtype, device in receives]
        return self._call_into(call, [x for _, x in sends], out)


def current_device() -> torch.device:
    """Return the device of a member of an exchange that sends and receives nothing."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.device(device.type, torch.accelerator.current_device_index())
