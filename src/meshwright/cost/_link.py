"""Links between devices: start, latency per hop, and bytes per second.

Bandwidths are those of one device in one direction. Sources: "ml-engineering" as in `_device.py`. Latencies of "NCCL"
are the constants of NCCL's tuning. A ring takes 8.4 µs per call and 3.4, 5.7 or 14 µs per hop with whole messages. With
lines that carry flags it takes 14 µs per call and 1.9 or 4 µs per hop. The rates of rings of few and of many ranks and
of switches were measured by the named sources. The rate of PCIe is what "simumax" (MooreThreads/SimuMax,
configs/system) measured for an all-reduce over eight A100. A Gaudi has 24 ports of 100 or 200 Gb/s, 21 of them to the
other devices of its node.
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
    """A link: `start` seconds per collective, `latency` seconds per hop, `bandwidth` in bytes per second.

    `reach` is the usable fraction of the bandwidth. `mesh` is the number of devices that are all directly connected to
    each other; a smaller group has only a part of the bandwidth. `fewer` lists (ranks, fraction): rings of at most so
    many ranks reach this fraction of the bandwidth of a large ring. `lines` are the start and the latency per hop of
    messages whose lines carry flags; None if the link does not keep lines whole. `switched` is the fraction of the
    bandwidth at which switches reduce, after a start of `switching` seconds; 0 if they cannot.

    >>> LINKS["NVLink4"]
    NVLink4: 450 GB/s, 3.4 µs

    Raises:
        CostError: `bandwidth` or `reach` is not positive and finite, or `latency` or `start` is negative.
    """

    name: str
    bandwidth: float
    latency: float
    start: float = 8.4 * MICRO
    reach: float = 0.8
    source: str = ""
    mesh: int = 0
    fewer: tuple[tuple[int, float], ...] = ()
    lines: tuple[float, float] | None = None
    switched: float = 0.0
    switching: float = 100 * MICRO

    def __post_init__(self) -> None:
        ways, waits = (self.bandwidth, self.reach), (self.latency, self.start)
        if not all(0 < x < float("inf") for x in ways) or not all(0 <= x < float("inf") for x in waits):
            raise CostError(
                f"a link {self.name!r}",
                f"{self.bandwidth} B/s, {self.latency} s",
                "bandwidth and reach must be positive, latency and start must not be negative",
                "write Link(name, bytes per second, seconds per hop)",
            )

    def among(self, ranks: Numbers) -> Numbers:
        """Return the bytes per second of each device in a group of `ranks`.

        >>> [float(LINKS["xGMI"].among(ranks)) / 1e9 for ranks in (2, 8)]
        [51.2, 358.4]
        """
        if not self.mesh:
            parts = [np.where((ranks <= n) & (ranks > 1), part, 1.0) for n, part in self.fewer]
            return np.min(parts, axis=0, initial=1.0) * self.bandwidth * self.reach if parts else self.usable
        ways = np.where(ranks < 2, self.mesh, np.clip(ranks, 2, self.mesh)) - 1
        return ways / (self.mesh - 1) * (self.bandwidth * self.reach)

    @property
    def usable(self) -> float:
        """Bytes per second that large messages reach."""
        return self.bandwidth * self.reach

    def seconds(self, nbytes: float) -> float:
        """Return the seconds until one message of `nbytes` has arrived (alpha-beta model).

        >>> Link("slow", 1e6, 1e-3, start=0, reach=1).seconds(500)
        0.0015
        """
        return self.start + self.latency + nbytes / self.usable

    def __repr__(self) -> str:
        return f"{self.name}: {self.bandwidth / GIGA:.3g} GB/s, {self.latency / MICRO:.3g} µs"


def _nvlink(
    name: str, bandwidth: float, reach: float, switched: float = 0.0, fewer: tuple[tuple[int, float], ...] = ()
) -> Link:
    lines = (14 * MICRO, 1.9 * MICRO)
    bandwidth, latency = bandwidth * GIGA, 3.4 * MICRO
    return Link(name, bandwidth, latency, reach=reach, source=NVLINK, lines=lines, switched=switched, fewer=fewer)


def _inside(name: str, bandwidth: float, latency: float = 3.4, reach: float = 0.8, mesh: int = 0) -> Link:
    return Link(name, bandwidth * GIGA, latency * MICRO, reach=reach, source="ml-engineering, NCCL", mesh=mesh)


def _network(name: str, gigabits: float, reach: float = 0.77) -> Link:
    lines = (14 * MICRO, 4 * MICRO)
    return Link(name, gigabits / 8 * GIGA, 14 * MICRO, reach=reach, source="ml-engineering, NCCL", lines=lines)


NVLINK = "ml-engineering, NCCL; vtrain (V100, A100), galvatron (A800)"
LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        _nvlink("NVLink2", 150, 0.9, fewer=((2, 0.17), (4, 0.63))),
        _nvlink("NVLink3", 300, 0.77, fewer=((2, 0.86), (4, 0.97))),
        _nvlink("NVLink4", 450, 0.81, switched=0.695),
        _nvlink("NVLink5", 900, 0.755, switched=0.61),
        _nvlink("NVLink5 of 72", 900, 0.755, switched=0.486),
        _nvlink("NVLink6", 1800, 0.755, switched=0.61),
        _nvlink("NVLink3-400", 200, 0.78, fewer=((2, 0.89),)),
        _nvlink("NVLink4-400", 200, 0.81, switched=0.695),
        _inside("HCCS", 196, mesh=8),
        _inside("xGMI", 448, mesh=8),
        _inside("xGMI4", 537.6, mesh=8),
        _inside("Gaudi2 mesh", 262.5, mesh=8),
        _inside("Gaudi3 mesh", 525, mesh=8),
        _inside("PCIe3", 15.8, 5.7, reach=0.42),
        _inside("PCIe4", 31, 5.7, reach=0.42),
        _inside("PCIe5", 63, 5.7, reach=0.42),
        _inside("PCIe6", 121, 5.7, reach=0.42),
        _network("InfiniBand-EDR", 100),
        _network("InfiniBand-HDR", 200),
        _network("InfiniBand-NDR", 400),
        _network("InfiniBand-XDR", 800),
        _network("OmniPath-100", 100),
        _network("RoCE-200", 200),
        _network("RoCE-400", 400),
        Link("EFA-400", 50 * GIGA, 75 * MICRO, reach=0.74, source="ml-engineering"),
        _network("Ethernet-100", 100),
        Link("Gloo on one host", 0.7 * GIGA, 0.0, start=800 * MICRO, reach=1.0, source="benchmarks/all_reduce.py"),
        _network("Gaudi2 ports", 300),
        _network("Gaudi3 ports", 600),
        Link("memory of one host", 4.5 * GIGA, 0.0, start=35 * MICRO, reach=1.0, source="benchmarks/all_reduce.py"),
    )
}
"""Known links by name. A V100 has six NVLinks to its neighbours, of which a ring of two ranks uses one."""


def link_of(name: str) -> Link:
    """Return the link of this name.

    Raises:
        CostError: the name is unknown.
    """
    return known_by(name, LINKS, "link", "Link(name, bandwidth, latency)")
