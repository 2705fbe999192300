"""`view(dtype)`: smaller items split those of the last dim, larger ones join them, and nothing is sent."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.comm import current_communicator

INTEGERS = torch.randint(-(2**31), 2**31 - 1, (6, 10), dtype=torch.int32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("place", [mw.Shard(0), mw.Shard(1), mw.Replicate()])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("first", "then"), [(torch.uint8, torch.int32), (torch.int16, torch.uint8)])
def test_items_stay_on_their_rank(place: mw.Placement, ranks: int, first: torch.dtype, then: torch.dtype) -> None:
    def viewed() -> tuple[torch.Tensor, int]:
        x = mw.shard_tensor(INTEGERS, mw.ProcessMesh(list(range(ranks)), ["tp"]), [place])
        before = current_communicator().seen.total_received
        y = x.view(first).view(then)
        received = current_communicator().seen.total_received - before
        return mw.unshard_dtensor(y), received

    for found, received in mw.simulate(viewed, ranks):
        assert torch.equal(found, INTEGERS.view(first).view(then))
        assert received == 0


def test_items_that_do_not_divide_the_last_dim_are_refused_as_on_one_device() -> None:
    def wrong() -> None:
        x = mw.shard_tensor(
            INTEGERS.view(torch.uint8)[:, :6].contiguous(), mw.ProcessMesh([0, 1], ["tp"]), [mw.Shard(0)]
        )
        with pytest.raises(RuntimeError, match="must be divisible"):
            x.view(torch.int32)

    mw.simulate(wrong, 2)
