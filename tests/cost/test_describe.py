"""Descriptions of clusters in a line and in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.cost import NARROWEST, CostError, KernelTimes, cluster, cluster_of, device_of, link_of


def test_a_line_gives_devices_nodes_and_network() -> None:
    found = cluster("64xA100-40G, 4 per node, 100G")
    assert (found.devices, found.device.name, found.per_node) == (64, "A100-40GB", 4)
    assert found.outside is not None
    assert found.outside.bandwidth == 100e9 / 8
    assert cluster("8 x H100-96G").device.memory == 96e9
    assert cluster("8xH100").outside == cluster_of("H100").outside


@pytest.mark.parametrize(
    ("text", "name", "gigabytes"),
    [
        ("64xA100-SXM4-80GB", "A100", 80),
        ("64xA100-SXM4-40GB", "A100-40GB", 40),
        ("8xA100 80GB", "A100", 80),
        ("8xh100-sxm", "H100", 80),
        ("8 × H100", "H100", 80),
        ("8*mi300x-192G", "MI300X", 192),
        ("72xGB200-NVL72", "GB200", 186),
        ("8xH100-96GB-HBM2e", "H100-HBM2e", 96),
        ("4xCPU core", "cpu core", 4),
        ("8xH100-79.6G", "H100", 79.6),
        ("8xA100-80GB-PCIe", "A100-PCIe", 80),
        ("8xH100 80GB PCIe", "H100-PCIe", 80),
        ("2xRTX 4090", "RTX-4090", 24),
        ("4xL40S", "L40S", 48),
        ("8xascend-910b-64GB", "Ascend-910B", 64),
    ],
)
def test_names_of_data_sheets_are_known(text: str, name: str, gigabytes: float) -> None:
    device = cluster(text).device
    assert (device.name, device.memory) == (name, gigabytes * 1e9)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8xH100", 79.2 * 2**30),
        ("8xA100-SXM4-80GB", 79.2 * 2**30),
        ("8xH100-96G", 96e9),
        ("8xH100 + 8xV100", 31.7 * 2**30),
    ],
)
def test_a_process_can_address_what_the_driver_reports(text: str, nbytes: float) -> None:
    """A number that is given is not changed."""
    assert cluster(text).device.available == pytest.approx(nbytes)


@pytest.mark.parametrize("text", ["400G", "400 G", "400Gb/s", "400 Gbps", "400Gbit/s", "50GB/s", "0.4T", "0.4 Tb/s"])
def test_a_network_has_several_spellings(text: str) -> None:
    found = cluster(f"64xH100, 4/node, {text}")
    assert found.outside is not None
    assert (found.per_node, found.outside.bandwidth) == (4, pytest.approx(50e9))


@pytest.mark.parametrize(
    "text",
    [
        "H100",
        "8xTPU",
        "8xH100, soon",
        "",
        "8xH100, 0 per node",
        "no.toml",
        "8xH100, 0G",
        "8xH100-0G",
        "8xH100 400G",
        "8xH100 8 per node",
        "8xH200-PCIe",
        "32xB200-NVL72",
        "8x80G",
        "8xSXM",
    ],
)
def test_an_invalid_line_is_refused(text: str) -> None:
    with pytest.raises(CostError) as caught:
        cluster(text)
    assert all((caught.value.asked, caught.value.found, caught.value.why, caught.value.write))


def test_mixed_devices_have_the_speed_of_the_slowest() -> None:
    mixed, h100, a100 = cluster("8xH100 + 8xA100, 4 per node"), cluster_of("H100"), cluster_of("A100")
    assert (mixed.devices, mixed.per_node, mixed.device.name) == (16, 4, "H100 + A100")
    assert mixed.device.memory == min(h100.device.memory, a100.device.memory)
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, NARROWEST):
        wanted = min(h100.device.rate(dtype), a100.device.rate(dtype))
        assert mixed.device.rate(dtype) == pytest.approx(wanted)
    assert mixed.inside == a100.inside
    for kind in ("all-reduce", "all-to-all"):
        alone = [one.meeting(kind, 1e8, 16, 4) for one in (h100, a100)]
        assert mixed.meeting(kind, 1e8, 16, 4) >= max(alone) * (1 - 1e-9)
    newer = cluster("8xH100 + 8xB200").device
    assert newer.rate(NARROWEST) == pytest.approx(h100.device.rate(NARROWEST))
    with pytest.raises(CostError, match="TPU"):
        cluster("8xH100 + 8xTPU")


FILE = """cluster = "64xH100, 8 per node, 400G"
[device]
memory = 96
reach = 0.57
flops = { bf16 = 900, float8_e4m3fn = 1800 }
[outside]
latency = 10
"""


def test_a_file_gives_more_details(tmp_path: Path) -> None:
    path = tmp_path / "machines.toml"
    path.write_text(FILE)
    found = cluster(str(path))
    assert (found.device.memory, found.device.reach) == (96e9, 0.57)
    assert found.device.flops[torch.bfloat16] == 900e12
    assert found.device.flops[torch.float32] == device_of("H100").flops[torch.float32]
    assert found.outside is not None
    assert found.outside.latency == pytest.approx(10e-6)


def test_a_link_between_nodes_has_a_name() -> None:
    found = cluster("32xB200, 8 per node, EFA-400")
    assert found.outside is link_of("EFA-400")
    with pytest.raises(CostError, match="only one"):
        cluster("32xB200, EFA-400, 400G")


def test_message_speeds_of_a_file_hold_for_all_messages(tmp_path: Path) -> None:
    """The preset's own lines with flags would be faster than the measurement."""
    path = tmp_path / "machines.toml"
    path.write_text('cluster = "16xH100"\n[inside]\nlatency = 500\nswitched = 0\nfewer = [[2, 0.5]]\n')
    found = cluster(str(path))
    assert found.inside.lines is None
    assert float(found.meeting("all-gather", 8.0, 8, 8)) > 7 * 500e-6
    assert float(found.bandwidth(2, 2)) == float(found.bandwidth(8, 8)) / 2
    path.write_text('cluster = "16xH100"\n[inside]\nlatency = 500\nlines = [3, 1]\n')
    assert float(cluster(str(path)).meeting("all-gather", 8.0, 8, 8)) == pytest.approx(10e-6, rel=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        "cluster =",
        "[device]\nmemory = 1",
        FILE + "[other]\na = 1",
        FILE.replace("96", '"much"'),
        FILE + "a = 1",
        'cluster = "machines.toml"',
    ],
)
def test_a_wrong_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machines.toml"
    path.write_text(text)
    with pytest.raises(CostError):
        cluster(str(path))


def test_a_group_over_nodes_shares_the_network_among_the_ranks_of_a_node() -> None:
    machines = cluster("64xA100, 8 per node, 100G")
    alone, eight = (float(machines.bandwidth(16, together)) for together in (1, 8))
    assert eight == pytest.approx(8 * alone)
    assert float(machines.meeting("all-reduce", 1e9, 1, 1)) == 0
    assert float(machines.meeting("all-reduce", 1e9, 8, 8)) < float(machines.meeting("all-reduce", 1e9, 16, 8))
    gather, reduce = (float(machines.meeting(kind, 1e9, 8, 8)) for kind in ("all-gather", "all-reduce"))
    assert gather < reduce < 2.1 * gather


def test_short_ragged_and_few_products_are_less_efficient() -> None:
    kernels = KernelTimes(device_of("A100"))

    def rate(m: int, n: int, k: int) -> float:
        return 2.0 * m * n * k / float(kernels.matmul(m, n, k))

    best = rate(8192, 8192, 8192)
    assert best < device_of("A100").rate(torch.bfloat16)
    assert rate(8192, 8192, 128) < best
    assert rate(8192, 8190, 8192) < 0.8 * best
    assert rate(256, 256, 8192) < 0.3 * best
