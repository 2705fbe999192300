"""Seconds of a whole layer: its computation and collectives, the host that starts them, and what is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.cost import Habits, Numbers

from .degrees import Degrees
from .expert_time import ExpertTime
from .layer_time import HALF, LayerTime, PassSeconds
from .schedule_facts import FLUSH, facts_of
from .sizes import Transformer
from .software import RepeatedPart, Software

ATTENTION = 0.6
"""Share of attention in the seconds that a host needs for a layer; the rest is for a feed-forward part or a router."""
HOSTS = 0.12
"""Slowdown of hosts per doubling of a tensor-parallel group, which waits for its slowest host."""


@dataclass(frozen=True)
class LayerPass:
    """Seconds of the passes of a layer, without and with experts, under a plan."""

    layers: LayerTime
    habits: Habits

    @property
    def model(self) -> Transformer:
        return self.layers.model

    @property
    def plan(self) -> Degrees:
        return self.layers.plan

    @property
    def software(self) -> Software:
        return self.layers.software

    @cached_property
    def experts(self) -> ExpertTime | None:
        return None if self.model.experts is None else ExpertTime(self.layers, self.model.experts)

    @cached_property
    def dense(self) -> PassSeconds:
        """Seconds of a layer without experts."""
        return self._whole(self.layers.dense(), None)

    @cached_property
    def sparse(self) -> PassSeconds:
        """Seconds of a layer with experts; 0 if the model has none."""
        if self.experts is None:
            return PassSeconds()
        return self._whole(self.layers.attention() + self.experts.seconds(), self.experts)

    def _whole(self, computed: PassSeconds, experts: ExpertTime | None) -> PassSeconds:
        """Return the seconds of a layer with its collectives and recomputation.

        A layer is never faster than a host starts its operators.
        """
        spent, host = computed + self.layers.meetings(), self.host_seconds(experts)
        forward = np.maximum(spent.forward, host[0])
        again = self._again(spent, experts)
        again = np.maximum(again, host[0]) if self.plan.recompute == "full" else again
        moved = self._stowed()
        backward, weights = self._launched(spent, host[1])
        return PassSeconds(forward + moved, backward + again + moved, weights)

    # --- the host

    def host_seconds(self, experts: ExpertTime | None) -> tuple[Numbers, Numbers]:
        """Return the seconds that a host needs to start a layer's operators, forward and backward.

        It starts experts one by one, unless one kernel has them all. It takes no time for parts that graphs start.
        """
        started, habits = self.software.graphs, self.habits
        second = "feed-forward" if experts is None else "router"
        share = (0.0 if "attention" in started else ATTENTION) + (0.0 if second in started else 1 - ATTENTION)
        slower = 1 + HOSTS * np.log2(self.plan.tp)
        forward, backward = habits.host[0] * share, habits.host[1] * share
        if experts is None or "experts" in started:
            return forward * slower, backward * slower
        each = 0.0 if self.software.fused_experts else experts.own * habits.expert
        return (forward + habits.exchange + each) * slower, (backward + habits.exchange + 2 * each) * slower

    def _launched(self, spent: PassSeconds, host: Numbers) -> tuple[Numbers, Numbers]:
        """Return the seconds of a backward pass and of its weight gradients, for a host that needs `host` seconds.

        A schedule that runs weight gradients alone starts two passes, each with half of the operators.
        """
        if facts_of(self.plan.schedule).filling == FLUSH:
            return np.maximum(spent.backward, host), spent.weights
        weights = np.maximum(spent.weights, host / 2)
        return np.maximum(spent.backward - spent.weights, host / 2) + weights, weights

    # --- recomputation

    def _stowed(self) -> Numbers:
        """Return the seconds of moving a layer's input to the memory of the host, or back."""
        if self.software.stowed is None or self.plan.recompute != "full":
            return 0.0
        return self.layers.rows * (HALF * self.model.hidden / self.software.stowed)

    def _again(self, spent: PassSeconds, experts: ExpertTime | None) -> Numbers:
        match self.plan.recompute:
            case "none":
                return 0.0
            case "selective" if self.software.selective is not None:
                return self.software.selective * spent.forward
            case "selective":
                return self._repeated(experts)
            case _:
                return spent.forward - self._last_product(experts)

    def repeats(self, part: RepeatedPart) -> bool:
        """True if selective recomputation repeats this part of a layer."""
        by_parts = self.plan.recompute == "selective" and self.software.selective is None
        return by_parts and part in self.software.repeated

    def _last_product(self, experts: ExpertTime | None) -> Numbers:
        """Return the seconds of the product that recomputation leaves out, because nothing needs its result."""
        if experts is not None or not self.software.stops_early or not self.model.ffn:
            return 0.0
        return self.layers.linear(self.model.hidden, self.model.ffn / self.plan.tp).forward

    def _repeated(self, experts: ExpertTime | None) -> Numbers:
        """Return the seconds of the parts of a layer that selective recomputation repeats."""
        at, width = self.layers, self.model.ffn
        every: dict[RepeatedPart, Callable[[], PassSeconds]] = {
            "scores": at.core,
            "up-projections": at.up_projections,
            "norms": at.norms,
        }
        if experts is None:
            every |= {"activation": lambda: at.activation(width), "feed-forward": lambda: at.mlp(width)}
        else:
            every |= {
                "activation": experts.activation,
                "experts": experts.seconds,
                "shared expert": experts.shared,
            }
        seconds: Numbers = 0.0
        for part in sorted(self.software.repeated):
            if part in every:
                seconds = seconds + every[part]().forward
        return seconds
