"""Gloo, with a direct exchange between all ranks where that is faster than Gloo's own collectives.

Gloo passes parts of a tensor around a ring of the ranks, in rounds that wait for each other. In a direct exchange every
rank sends to all others at once. Terms are combined in the order of the group, so all ranks get the same bits, which
are those of simulated ranks too. `python -m benchmarks all_reduce` with MESHWRIGHT_SHARED_MEMORY=off prints the times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..communicators.reductions import reduce_into
from ..torch_hooks import Backend

_MOST = 2**20
"""Upper bound on the bytes that a rank sends directly. In a ring a rank sends fewer bytes of a larger tensor."""


class DirectExchange:
    """Transport of one group of ranks over a backend with messages; `place` is this rank's place in the group."""

    def __init__(self, backend: Backend, place: int, size: int) -> None:
        self._backend, self._place = backend, place
        self._all = range(size)
        self._others = [other for other in self._all if other != place]
        self.all_to_all, self.broadcast = backend.all_to_all, backend.broadcast
        self.exchange, self.barrier = backend.exchange, backend.barrier

    def all_reduce(self, out: Tensor, x: Tensor, op: str) -> None:
        """Write the reduction of every rank's `x` to `out`, which is `x` itself or has other memory."""
        if not self._is_direct(x):
            self._backend.all_reduce(out, x, op)
            return
        terms = [x if at == self._place else torch.empty_like(x) for at in self._all]
        self._swap([x] * len(terms), terms)
        if out is not x or self._place == 0:
            reduce_into(out, terms, op)
            return
        reduce_into(terms[0], terms, op)  # not to `out`, which is a later term
        out.copy_(terms[0])

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Write every rank's flat `x` to `out`, one after the other."""
        if not self._is_direct(x):
            self._backend.all_gather(out, x)
            return
        rows = out.view(len(self._all), -1).unbind()
        rows[self._place].copy_(x)
        self._swap([x] * len(rows), rows)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """Write the sum over the group of the caller's part of the flat `x` to `out`."""
        if not self._is_direct(out):
            self._backend.reduce_scatter(out, x)
            return
        parts = x.view(len(self._all), -1).unbind()
        terms = [parts[at] if at == self._place else torch.empty_like(out) for at in self._all]
        self._swap(parts, terms)
        reduce_into(out, terms, "sum")

    def _is_direct(self, x: Tensor) -> bool:
        return 0 < x.nbytes * len(self._others) <= _MOST

    def _swap(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Send `sends[i]` to rank i, and receive `receives[i]` from it."""
        leaving = [(other, 0, sends[other]) for other in self._others]
        self._backend.exchange(leaving, [(other, 0, receives[other]) for other in self._others])
