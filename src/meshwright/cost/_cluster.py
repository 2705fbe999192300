"""Clusters of devices, and the seconds of one step of a conversion.

All-reduce, all-gather and reduce-scatter are priced as collectives. Every other step is priced as direct messages, all
sent at once. The bytes are those that the step reports for the busiest of the first `LOOKED_AT` ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from meshwright.layout import Spec
from meshwright.reshard import ROUNDS, AllGather, AllReduce, CollectiveKind, ConversionStep, ReduceScatter

from ._collectives import Group
from ._device import Device, device_of
from ._errors import CostError
from ._kernels import Flags, Numbers
from ._link import Link, link_of

LOOKED_AT = 64
KINDS: Mapping[type[ConversionStep], CollectiveKind] = {
    AllReduce: "all-reduce", AllGather: "all-gather", ReduceScatter: "reduce-scatter",
}  # fmt: skip
"""Steps that are collectives. In other steps, each rank sends its messages directly, all at once."""
MOST_DEVICES = 10_000_000
"""Upper bound on the devices of a cluster. No cluster is larger, and a search over all its divisors is still fast."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of `per_node` devices that are connected by `inside`.

    `outside` is each device's share of the network of its node; None if the cluster has no network. `devices` is the
    number of devices, if known.

    >>> cluster_of("H100")
    H100: 990 TFLOP/s bf16, 67 TFLOP/s f32, 3350 GB/s, 80 GB; 8 per node on NVLink4; InfiniBand-NDR between nodes

    Raises:
        CostError: `per_node` is below 1, or `devices` is below 1 or above `MOST_DEVICES`.
    """

    device: Device
    inside: Link
    per_node: int = 8
    outside: Link | None = None
    devices: int | None = None

    def __post_init__(self) -> None:
        if self.per_node < 1:
            raise CostError(
                "a cluster",
                f"{self.per_node} devices per node",
                "a node needs at least one device",
                "write Cluster(device, link, per_node=8)",
            )
        if self.devices is not None and not 1 <= self.devices <= MOST_DEVICES:
            raise CostError(
                f"a cluster of {self.device.name}",
                f"{self.devices} devices",
                f"a cluster has at least one device, and at most {MOST_DEVICES:,}",
                f"write 64x{self.device.name}",
            )

    def link(self, group: Sequence[int]) -> Link:
        """Return the link that a collective of these ranks uses: the network if the ranks are on several nodes.

        All ranks of a node share the traffic that leaves it, so a ring over k of them has k shares of the network.
        """
        nodes = self._nodes(group)
        if nodes <= 1 or self.outside is None:
            return replace(self.inside, bandwidth=float(self.inside.among(len(group))), reach=1.0)
        shares = max(1, len(group) // nodes)
        usable = min(float(self.inside.among(shares)), shares * self.outside.bandwidth * self.outside.reach)
        return replace(self.outside, bandwidth=usable, reach=1.0)

    def bandwidth(self, ranks: Numbers, together: Numbers) -> Numbers:
        """Return the bytes per second of a ring over `ranks`, of which `together` share a node, element by element."""
        return Group(self.inside, self.outside, ranks, together).bandwidth

    def meeting(
        self, kind: CollectiveKind, nbytes: Numbers, ranks: Numbers, together: Numbers, leaving: Numbers = 1.0
    ) -> Numbers:
        """Return the seconds of a collective on tensors of `nbytes`; 0 for one rank.

        `nbytes` is the size of the whole tensor for gathers and scatters. `leaving` is for an all-to-all: the fraction
        of the bytes for other nodes that crosses the network. The rest are copies that the receiving node makes.
        """
        return Group(self.inside, self.outside, ranks, together).seconds(kind, nbytes, leaving)

    def message(self, nbytes: Numbers, across: Flags) -> Numbers:
        """Return the seconds of a message to another rank; `across` is true if the message leaves the node."""
        inside = self.inside.among(2) if self.inside.mesh else self.inside.usable
        outside = inside if self.outside is None else self.outside.usable
        latency = self.inside.latency if self.outside is None else self.outside.latency
        return np.where(across, latency + nbytes / outside, self.inside.latency + nbytes / inside)

    def seconds(self, step: ConversionStep, x: Spec) -> float:
        """Return the seconds of a step that is applied to a tensor with spec `x`: a price for `reshard.plan`."""
        if not step.rounds(x):
            return 0.0
        ranks = dict.fromkeys((*x.mesh.process_ids[:LOOKED_AT], *step.apply(x).mesh.process_ids[:LOOKED_AT]))
        busiest = max(ranks, key=lambda rank: step.received(x, rank))
        group, received = step.group(x, busiest), step.received(x, busiest)
        kind = KINDS.get(type(step))
        if kind is None or len(group) < 2:
            return self.link(group).seconds(received)
        whole = received / ROUNDS[kind] * len(group) / (len(group) - 1)
        return float(self.meeting(kind, whole, len(group), len(group) / self._nodes(group)))

    def _nodes(self, group: Sequence[int]) -> int:
        return len({rank // self.per_node for rank in group})

    def __repr__(self) -> str:
        between = f"; {self.outside.name} between nodes" if self.outside else ""
        count = f"{self.devices} x " if self.devices else ""
        return f"{count}{self.device!r}; {self.per_node} per node on {self.inside.name}{between}"


def slowest(kinds: Sequence[Cluster]) -> Cluster:
    """Return one cluster of all devices of several kinds, with the lowest rate and size of any kind.

    Ranks have equal parts of a model, so each rank waits for the slowest. The surplus of faster devices is not used.
    """
    outside = [kind.outside or kind.inside for kind in kinds]
    return Cluster(
        _slowest_device([kind.device for kind in kinds]),
        min((kind.inside for kind in kinds), key=_speed),
        min(kind.per_node for kind in kinds),
        min(outside, key=_speed),
        sum(kind.devices or 0 for kind in kinds) or None,
    )


def _slowest_device(devices: Sequence[Device]) -> Device:
    """Return a device with the lowest rate, bandwidth and memory of any device, and with the highest overhead.

    Peaks are those that give the lowest rates at the highest fraction of the peak.
    """
    device = replace(
        devices[0],
        name=_joined(d.name for d in devices),
        source=_joined(sorted(d.source for d in devices)),
        attention=_least(d.attention for d in devices),
        addressable=_least((d.memory, d.available) for d in devices),
        **{name: min(getattr(d, name) for d in devices) for name in ("bandwidth", "memory", "units")},
        **{name: max(getattr(d, name) for d in devices) for name in ("reach", "reach8", "reach4", "overhead")},
    )
    return replace(device, flops=_lowest_rates(devices, device))


def _least(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the smallest first number and the smallest second number."""
    firsts, seconds = zip(*pairs, strict=True)
    return min(firsts), min(seconds)


