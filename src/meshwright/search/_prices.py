"""What conversions along one axis of ranks take, and how a step on it saves memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.cost import Cluster, Meeting, Numbers

from ._forms import Form, collective, dual
from ._saving import NOTHING, Saving

EXPOSED = 0.3
"""The part of conversions of parameters, and of their gradients, that is not hidden behind operators."""


@dataclass(frozen=True)
class Prices:
    """What the axis is: its ranks, of which `together` share a node; the part of a batch that a rank of it has.

    `byte` is what a held byte is worth, in seconds. There are `replicas`, which do what `saving` says. The optimizer
    has so many `states`, each as large as its parameter. Of so many microbatches at once results are `alive`.
    """

    cluster: Cluster
    ranks: int
    together: int
    share: float = 1.0
    byte: float = 0.0
    replicas: int = 1
    saving: Saving = NOTHING
    states: float = 2.0
    alive: float = 1.0

    def convert(self, have: Form, need: Form, nbytes: float, trains: bool) -> float:
        """Seconds of a conversion, and of its transpose where a gradient comes back.

        An all-to-all counts like a gather: marks of parameters and of a batch do not ask for one, so that what runs
        may gather. Those that are asked for are `exchanged`.
        """
        return self._one(have, need, nbytes) + (self._one(dual(need), dual(have), nbytes) if trains else 0.0)

    def exchanged(self, nbytes: float, trains: bool) -> float:
        """Seconds in which a value that is cut along one dim gets to be cut along another, and its gradient back."""
        seconds = float(self.cluster.meeting("all-to-all", nbytes / self.ranks, self.ranks, self.together))
        return seconds * (1 + trains)

    def _one(self, have: Form, need: Form, nbytes: float) -> float:
        kind = collective(have, need)
        if kind is None:
            return self._own_part(nbytes) if need.kind == "cut" and have.kind != "cut" else 0.0
        return float(self.cluster.meeting(kind, nbytes, self.ranks, self.together))

    def _own_part(self, nbytes: float) -> float:
        """Seconds in which a rank copies its part of a value that it has whole."""
        device = self.cluster.device
        return device.overhead + 2 * nbytes / self.ranks / device.bandwidth

    def reduced(self, nbytes: Numbers) -> Any:
        """Seconds in which replicas bring gradients of so many bytes together, and what ZeRO keeps apart."""
        replicas = max(1, min(self.replicas, self.cluster.per_node // self.ranks))
        kinds: Mapping[Meeting, int] = {"all-reduce": 1}
        if self.saving.zero:
            kinds = {"reduce-scatter": 1, "all-gather": 2 if self.saving.zero == 3 else 1}
        return EXPOSED * sum(
            n * self.cluster.meeting(kind, nbytes, self.replicas, replicas) for kind, n in kinds.items()
        )
