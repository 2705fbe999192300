"""Devices and the links between them: seconds of a step of a conversion.

A ring carries reductions and gathers: n - 1 hops there (twice for an all-reduce), each with a piece; everything else
goes directly, all messages at once. Bytes are those that the step says the busiest of a few ranks receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.layout import Spec
from meshwright.reshard import AllGather, AllReduce, ReduceScatter, Step

from ._device import Device, device_of
from ._errors import CostError
from ._link import Link, link_of

LOOKED_AT = 64


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of `per_node` devices, linked by `inside`; every device has a share `outside` of its node's network.

    >>> cluster_of("H100")
    H100: 990 TFLOP/s bf16, 67 TFLOP/s f32, 3350 GB/s, 80 GB; 8 to a node on NVLink4; InfiniBand-NDR between nodes
    """

    device: Device
    inside: Link
    per_node: int = 8
    outside: Link | None = None

    def __post_init__(self) -> None:
        if self.per_node < 1:
            raise CostError(
                "a cluster",
                f"{self.per_node} devices to a node",
                "a node has devices",
                "Cluster(device, link, per_node=8)",
            )

    def link(self, group: Sequence[int]) -> Link:
        """The way that a collective of these ranks takes: the network where they sit in several nodes.

        All ranks of a node share what they send out, so a ring over k of them has k shares of the network.
        """
        nodes = {rank // self.per_node for rank in group}
        if len(nodes) <= 1 or self.outside is None:
            return self.inside
        shares = max(1, len(group) // len(nodes))
        usable = min(self.inside.bandwidth * self.inside.reach, shares * self.outside.bandwidth * self.outside.reach)
        return replace(self.outside, bandwidth=usable, reach=1.0)

    def seconds(self, step: Step, x: Spec) -> float:
        """Seconds of a step that is applied to a tensor of the given spec: a price for `reshard.plan`."""
        if not step.rounds(x):
            return 0.0
        ranks = x.mesh.process_ids[:LOOKED_AT]
        busiest = max(ranks, key=lambda rank: step.received(x, rank))
        group = step.group(x, busiest)
        return self.link(group).seconds(step.received(x, busiest), _hops(step, len(group)))

    def __repr__(self) -> str:
        between = f"; {self.outside.name} between nodes" if self.outside else ""
        return f"{self.device!r}; {self.per_node} to a node on {self.inside.name}{between}"


def _hops(step: Step, ranks: int) -> int:
    if isinstance(step, AllReduce):
        return 2 * (ranks - 1)
    return ranks - 1 if isinstance(step, (AllGather, ReduceScatter)) else 1


_USUAL = {
    "V100": ("NVLink2", "InfiniBand-HDR"),
    "A100-40GB": ("NVLink3", "InfiniBand-HDR"),
    "A100": ("NVLink3", "InfiniBand-HDR"),
    "H100": ("NVLink4", "InfiniBand-NDR"),
    "H200": ("NVLink4", "InfiniBand-NDR"),
    "B200": ("NVLink5", "InfiniBand-NDR"),
    "MI300X": ("xGMI", "RoCE-400"),
    "cpu core": ("memory of one host", None),
}
"""Device → the links that it usually comes with, inside a node and between nodes."""


def cluster_of(name: str) -> Cluster:
    """The usual cluster of a known device. Raises CostError for an unknown name."""
    device = device_of(name)
    inside, outside = _USUAL[name]
    return Cluster(device, link_of(inside), 8, None if outside is None else link_of(outside))
