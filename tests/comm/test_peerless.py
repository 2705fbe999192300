"""A communicator without peers gives the shapes and the counts of simulated ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm import Communicator, PeerlessCommunicator, current_communicator, simulate
from meshwright.layout import ProcessMesh, parse_spec

CPU = torch.device("cpu")


def everything(ranks: Communicator, device: torch.device) -> tuple[list[Tensor], dict[str, int], dict[str, int]]:
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
    for rank, (tensors, calls, received) in enumerate(simulate(lambda: everything(current_communicator(), CPU), 3)):
        for device in (CPU, torch.device("meta")):
            found = everything(PeerlessCommunicator(rank, 3), device)
            assert [(x.shape, x.dtype, x.device) for x in found[0]] == [(x.shape, x.dtype, device) for x in tensors]
            assert found[1:] == (calls, received)


def test_it_plans_for_a_world_of_16384_ranks() -> None:
    ranks = PeerlessCommunicator(rank=5000, size=16384)
    weight = torch.empty(8192, 1024, device="meta")
    group = tuple(range(5000 % 8, 16384, 8))
    assert ranks.all_reduce(weight, "sum", group).shape == weight.shape
    assert ranks.seen.total_received == 2 * 2047 * weight.numel() * 4 // 2048


def test_a_rank_knows_its_number_among_those_along_axes() -> None:
    mesh = ProcessMesh([[0, 1, 2], [3, 4, 5]], ["a", "b"])
    for rank in range(6):
        at = mesh.coordinate(rank)
        ranks = PeerlessCommunicator(rank, 6)
        assert ranks.place(mesh, ["a", "b"]) == 3 * at["a"] + at["b"]
        assert ranks.place(mesh, ["b", "a"]) == 2 * at["b"] + at["a"]
        assert [ranks.place(mesh, [axis]) for axis in ("a", "b")] == [at["a"], at["b"]]
        assert ranks.place(mesh, []) == 0
        for axes in (["a", "b"], ["b", "a"], ["b"]):
            assert mesh.group(rank, axes)[ranks.place(mesh, axes)] == rank
        spec = parse_spec("f32[5@b, 4@a]", mesh)
        assert ranks.local_shape(spec) == spec.local_shape(rank)
        assert [ranks.offset(spec, d) for d in (0, 1)] == [spec.offset(rank, d) for d in (0, 1)]
