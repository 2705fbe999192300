"""Communicator of simulated ranks whose tensors are on test devices: every call is queued on a communication stream.

It shows how the transport of the devices plugs into `meshwright.comm`: a call allocates its results, which have known
shapes, queues the transfer on the rank's communication stream, and lets the current stream wait for it. `start` leaves
out the wait until the result is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.comm.communicators.call import CommCall, received_bytes
from meshwright.comm.communicators.communicator import Communicator, PendingConversion, Receive
from meshwright.comm.communicators.current_communicator import using_communicator
from meshwright.comm.communicators.reductions import reduce_terms
from meshwright.comm.simulation.simulated_ranks import SimulatedCommunicator
from meshwright.reshard import ConversionPlan

from .backend import register
from .transport import Move, Transport


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A conversion that is queued on the communication stream."""

    part: Tensor
    done: torch.Event

    def wait(self) -> Tensor:
        """Let the current stream wait; the host goes on."""
        here = torch.accelerator.current_stream(self.part.device)
        here.wait_event(self.done)
        self.part.record_stream(here)
        return self.part


class _SimulatedRanks:
    """The threads of a simulation, as the transport sees them."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._waiting: set[int] = set()

    def wait(self, name: str, members: tuple[int, ...]) -> None:
        rank = current_communicator().rank
        self._waiting.add(rank)
        self._world.wait(rank, CommCall(f"queued {name}", "", None, (), (), members))

    def release_all(self) -> None:
        for rank in self._waiting:
            self._world.release(rank)
        self._waiting.clear()


def _shared_transport(inner: SimulatedCommunicator, latency: float, bandwidth: float) -> Transport:
    """Return the transport of all ranks of a simulation, which the first rank makes."""
    if "transport" not in inner.shared:
        inner.shared["transport"] = Transport(latency, bandwidth, _SimulatedRanks(inner._world))
    return inner.shared["transport"]


class DeviceCommunicator(Communicator):
    """Communicator of one simulated rank with tensors on `device`."""

    kind = "device"

    def __init__(self, inner: SimulatedCommunicator, device: int, latency: float, bandwidth: float) -> None:
        super().__init__(inner.rank, inner.size)
        self.inner, self.seen = inner, inner.seen
        self.transport = _shared_transport(inner, latency, bandwidth)
        self.stream = torch.Stream(f"mesh:{device}")

    def start(self, way: ConversionPlan, x: Tensor) -> PendingConversion:
        if not way.rounds:
            return super().start(way, x)
        here = torch.accelerator.current_stream(x.device)
        self.stream.wait_stream(here)
        with self.stream:
            part = self.convert(way, x)
        x.record_stream(self.stream)
        return _Ticket(part, self.stream.record_event())

    def _queue(self, call: CommCall, sends: Sequence[Tensor], receives: Sequence[Tensor], move: Move) -> None:
        """Queue a collective, and let the current stream wait for it."""
        self.wait_before_call(receives[0].device)
        members = tuple(sorted(call.group))
        nbytes = received_bytes(call, self.rank)
        self.transport.collective(call.kind, self.rank, members, self.stream, sends, receives, move, nbytes)
        self.wait_after_call(receives[0].device)

    def wait_before_call(self, device: torch.device) -> None:
        """Let the communication stream wait for the current one."""
        here = torch.accelerator.current_stream(device)
        if here != self.stream:
            self.stream.wait_stream(here)

    def wait_after_call(self, device: torch.device) -> None:
        """Let the current stream wait for the communication stream."""
        here = torch.accelerator.current_stream(device)
        if here != self.stream:
            here.wait_stream(self.stream)

    def _all_reduce(self, x: Tensor, call: CommCall) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)

        def move(sent: Mapping[int, Sequence[Tensor]]) -> dict[int, list[Tensor]]:
            total = reduce_terms([sent[rank][0] for rank in call.group], call.op)
            return {rank: [total] for rank in call.group}

        self._queue(call, [x], [out], move)
        return out

    def _all_gather(self, x: Tensor, call: CommCall) -> list[Tensor]:
        out = [torch.empty(shape, dtype=x.dtype, device=x.device) for shape in call.receives]
        self._queue(call, [x], out, lambda sent: {r: [sent[peer][0] for peer in call.group] for r in call.group})
        return out

    def _reduce_scatter(self, pieces: Sequence[Tensor], call: CommCall) -> Tensor:
        out = torch.empty(call.receives[0], dtype=pieces[0].dtype, device=pieces[0].device)

        def move(sent: Mapping[int, Sequence[Tensor]]) -> dict[int, list[Tensor]]:
            columns = {rank: [sent[peer][place] for peer in call.group] for place, rank in enumerate(call.group)}
            return {rank: [reduce_terms(terms, call.op)] for rank, terms in columns.items()}

        self._queue(call, pieces, [out], move)
        return out

    def _all_to_all(self, pieces: Sequence[Tensor], call: CommCall) -> list[Tensor]:
        out = [torch.empty(shape, dtype=pieces[0].dtype, device=pieces[0].device) for shape in call.receives]

        def move(sent: Mapping[int, Sequence[Tensor]]) -> dict[int, list[Tensor]]:
            return {rank: [sent[peer][place] for peer in call.group] for place, rank in enumerate(call.group)}

        self._queue(call, pieces, out, move)
        return out

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], call: CommCall
    ) -> list[Tensor]:
        """Exchange through the memory of the simulation; the transport has collectives and messages only."""
        torch.accelerator.synchronize()
        return self.inner._exchange(sends, receives, call)

    def _send(self, x: Tensor, call: CommCall) -> None:
        self.wait_before_call(x.device)
        x.record_stream(self.stream)
        self.transport.send(self.rank, call.message[0], call.tag, self.stream, x)

    def _receive(self, call: CommCall, device: torch.device) -> Tensor:
        peer, shape, dtype = call.message
        out = torch.empty(shape, dtype=dtype, device=device)
        self.wait_before_call(out.device)
        self.transport.receive(self.rank, peer, call.tag, self.stream, out)
        self.wait_after_call(out.device)
        return out

    def _barrier(self, call: CommCall) -> None:
        self.inner._barrier(call)


def run_on_devices(program: Callable[[torch.device], Any], latency: float = 1e-5, bandwidth: float = 1e11) -> Any:
    """Return a function for `simulate` that calls `program(device)`.

    Each rank has the device of its number, and a communicator that queues its calls there.
    """

    def run() -> Any:
        inner = current_communicator()
        assert isinstance(inner, SimulatedCommunicator)
        core = register()
        core.set_host(inner.rank + 1)
        core.exchange_device(inner.rank)
        with using_communicator(DeviceCommunicator(inner, inner.rank, latency, bandwidth)):
            result = program(torch.device("mesh", inner.rank))
            torch.accelerator.synchronize(inner.rank)
        return result

    return run
