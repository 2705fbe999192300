"""Prices: rooflines, rings, and clusters whose groups extend over nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshwright.cost import DEVICES, LINKS, NARROWEST, Cluster, CostError, Device, Link, cluster_of, device_of, link_of
from meshwright.layout import ProcessMesh, parse_spec
from meshwright.reshard import AllGather, AllReduce, Exchange, Relabel, plan

TOY = Device("toy", {torch.float32: 1e9}, bandwidth=1e6, memory=1e9, overhead=0.0, reach=1.0)
WIRE = Link("wire", 1e6, 1e-3, start=0.0, reach=1.0)
NETWORK = Link("network", 1e5, 1e-2, start=0.0, reach=1.0)


@pytest.mark.parametrize(
    ("flops", "nbytes", "seconds"), [(1e9, 0, 1.0), (0, 1e6, 1.0), (1e9, 5e5, 1.0), (1e8, 1e6, 1.0)]
)
def test_an_operator_takes_the_longer_of_work_and_traffic(flops: float, nbytes: float, seconds: float) -> None:
    assert TOY.seconds(flops, nbytes) == pytest.approx(seconds)


def test_a_ring_costs_a_hop_per_other_rank_and_the_received_bytes() -> None:
    mesh = ProcessMesh(range(4), ["tp"])
    cluster = Cluster(TOY, WIRE)
    pending, cut = parse_spec("f32[1000] +tp", mesh), parse_spec("f32[1000@tp]", mesh)
    assert cluster.seconds(AllReduce(("tp",)), pending) == pytest.approx(6e-3 + 6000 / 1e6)
    assert cluster.seconds(AllGather((("tp", 0),)), cut) == pytest.approx(3e-3 + 3000 / 1e6)
    assert cluster.seconds(Relabel(cut.layout), cut) == 0


def test_a_message_to_another_mesh_takes_as_long_as_its_bytes() -> None:
    """The ranks that receive are others than those that send."""
    here, there = ProcessMesh([0, 1], ["dp"]), ProcessMesh([2, 3], ["dp"])
    sent = Exchange(parse_spec("f32[1000@dp]", there))
    assert Cluster(TOY, WIRE).seconds(sent, parse_spec("f32[1000@dp]", here)) == pytest.approx(1e-3 + 2000 / 1e6)


@pytest.mark.parametrize(("axes", "bandwidth"), [(["tp"], 1e6), (["dp"], 1e5), (["dp", "tp"], 4e5)])
def test_a_group_over_nodes_shares_their_network(axes: list[str], bandwidth: float) -> None:
    mesh = ProcessMesh(np.arange(8).reshape(2, 4), ["dp", "tp"])
    cluster = Cluster(TOY, WIRE, per_node=4, outside=NETWORK)
    assert cluster.link(mesh.group(0, axes)).bandwidth == bandwidth


def test_a_cluster_prices_the_steps_of_a_plan() -> None:
    mesh = ProcessMesh(np.arange(16).reshape(2, 8), ["dp", "tp"])
    src, dst = parse_spec("f32[64, 64] +dp", mesh), parse_spec("f32[64, 64]", mesh)
    assert plan(src, dst, cluster_of("H100").seconds).dst is dst


@pytest.mark.parametrize("name", DEVICES)
def test_every_known_device_has_a_cluster_with_its_name(name: str) -> None:
    cluster = cluster_of(name)
    assert name in repr(cluster)
    assert cluster.device.source
    assert device_of(name) is cluster.device
    assert link_of(cluster.inside.name) in LINKS.values()


@pytest.mark.parametrize(
    "act",
    [
        lambda: device_of("TPU"),
        lambda: link_of("string"),
        lambda: Device("none", {}, 1.0, 1.0),
        lambda: Link("none", 0.0, 0.0),
        lambda: Cluster(TOY, WIRE, per_node=0),
    ],
)
def test_impossible_clusters_are_refused(act: Any) -> None:
    with pytest.raises(CostError) as caught:
        act()
    assert all((caught.value.asked, caught.value.found, caught.value.why, caught.value.write))


def test_a_group_in_a_full_mesh_has_part_of_the_links() -> None:
    """Eight devices with a link to each other: a pair has one, all of them seven; a switch gives all to any group."""
    mesh, switch = cluster_of("MI300X"), cluster_of("H100")
    for few, times in ((2, 7.0), (4, 7 / 3)):
        assert float(mesh.bandwidth(8, 8)) == pytest.approx(times * float(mesh.bandwidth(few, few)))
        assert mesh.link(range(few)).bandwidth == pytest.approx(float(mesh.bandwidth(few, few)))
        assert float(switch.bandwidth(8, 8)) == float(switch.bandwidth(few, few))
    assert float(mesh.message(1e9, False)) == pytest.approx(1e9 / float(mesh.bandwidth(2, 2)), rel=1e-3)
    assert float(mesh.bandwidth(64, 1)) == float(switch.bandwidth(64, 1))


def test_an_all_reduce_over_pcie_has_the_measured_bandwidth() -> None:
    """Published bus bandwidths of eight A100: 12.5 GB/s (SimuMax), 229 GB/s (vTrain)."""
    assert float(cluster_of("A100-PCIe").bandwidth(8, 8)) == pytest.approx(12.5e9, rel=0.05)
    assert float(cluster_of("A100").bandwidth(8, 8)) == pytest.approx(229e9, rel=0.05)


def test_a_device_without_a_four_bit_rate_uses_eight_bits() -> None:
    hopper, blackwell = device_of("H100"), device_of("B200")
    assert hopper.rate(NARROWEST) == hopper.rate(torch.float8_e4m3fn) > hopper.rate(torch.bfloat16)
    assert blackwell.rate(NARROWEST) > blackwell.rate(torch.float8_e4m3fn)
    assert blackwell.rate(NARROWEST) == 9e15 * blackwell.reach4
