"""A carrier without peers gives the shapes and the counts that simulated ranks give."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm import Carrier, Recorded, current, simulate

CPU = torch.device("cpu")


def everything(ranks: Carrier, device: torch.device) -> tuple[list[Tensor], dict[str, int], dict[str, int]]:
    group, x = tuple(range(ranks.size)), torch.ones(5, 2, device=device)
    found = [
        ranks.all_reduce(x, "avg", group),
        ranks.reduce_scatter([x[:to] for to in group], "sum", group),
        *ranks.all_gather(x[: ranks.rank], group, [(peer, 2) for peer in group]),
        *ranks.all_to_all([x[:to] for to in group], [(ranks.rank, 2)] * ranks.size, group),
        *ranks.exchange([(peer, x) for peer in group], [(peer, (5, 2), x.dtype, device) for peer in group], group),
    ]
    ranks.barrier(group)
    return found, ranks.seen.calls, ranks.seen.received


def test_shapes_and_counts_are_those_of_simulated_ranks() -> None:
    for rank, (tensors, calls, received) in enumerate(simulate(lambda: everything(current(), CPU), 3)):
        for device in (CPU, torch.device("meta")):
            found = everything(Recorded(rank, 3), device)
            assert [(x.shape, x.dtype, x.device) for x in found[0]] == [(x.shape, x.dtype, device) for x in tensors]
            assert found[1:] == (calls, received)


def test_it_plans_for_a_world_of_16384_ranks() -> None:
    ranks = Recorded(rank=5000, size=16384)
    weight = torch.empty(8192, 1024, device="meta")
    group = tuple(range(5000 % 8, 16384, 8))
    assert ranks.all_reduce(weight, "sum", group).shape == weight.shape
    assert ranks.seen.total_received == 2 * 2047 * weight.numel() * 4 // 2048
