"""Communicator of simulated ranks whose tensors are on test devices: every call is queued on a communication stream.

It shows how a transport plugs into `meshwright.comm`: `QueuedCommunicator` chooses the streams, allocates the results
and makes the streams wait, and this class queues transfers of the [transport](transport.py) on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.comm.communicators.call import CommCall
from meshwright.comm.communicators.communicator import contiguous_copy
from meshwright.comm.communicators.current_communicator import using_communicator
from meshwright.comm.communicators.queued_communicator import QueuedCommunicator
from meshwright.comm.communicators.reductions import reduce_terms
from meshwright.comm.simulation.simulated_ranks import SimulatedCommunicator

from .backend import register
from .transport import Move, Transport


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


class DeviceCommunicator(QueuedCommunicator):
    """Communicator of one simulated rank with tensors on its device."""

    kind = "device"

    def __init__(self, inner: SimulatedCommunicator, latency: float, bandwidth: float) -> None:
        super().__init__(inner.rank, inner.size)
        self.inner, self.seen = inner, inner.seen
        self.transport = _shared_transport(inner, latency, bandwidth)

    @property
    def replayed(self) -> frozenset[Literal["collectives", "messages"]]:
        return frozenset({"collectives", "messages"})

    def _queue(self, call: CommCall, sends: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        if any(x.device.type == "cpu" for x in (*sends, *out)):
            self.inner._call_into(call, sends, out)
            return
        self.transport.collective(call, self.rank, torch.accelerator.current_stream(), sends, out, _MOVES[call.kind])

    def _send(self, x: Tensor, call: CommCall) -> None:
        """Queue a message with a copy of `x`, which the caller may overwrite."""
        if x.device.type == "cpu":
            self.inner._send(x, call)
            return
        peer = call.message[0]
        name = f"messages to {peer}"
        with self.streams.between_waits(x.device, name, "send"):
            copy = contiguous_copy(x)
        self.transport.send(self.rank, peer, call.tag, self.streams.stream(x.device, name), copy)

    def _receive(self, call: CommCall, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self.inner._receive(call, device)
        peer, shape, dtype = call.message
        out = torch.empty(shape, dtype=dtype, device=device)
        with self.streams.between_waits(out.device, f"messages from {peer}", "receive"):
            self.transport.receive(self.rank, peer, call.tag, torch.accelerator.current_stream(), out)
        return out

    def _barrier(self, call: CommCall) -> None:
        self.inner._barrier(call)


Calls = Mapping[int, CommCall]
Tensors = Mapping[int, Sequence[Tensor]]


def _all_reduced(calls: Calls, sent: Tensors) -> Tensors:
    group, op = _group(calls), next(iter(calls.values())).op
    total = reduce_terms([sent[rank][0] for rank in group], op)
    return {rank: [total] for rank in group}


def _gathered(calls: Calls, sent: Tensors) -> Tensors:
    return {rank: [sent[peer][0] for peer in _group(calls)] for rank in calls}


def _scattered(calls: Calls, sent: Tensors) -> Tensors:
    group = _group(calls)
    columns = {rank: [sent[peer][place] for peer in group] for place, rank in enumerate(group)}
    return {rank: [reduce_terms(terms, calls[rank].op)] for rank, terms in columns.items()}


def _swapped(calls: Calls, sent: Tensors) -> Tensors:
    group = _group(calls)
    return {rank: [sent[peer][place] for peer in group] for place, rank in enumerate(group)}


def _exchanged(calls: Calls, sent: Tensors) -> Tensors:
    leaving = {rank: list(zip(call.messages[0], sent[rank], strict=True)) for rank, call in calls.items()}
    found: dict[int, list[Tensor]] = {}
    for rank, call in calls.items():
        queues = {peer: iter([x for (to, *_), x in leaving[peer] if to == rank]) for peer in call.group}
        found[rank] = [next(queues[source]) for source, _, _ in call.messages[1]]
    return found


def _group(calls: Calls) -> tuple[int, ...]:
    return next(iter(calls.values())).group


_MOVES: Mapping[str, Move] = {
    "all_reduce": _all_reduced,
    "all_gather": _gathered,
    "reduce_scatter": _scattered,
    "all_to_all": _swapped,
    "exchange": _exchanged,
}


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
        with using_communicator(DeviceCommunicator(inner, latency, bandwidth)):
            result = program(torch.device("mesh", inner.rank))
            torch.accelerator.synchronize(inner.rank)
        return result

    return run
