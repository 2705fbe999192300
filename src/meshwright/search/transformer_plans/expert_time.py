"""Seconds of the experts of one layer on one rank, for any number of plans at once.

A router chooses experts for each token. Tokens travel to the ranks of their experts and back. A rank computes the
products of its experts in groups, one group for each expert. Ranks of a tensor-parallel group share the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost import Numbers

from .degrees import tokens
from .layer_time import BESIDE, HALF, LayerTime, PassSeconds
from .sizes import Experts


@dataclass(frozen=True)
class ExpertTime:
    """Seconds of the experts of a layer; `layers` has the plan, the cluster and the software."""

    layers: LayerTime
    experts: Experts

    def seconds(self) -> PassSeconds:
        """Return the seconds of the router, the experts, the shared expert, and the exchange that nothing hides."""
        return self.router() + self.products() + self.activation() + self.moved() + self.shared() + self.exposed()

    # --- computation

    @property
    def tokens(self) -> Numbers:
        """Number of tokens that a rank sends to experts."""
        return tokens(self.layers.plan) / self.layers.plan.tp

    @property
    def rows(self) -> Numbers:
        """Number of rows that the experts of the fullest rank compute."""
        return self.tokens * self.experts.fullest(self.layers.plan.ep) * self.experts.chosen

    @property
    def own(self) -> Numbers:
        """Number of experts of a rank."""
        return self.experts.count / self.layers.plan.ep

    def router(self) -> PassSeconds:
        """Return the seconds of the product with the router, and of the choice of experts."""
        h, count, kernels = self.layers.model.hidden, self.experts.count, self.layers.kernels
        product = kernels.matmul(self.tokens, count, h)
        return PassSeconds(product, 2 * product) + self.layers.stream(self.tokens * 8 * count, self.tokens * 12 * count)

    def products(self) -> PassSeconds:
        """Return the seconds of the products of the rank's experts."""
        h, each, at = self.layers.model.hidden, self.rows / self.own, self.layers.software
        slower = at.gated_gradient if at.fused_experts else 1.0
        return self._grouped(each, 2 * self.experts.ffn, h) + self._grouped(each, h, self.experts.ffn, slower)

    def activation(self) -> PassSeconds:
        """Return the seconds of the activation of experts, of their biases, and of casts of their operands.

        A fused kernel casts the results of the activation on the way.
        """
        h, f, at = self.layers.model.hidden, self.experts.ffn, self.layers
        casts = at.software.casts * self.rows if at.is_narrow else 0.0
        forward, backward = (0.0, 0.0) if at.software.fused_experts else (casts * f, casts * 2 * f)
        biased = self.rows * (h + 2 * f) * (at.kernels.habits.biased / 2) if self.experts.biased else 0.0
        forward, backward = forward + casts * h + biased, backward + casts * h + biased
        return at.stream(self.rows * 6 * f + forward, self.rows * 9 * f + backward)

    def moved(self) -> PassSeconds:
        """Return the seconds of sorting rows by expert and of adding up the results of each token."""
        nbytes = self.rows * self.layers.model.hidden
        return self.layers.stream(nbytes * 4, nbytes * 6) * 2.0

    def shared(self) -> PassSeconds:
        """Return the seconds of the expert that all tokens go to."""
        return self.layers.mlp(self.experts.shared)

    def _grouped(self, m: Numbers, n: Numbers, k: Numbers, slower: float = 1.0) -> PassSeconds:
        """Return the seconds of `m k * k n -> m n` for each expert; its gradient by inputs may be slower."""
        kernels, dtype, groups = self.layers.kernels, self.layers.dtype, self.own
        forward = kernels.matmul(m, n, k, groups, dtype)
        inputs, weights = slower * kernels.matmul(m, k, n, groups, dtype), kernels.matmul(n, k, m, groups, dtype)
        return PassSeconds(forward, inputs + weights, weights) * kernels.habits.grouped

    # --- communication

    def exposed(self) -> PassSeconds:
        """Return the seconds that the exchange adds: what nothing hides, and the slowdown of what hides the rest."""
        at, several = self.layers.software, np.asarray(self.layers.plan.ep) > 1
        waits = 0.0 if "experts" in at.graphs else self.layers.kernels.habits.wait
        sent = 2 * (self.exchange() + np.where(several, waits, 0.0))
        beside = self.shared() if at.beside_shared else PassSeconds()
        shown = [np.maximum(0.0, sent * at.exchange - spent) for spent in (beside.forward, beside.backward)]
        return PassSeconds(*(seconds + BESIDE * (sent - seconds) for seconds in shown))

    def copies(self) -> tuple[Numbers, Numbers]:
        """Return how often a token is sent to ranks, and how often to nodes; its own rank and its own node count.

        The experts of a token are on random ranks. The token is sent once for each expert, or once to each rank and
        once to each node that has some of these experts.
        """
        x, ep = self.experts, np.asarray(self.layers.plan.ep, dtype=float)
        nodes = np.maximum(ep / np.minimum(ep, self.layers.node), 1.0)
        if not self.layers.software.once:
            return np.full(np.shape(ep), float(x.chosen)), np.full(np.shape(ep), float(x.chosen))
        across = _distinct(nodes, x.chosen)
        return _distinct(ep, x.chosen), across if x.nodes is None else np.minimum(across, x.nodes)

    def routed(self) -> Numbers:
        """Return the bytes that a rank sends to experts on average, in 16 bits."""
        return self.tokens * self.copies()[0] * (HALF * self.layers.model.hidden)

    def exchange(self) -> Numbers:
        """Return the seconds of sending tokens to experts, or back, on average of both ways."""
        at, x = self.layers, self.experts
        ranks, nodes = self.copies()
        mean = (at.software.dispatched + HALF) / 2
        nbytes = self.routed() * x.fullest(at.plan.ep) * (mean / HALF)
        together = np.minimum(at.plan.ep, at.node)
        return at.cluster.meeting("all-to-all", nbytes, at.plan.ep, together, nodes / ranks)


def _distinct(places: Numbers, chosen: int) -> Numbers:
    """Return the number of places, of so many, that have at least one of `chosen` experts at random."""
    return places * (1 - (1 - 1 / places) ** chosen)
