"""What a way between devices costs: a start, a latency per message, and bytes per second.

Bandwidths are those of one device in one direction. Sources: "ml-engineering" as in `_device.py`; latencies of "nccl"
are the constants of NCCL's tuning (ring, Simple protocol: 8.4 µs per call, and 3.4, 5.7 or 14 µs per hop); what PCIe
reaches is what "simumax" (MooreThreads/SimuMax, configs/system) measured of an all-reduce over eight A100.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ._device import GIGA, MICRO
from ._errors import CostError, known_by
from ._kernels import Numbers


@dataclass(frozen=True, slots=True)
class Link:
    """`start` seconds per collective, `latency` per hop, `bandwidth` in bytes per second; `reach` is its usable share.

    Where each of `mesh` devices has a way of its own to every other one, a group of fewer has a part of the bandwidth.

    >>> LINKS["NVLink4"]
    NVLink4: 450 GB/s, 3.4 µs
    """

    name: str
    bandwidth: float
    latency: float
    start: float = 8.4 * MICRO
    reach: float = 0.8
    source: str = ""
    mesh: int = 0

    def __post_init__(self) -> None:
        ways, waits = (self.bandwidth, self.reach), (self.latency, self.start)
        if not all(0 < x < float("inf") for x in ways) or not all(0 <= x < float("inf") for x in waits):
            raise CostError(
                f"a link {self.name!r}", f"{self.bandwidth} B/s, {self.latency} s",
                "bytes take time, and time goes forward",
                "Link(name, bytes per second, seconds per hop)",
            )  # fmt: skip

    def among(self, ranks: Numbers) -> Numbers:
        """Bytes per second of each device in a group of so many.

        >>> [float(LINKS["xGMI"].among(ranks)) / 1e9 for ranks in (2, 8)]
        [51.2, 358.4]
        """
        if not self.mesh:
            return self.bandwidth * self.reach
        ways = np.where(np.less(ranks, 2), self.mesh, np.clip(ranks, 2, self.mesh)) - 1
        return ways / (self.mesh - 1) * (self.bandwidth * self.reach)

    def seconds(self, nbytes: float, hops: int = 1) -> float:
        """Seconds until `nbytes` have arrived in `hops` messages, one after the other (alpha-beta).

        >>> Link("slow", 1e6, 1e-3, start=0, reach=1).seconds(500, hops=2)
        0.0025
        """
        return self.start + hops * self.latency + nbytes / (self.bandwidth * self.reach)

    def __repr__(self) -> str:
        return f"{self.name}: {self.bandwidth / GIGA:.3g} GB/s, {self.latency / MICRO:.3g} µs"


def _inside(name: str, bandwidth: float, latency: float = 3.4, reach: float = 0.8, mesh: int = 0) -> Link:
    return Link(name, bandwidth * GIGA, latency * MICRO, reach=reach, source="ml-engineering, nccl", mesh=mesh)


def _network(name: str, gigabits: float) -> Link:
    return Link(name, gigabits / 8 * GIGA, 14 * MICRO, reach=0.77, source="ml-engineering, nccl")


LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        _inside("NVLink2", 150),
        _inside("NVLink3", 300),
        _inside("NVLink4", 450),
        _inside("NVLink5", 900),
        _inside("NVLink3-400", 200),
        _inside("NVLink4-400", 200),
        _inside("HCCS", 196, mesh=8),
        _inside("xGMI", 448, mesh=8),
        _inside("PCIe4", 31, 5.7, reach=0.42),
        _inside("PCIe5", 63, 5.7, reach=0.42),
        _network("InfiniBand-EDR", 100),
        _network("InfiniBand-HDR", 200),
        _network("InfiniBand-NDR", 400),
        _network("InfiniBand-XDR", 800),
        _network("RoCE-200", 200),
        _network("RoCE-400", 400),
        _network("Ethernet-100", 100),
        Link("memory of one host", 4.5 * GIGA, 0.0, start=35 * MICRO, reach=1.0, source="benchmarks/all_reduce.py"),
    )
}


def link_of(name: str) -> Link:
    """The link called so. Raises CostError for an unknown name."""
    return known_by(name, LINKS, "link", "Link(name, bandwidth, latency)")
