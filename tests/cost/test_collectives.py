"""Prices of collectives: bounds that every algorithm keeps, and the algorithms that were measured to be fastest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import Cluster, cluster_of, link_of
from meshwright.reshard import CollectiveKind

KINDS: tuple[CollectiveKind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
DEVICES = ("V100", "A100", "A100-PCIe", "H100", "B200", "GB200", "MI300X", "Ascend-910B", "cpu core")


def seconds(cluster: Cluster, kind: CollectiveKind, nbytes: float, ranks: int, together: int) -> float:
    return float(cluster.meeting(kind, nbytes, ranks, min(ranks, together)))


@given(
    st.sampled_from(DEVICES),
    st.sampled_from(KINDS),
    st.floats(1, 1e11),
    st.integers(2, 4096),
    st.integers(1, 8),
    st.floats(1, 10),
)
def test_more_bytes_take_longer_and_no_link_exceeds_its_bandwidth(
    device: str, kind: CollectiveKind, nbytes: float, ranks: int, together: int, more: float
) -> None:
    cluster = cluster_of(device)
    took = seconds(cluster, kind, nbytes, ranks, together)
    assert 0 < took <= seconds(cluster, kind, more * nbytes, ranks, together)
    assert took >= nbytes / ranks / cluster.inside.bandwidth, "each rank receives a part at the least"
    assert seconds(cluster, kind, nbytes, 1, together) == 0


@given(st.sampled_from(DEVICES), st.floats(1, 1e11), st.integers(2, 4096), st.integers(1, 8))
def test_an_all_reduce_takes_no_longer_than_reduce_scatter_and_all_gather(
    device: str, nbytes: float, ranks: int, together: int
) -> None:
    whole, parts, gathered = (seconds(cluster_of(device), kind, nbytes, ranks, together) for kind in KINDS[:3])
    assert whole <= (parts + gathered) * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_many_groups_have_the_price_of_each_alone(kind: CollectiveKind) -> None:
    cluster = cluster_of("B200")
    ranks, together = np.array([1, 2, 8, 16, 64, 1000]), np.array([1, 2, 8, 1, 8, 4])
    nbytes = np.array([1e3, 1e9, 1e7, 1e5, 1e10, 1e8])
    every = cluster.meeting(kind, nbytes, ranks, together)
    for n, found in enumerate(np.asarray(every)):
        assert found == pytest.approx(float(cluster.meeting(kind, nbytes[n], int(ranks[n]), int(together[n]))))


def test_switches_reduce_for_many_ranks_and_large_messages() -> None:
    """As published for H200: four ranks have a ring; eight reach 473 GB/s, where a ring has 366."""
    hopper = cluster_of("H200")
    ring = replace(hopper, inside=replace(hopper.inside, switched=0.0))
    for nbytes, ranks, helps in ((8e9, 4, False), (8e9, 8, True), (1e6, 8, False)):
        here, there = (seconds(c, "all-reduce", nbytes, ranks, 8) for c in (hopper, ring))
        assert (here < 0.99 * there) == helps
    assert seconds(hopper, "all-gather", 8e9, 8, 8) == seconds(ring, "all-gather", 8e9, 8, 8)


def test_each_rank_sends_its_part_of_the_sum_of_its_node() -> None:
    """As published for 32 B200 on a network of 400 Gb/s each, 74 % of it usable: 382 GB/s."""
    cluster = replace(cluster_of("B200"), outside=link_of("EFA-400"))
    bus = 2 * 2**34 * 31 / 32 / seconds(cluster, "all-reduce", 2**34, 32, 8) / 1e9
    assert bus == pytest.approx(381.8, rel=0.02)


def test_a_tree_has_few_hops_over_many_nodes() -> None:
    cluster = cluster_of("A100")
    few, many = (seconds(cluster, "all-reduce", 1e3, 8 * nodes, 8) for nodes in (2, 512))
    assert many < 3 * few
    assert seconds(cluster, "all-gather", 1e3, 8 * 512, 8) > 30 * seconds(cluster, "all-gather", 1e3, 16, 8)