def _joined(names: Iterable[str]) -> str:
    """Return the names, each once."""
    return " + ".join(dict.fromkeys(names))


def _lowest_rates(devices: Sequence[Device], slowest: Device) -> dict[torch.dtype, float]:
    """Return the peaks by dtype at which `slowest` has the lowest rate of the devices."""
    dtypes = sorted(set[torch.dtype]().union(*(d.flops for d in devices)), key=str)
    shares = replace(slowest, flops=dict.fromkeys(dtypes, 1.0))
    return {t: min(d.rate(t) for d in devices) / shares.share(t) for t in dtypes}


def _speed(link: Link) -> float:
    return link.bandwidth * link.reach


_USUAL = {
    "V100": ("NVLink2", "InfiniBand-HDR"),
    "A100-40GB": ("NVLink3", "InfiniBand-HDR"),
    "A100": ("NVLink3", "InfiniBand-HDR"),
    "H100": ("NVLink4", "InfiniBand-NDR"),
    "H200": ("NVLink4", "InfiniBand-NDR"),
    "B200": ("NVLink5", "InfiniBand-NDR"),
    "A100-PCIe": ("PCIe4", "InfiniBand-HDR"),
    "A800": ("NVLink3-400", "InfiniBand-HDR"),
    "H100-HBM2e": ("NVLink4", "RoCE-400"),
    "H800": ("NVLink4-400", "InfiniBand-NDR"),
    "B300": ("NVLink5", "InfiniBand-XDR"),
    "GB200": ("NVLink5 of 72", "InfiniBand-NDR"),
    "GB300": ("NVLink5 of 72", "InfiniBand-XDR"),
    "MI300X": ("xGMI", "RoCE-400"),
    "MI325X": ("xGMI", "RoCE-400"),
    "Ascend-910B": ("HCCS", "RoCE-200"),
    "H100-PCIe": ("PCIe5", "InfiniBand-NDR"),
    "H100-NVL": ("PCIe5", "InfiniBand-NDR"),
    "L40S": ("PCIe4", "Ethernet-100"),
    "L4": ("PCIe4", "Ethernet-100"),
    "A10G": ("PCIe4", "Ethernet-100"),
    "RTX-A6000": ("PCIe4", "Ethernet-100"),
    "RTX-3090": ("PCIe4", "Ethernet-100"),
    "RTX-4090": ("PCIe4", "Ethernet-100"),
    "MI355X": ("xGMI4", "RoCE-400"),
    "Gaudi2": ("Gaudi2 mesh", "Gaudi2 ports"),
    "Gaudi3": ("Gaudi3 mesh", "Gaudi3 ports"),
    "cpu core": ("memory of one host", None),
}
"""Device → its usual links: inside a node, and between nodes."""
_TOGETHER = {"GB200": 72, "GB300": 72, "cpu core": 8}
"""Device → number of devices that share the links inside a node; 8 for devices that are not listed."""


def cluster_of(name: str) -> Cluster:
    """Return the usual cluster of a known device.

    Raises:
        CostError: the device is unknown.
    """
    device = device_of(name)
    inside, outside = _USUAL[name]
    return Cluster(device, link_of(inside), _TOGETHER.get(name, 8), None if outside is None else link_of(outside))
