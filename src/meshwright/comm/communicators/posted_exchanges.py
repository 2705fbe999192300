"""Exchanges as messages, for ranks of a group that make them at different times and in different orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .._errors import CallError
from .call import CommCall, Group
from .communicator import Communicator, Receive
from .current_communicator import using_in_all_threads

_FIRST, _MOST, _STRIDE = 2**30, 2**16, 2**14
"""The first tag (above the tags of other messages), the number of pieces of work, and the messages per peer of each."""


class PostedCommunicator(Communicator):
    """Communicator `inner` with exchanges that send without waiting, and wait only for the messages that they receive.

    An exchange belongs to a numbered piece of work (`during`). Ranks may do the pieces of work in any order. Within one
    piece, all ranks make the same exchanges in the same order. All other calls are those of `inner`.
    """

    kind = "posted"

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.size)
        self.inner, self.seen = inner, inner.seen
        self._work = 0
        self._counts: Counter[tuple[str, int]] = Counter()

    @contextmanager
    def during(self, work: int) -> Generator[None]:
        """Use this communicator inside the block, for the piece of work with this number.

        Raises:
            CallError: the number does not fit into a tag.
        """
        if not 0 <= work < _MOST:
            raise CallError(
                f"messages of piece of work {work}",
                f"a number that is not in 0 to {_MOST - 1}",
                "tags have 31 bits",
                "use fewer pieces of work",
            )
        self._work = work
        self._counts.clear()
        with using_in_all_threads(self):
            yield

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[Receive],
        group: Group,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        for peer, x in sends:
            self.inner.send(x, peer, self._tag("to", peer))
        arrived = [
            self.inner.receive(peer, self._tag("from", peer), shape, dtype, device)
            for peer, shape, dtype, device in receives
        ]
        return arrived if out is None else [each.copy_(x) for each, x in zip(out, arrived, strict=True)]

    def _tag(self, way: str, peer: int) -> int:
        number = self._counts[way, peer]
        self._counts[way, peer] += 1
        if number >= _STRIDE:
            raise CallError(
                f"a message {way} rank {peer}",
                f"{number} earlier messages",
                "one piece of work has no more tags",
                "send fewer values from stage to stage",
            )
        return _FIRST + self._work * _STRIDE + number

    def _all_reduce(self, x: Tensor, call: CommCall) -> Tensor:
        return self.inner._all_reduce(x, call)

    def _all_reduce_over(self, x: Tensor, call: CommCall) -> Tensor:
        return self.inner._all_reduce_over(x, call)

    def _all_gather(self, x: Tensor, call: CommCall) -> list[Tensor]:
        return self.inner._all_gather(x, call)

    def _reduce_scatter(self, pieces: Sequence[Tensor], call: CommCall) -> Tensor:
        return self.inner._reduce_scatter(pieces, call)

    def _all_to_all(self, pieces: Sequence[Tensor], call: CommCall) -> list[Tensor]:
        return self.inner._all_to_all(pieces, call)

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], call: CommCall
    ) -> list[Tensor]:
        return self.inner._exchange(sends, receives, call)

    def _send(self, x: Tensor, call: CommCall) -> None:
        self.inner._send(x, call)

    def _receive(self, call: CommCall, device: torch.device) -> Tensor:
        return self.inner._receive(call, device)

    def _barrier(self, call: CommCall) -> None:
        self.inner._barrier(call)
