"""Seconds of conversions along one axis of ranks, and of reducing gradients over replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.cost import Cluster, Numbers
from meshwright.reshard import CollectiveKind, transposed

from .forms import AxisForm, collective
from .memory_saving import NOTHING, MemorySaving

EXPOSED = 0.3
"""Fraction of the conversions of parameters and their gradients that is not hidden behind operators."""


@dataclass(frozen=True)
class Prices:
    """Properties of the axis and of the step that determine seconds and bytes.

    The axis has `ranks` ranks, of which `together` share a node. `share` is the fraction of a batch that the axis has.
    `byte` is the price of a held byte, in seconds. There are `replicas` replicas, with the memory-saving options
    `saving`. The optimizer has `states` states, each as large as its parameter. `alive` is the number of microbatches
    in flight, whose results are held.
    """

    cluster: Cluster
    ranks: int
    together: int
    share: float = 1.0
    byte: float = 0.0
    replicas: int = 1
    saving: MemorySaving = NOTHING
    states: float = 2.0
    alive: float = 1.0

    def convert(self, have: AxisForm, need: AxisForm, nbytes: float, trains: bool) -> float:
        """Return the seconds of a conversion, and of its transpose if a gradient comes back.

        An all-to-all is priced as a gather: the layouts of parameters and of a batch do not request it, so the program
        may gather instead. Requested ones are priced by `exchanged`.
        """
        forward = self._one(have, need, nbytes)
        return forward + self._one(*transposed(have, need), nbytes) if trains else forward

    def exchanged(self, nbytes: float, trains: bool) -> float:
        """Return the seconds of an all-to-all that reshards a value along another dim, and of that of its gradient."""
        seconds = float(self.cluster.meeting("all-to-all", nbytes / self.ranks, self.ranks, self.together))
        return seconds * (1 + trains)

    def _one(self, have: AxisForm, need: AxisForm, nbytes: float) -> float:
        kind = collective(have, need)
        if kind is None:
            return self._own_part(nbytes) if need.kind == "cut" and have.kind != "cut" else 0.0
        return float(self.cluster.meeting(kind, nbytes, self.ranks, self.together))

    def _own_part(self, nbytes: float) -> float:
        """Return the seconds in which a rank copies its part of a value that it has whole."""
        device = self.cluster.device
        return device.overhead + 2 * nbytes / self.ranks / device.bandwidth

    def reduced(self, nbytes: Numbers) -> Numbers:
        """Return the exposed seconds of reducing `nbytes` of gradients over replicas, with the gathers of ZeRO."""
        replicas = max(1, min(self.replicas, self.cluster.per_node // self.ranks))
        kinds: Mapping[CollectiveKind, int] = {"all-reduce": 1}
        if self.saving.zero:
            kinds = {"reduce-scatter": 1, "all-gather": 2 if self.saving.zero == 3 else 1}
        return EXPOSED * sum(
            n * self.cluster.meeting(kind, nbytes, self.replicas, replicas) for kind, n in kinds.items()
        )
