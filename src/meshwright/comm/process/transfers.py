"""The movement of a collective's data by the transports of its group.

If a transport does not reduce a dtype exactly, the data is moved as bytes and reduced here, in the order of the group.
Gloo loses NaN in max and min, and does not support int16, float8, or the product of complex numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import sha1

import torch
from torch import Tensor

from meshwright.layout import CPU, PlacedMessage, Transport, TransportGroup, check_transport_methods, platform_of

from ..communicators.call import CommCall, Group, Shape
from ..communicators.communicator import Receive, contiguous_copy
from ..communicators.reductions import reduce_terms
from ..launcher.rendezvous import RankAddress
from ..torch_hooks import PrefixStore, Store, another_connection, open_backend
from ..transport.direct_exchange import DirectExchange
from ..transport.host_transport import HostTransport
from ..transport.shared_memory import Peers, SharedMemoryTransport, contiguous_values, open_shared
from .device_choice import CPU_BACKEND, Opener
from .flat_tensors import as_bytes, flat, flat_joined, joint_bytes, numel, unpacked

_AS_SUM, _AS_BYTES = "avg", {"any": "max", "all": "min"}


class Transfers:
    """The transports of a process, and collectives by them. A group opens its transport at its first call."""

    def __init__(
        self,
        place: RankAddress,
        store: Store,
        backend: str | Opener,
        limit: timedelta,
        peers_of: Callable[[Group], Peers],
    ) -> None:
        self._place, self._rank = place, place.rank
        self._store, self._backend, self._limit = store, backend, limit
        self._peers_of = peers_of
        self._opened: dict[tuple[str | Opener, Group], Transport] = {}

    def close(self) -> None:
        """Drop the transports. Their threads end here; at the interpreter's end they would abort the process."""
        self._opened.clear()

    def results(self, call: CommCall, sends: Sequence[Tensor], out: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results of a collective, which are the tensors `out` themselves if they can be written to."""
        into = out[0] if out and out[0].is_contiguous() else None
        if call.kind == "all_reduce":
            return [self.reduce_all(sends[0], call, into)]
        if call.kind == "all_gather":
            return self.gather(sends[0], call.receives, call.group, out)
        if call.kind == "reduce_scatter":
            return [self.scatter(sends, call, into)]
        if call.kind == "all_to_all":
            return self.swap(sends, call.receives, call.group)
        sent = [(peer, x) for (peer, *_), x in zip(call.messages[0], sends, strict=True)]
        return self.post(sent, [(*each, x.device) for each, x in zip(call.messages[1], out, strict=True)], call.group)

    def reduce_all(self, x: Tensor, call: CommCall, into: Tensor | None) -> Tensor:
        """Return the reduction of every rank's `x`, in the memory of `into` if possible."""
        op = "sum" if call.op == _AS_SUM else call.op
        if op in _AS_BYTES and self._is_exact(_AS_BYTES[op], torch.uint8, x.device, call.group):
            flags = (x != 0).to(torch.uint8)
            return self._total(flags, _AS_BYTES[op], call.group, into=flags).to(x.dtype)
        if not self._is_exact(op, x.dtype, x.device, call.group):
            shapes = (tuple(x.shape),) * len(call.group)
            return reduce_terms(self.gather(x, shapes, call.group), call.op)
        total = self._total(x, op, call.group, into)
        return total.div_(len(call.group)) if call.op == _AS_SUM else total

    def _is_exact(self, op: str, dtype: torch.dtype, device: torch.device, group: Group) -> bool:
        """True if the transport's own reduction is exact. Complex numbers are summed as pairs of reals."""
        backend = self.backend_for(device)
        if isinstance(self.open(backend, group), SharedMemoryTransport):
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

    def gather(self, x: Tensor, shapes: Sequence[Shape], group: Group, into: Sequence[Tensor] = ()) -> list[Tensor]:
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
        sends = [(peer, x) for peer in group if peer != self._rank]
        receives = [(peer, s, x.dtype, x.device) for peer, s in zip(group, shapes, strict=True) if peer != self._rank]
        arrived = iter(self.post(sends, receives, group))
        return [contiguous_copy(x) if peer == self._rank else next(arrived) for peer in group]

    def _gather_from_one(self, x: Tensor, shapes: Sequence[Shape], group: Group, owner: int) -> list[Tensor]:
        """Return every rank's part, where all parts are empty but that of the rank at place `owner`."""
        parts = [x.new_empty(shape) for shape in shapes]
        if group[owner] == self._rank:
            parts[owner] = contiguous_copy(x)
        self._open_for(x.device, group).broadcast(parts[owner].view(-1).view(torch.uint8), owner)
        return parts

    def scatter(self, pieces: Sequence[Tensor], call: CommCall, into: Tensor | None = None) -> Tensor:
        shape, dtype = call.receives[0], pieces[0].dtype
        even = all(sent == shape for sent in call.sends)
        device, is_sum = pieces[0].device, call.op in ("sum", _AS_SUM)
        if not (even and is_sum and self._is_exact("sum", dtype, device, call.group)):
            return reduce_terms(self.swap(pieces, (shape,) * len(call.group), call.group), call.op)
        packed = flat_joined([contiguous_values(piece).view(-1) for piece in pieces])
        out = packed.new_empty(shape) if into is None else into
        self._open_for(device, call.group).reduce_scatter(flat(out, "sum"), flat(packed, "sum"))
        return out.div_(len(call.group)) if call.op == _AS_SUM else out

    def swap(self, pieces: Sequence[Tensor], shapes: Sequence[Shape], group: Group) -> list[Tensor]:
        flat = [as_bytes(piece) for piece in pieces]
        dtype = pieces[0].dtype
        arriving = [numel(shape) * dtype.itemsize for shape in shapes]
        out = flat[0].new_empty(sum(arriving))
        self._open_for(out.device, group).all_to_all(out, torch.cat(flat), arriving, [data.numel() for data in flat])
        return unpacked(out, arriving, shapes, dtype)

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], group: Group) -> list[Tensor]:
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
            transport = self.open(self._backend, group) if device is None else self._open_for(device, group)
            transport.exchange(leaving, awaited)
        return out

    def _to_itself(self, messages: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Return the messages of this rank to itself."""
        return [x for peer, x in messages if peer == self._rank]

    def _tagged(self, messages: Sequence[tuple[int, Tensor]], group: Group) -> list[PlacedMessage]:
        """Return (place in the group, number of earlier messages with that peer, bytes) of the messages that travel."""
        counts: dict[int, int] = {}
        found: list[PlacedMessage] = []
        for peer, x in messages:
            if peer == self._rank or x.numel() == 0:
                continue
            tag = counts[peer] = counts.get(peer, -1) + 1
            found.append((group.index(peer), tag, as_bytes(x)))
        return found

    def _open_for(self, device: torch.device, group: Group) -> Transport:
        backend = self.backend_for(device)
        found = self.open(backend, group)
        return HostTransport(found) if device.type != CPU and backend == CPU_BACKEND else found

    def backend_for(self, device: torch.device) -> str | Opener:
        return CPU_BACKEND if device.type == CPU else self._backend

    def open(self, backend: str | Opener, group: Group) -> Transport:
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
        place, size = group.index(self._rank), len(group)
        if not isinstance(backend, str):
            opened = backend(TransportGroup(place, size, store, self._limit))
            check_transport_methods(opened)
            return opened
        is_for_cpu = backend == CPU_BACKEND
        if is_for_cpu:
            shared = open_shared(store, place, size, self._limit, self._peers_of(group))
            if shared is not None:
                return shared
        opened = open_backend(backend, store, place, size, self._limit, self._place.loopback)
        return DirectExchange(opened, place, size) if is_for_cpu else opened
