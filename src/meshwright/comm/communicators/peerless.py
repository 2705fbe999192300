"""A communicator without peers, with correct shapes and exact counts for any world size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .call import CommCall
from .communicator import Communicator, Receive, contiguous_copy


class PeerlessCommunicator(Communicator):
    """Rank `rank` of `size` without peers: data from other ranks is zeros, the caller's own data is copied.

    It accepts meta and fake tensors, so a plan for 16,384 ranks needs neither ranks nor memory.

    >>> ranks = PeerlessCommunicator(rank=3, size=16384)
    >>> with ranks.seen.record_calls() as calls:
    ...     y = ranks.all_reduce(torch.empty(1024, device="meta"), "sum", tuple(range(8)))
    >>> print(calls[0], ranks.seen.total_received)
    all_reduce(sum, float32, (1024,)) on ranks 0, 1, 2, 3, 4, 5, 6, 7 7168
    """

    kind = "peerless"

    def __init__(self, rank: int = 0, size: int = 16384) -> None:
        super().__init__(rank, size)

    def _all_reduce(self, x: Tensor, call: CommCall) -> Tensor:
        return contiguous_copy(x)

    def _all_gather(self, x: Tensor, call: CommCall) -> list[Tensor]:
        return self._fill([x] * len(call.group), call)

    def _reduce_scatter(self, pieces: Sequence[Tensor], call: CommCall) -> Tensor:
        return contiguous_copy(pieces[call.group.index(self.rank)])

    def _all_to_all(self, pieces: Sequence[Tensor], call: CommCall) -> list[Tensor]:
        return self._fill(pieces, call)

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], call: CommCall
    ) -> list[Tensor]:
        own = iter([x for peer, x in sends if peer == self.rank])
        return [
            contiguous_copy(next(own)) if peer == self.rank else torch.zeros(tuple(shape), dtype=dtype, device=device)
            for peer, shape, dtype, device in receives
        ]

    def _send(self, x: Tensor, call: CommCall) -> None:
        return None

    def _receive(self, call: CommCall, device: torch.device) -> Tensor:
        _, shape, dtype = call.message
        return torch.zeros(shape, dtype=dtype, device=device)

    def _barrier(self, call: CommCall) -> None:
        return None

    def _fill(self, like: Sequence[Tensor], call: CommCall) -> list[Tensor]:
        return [
            contiguous_copy(x) if peer == self.rank else x.new_zeros(shape)
            for x, shape, peer in zip(like, call.receives, call.group, strict=True)
        ]
