"""Bytes of the fullest rank under plans: parameters, gradients, optimizer states, activations, and temporary values.

A layer keeps what its operators need for the backward pass: the inputs of linear maps and norms, the operands and the
result of attention, and the operands of the activation. Attention that is not fused keeps its scores too (arXiv
2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost import Numbers

from ..plan_data.plan import Plan
from .degrees import Degrees, microbatches, residual_tokens, tokens
from .layer_shares import LayerShare, shares
from .layer_time import HALF
from .sizes import Transformer
from .software import MESHWRIGHT, Software

MOMENTS = 12.0
"""Bytes of Adam's moments and of a master copy, per parameter."""
SELECTED = 0.55
"""Fraction of the kept bytes of a layer that is left if every other product is recomputed."""
SINGLE = 16.0
"""Bytes per parameter if weights, gradients and moments are in single precision."""


@dataclass(frozen=True)
class Held:
    """Peak bytes of the fullest rank, and their parts; one element per plan."""

    nbytes: Numbers
    parts: dict[str, Numbers]


def hold(model: Transformer, plan: Degrees, software: Software = MESHWRIGHT) -> Held:
    """Return the peak bytes of the fullest rank."""
    return _Peak(model, plan, software).held()


def hold_each(model: Transformer, plan: Plan, software: Software = MESHWRIGHT) -> list[dict[str, Numbers]]:
    """Return the peak bytes of each rank of a plan's pipeline, by kind."""
    return _Peak(model, plan, software).each(plan.pp)


@dataclass(frozen=True)
class _Peak:
    model: Transformer
    plan: Degrees
    software: Software

    def held(self) -> Held:
        """Return the fullest of the pipeline's first rank, which has the most microbatches, its second and its last."""
        pp = np.asarray(self.plan.pp, dtype=float)
        first, other, last = shares(self.model.layers, self.model.dense_layers, pp)
        candidates = [
            self._rank(first, 0.0, True, pp == 1),
            self._rank(other, np.minimum(1.0, pp - 1), pp == 1, pp == 1),
            self._rank(last, pp - 1, pp == 1, True),
        ]
        totals = np.stack([np.broadcast_to(sum(c.values()), np.shape(pp)) for c in candidates])
        fullest = np.argmax(totals, axis=0)
        names = candidates[0]
        parts = {n: np.choose(fullest, [np.broadcast_to(c[n], np.shape(pp)) for c in candidates]) for n in names}
        return Held(np.max(totals, axis=0), parts)

    def each(self, ranks: int) -> list[dict[str, Numbers]]:
        """Return the bytes of all ranks of one plan's pipeline, from the first to the last."""
        first, other, last = shares(self.model.layers, self.model.dense_layers, float(ranks))
        layers = [first, *[other] * (ranks - 2), last] if ranks > 1 else [first]
        return [self._rank(own, float(r), r == 0, r == ranks - 1) for r, own in enumerate(layers)]

    def _rank(self, layers: LayerShare, rank: Numbers, first: Numbers, last: Numbers) -> dict[str, Numbers]:
        m = self.model
        own, experts = self._parameters(*layers, first, last)
        return {
            "parameters and gradients": self._weights(own, experts),
            "optimizer": self._moments(own, experts),
            "activations": self._activations(*layers, self._alive(rank)),
            "loss": np.where(last, tokens(self.plan) * (m.vocab / self.plan.tp) * self.software.logit, 0.0),
            "brief": self._brief(np.logical_or(first, last)),
        }

    # --- state

    def _parameters(self, dense: Numbers, sparse: Numbers, first: Numbers, last: Numbers) -> tuple[Numbers, Numbers]:
        m, t = self.model, self.plan.tp
        own = m.attention_parameters * (dense + sparse) + m.mlp_parameters * dense
        own = own / t + sparse * m.shared_parameters / t
        tables = np.where(first, 1.0, 0.0) + np.where(np.logical_and(last, ~np.logical_and(first, m.tied)), 1.0, 0.0)
        experts = sparse * m.expert_parameters / self.plan.ep
        return own + tables * m.embedding_parameters / t, experts

    @property
    def _replicas(self) -> Numbers:
        return self.plan.dp * self.plan.cp

    def _weights(self, own: Numbers, experts: Numbers) -> Numbers:
        """Return the bytes of half-precision weights and their gradients; with ZeRO-3, also of the layers in use."""
        zero, total = self.plan.zero, own + experts
        gradient = np.where(zero >= 2, self.software.gradient / self._replicas, self.software.gradient)
        whole = total * (HALF + gradient)
        m = self.model
        layer = (m.attention_parameters + max(m.mlp_parameters, m.shared_parameters)) / self.plan.tp
        used = layer * (2 * HALF + 4) + m.embedding_parameters / self.plan.tp * HALF
        each = SINGLE - 8 if self.software.hosted is None else HALF + self.software.gradient
        return np.where(zero == 3, total * each / self._replicas + used, whole)

    def _moments(self, own: Numbers, experts: Numbers) -> Numbers:
        if self.software.hosted is not None:
            return np.zeros_like(own)
        zero = self.plan.zero
        own_share = np.where(zero > 0, self._replicas, 1.0)
        expert_share = np.where(zero > 0, np.maximum(1.0, self._replicas / self.plan.ep), 1.0)
        each = np.where(zero == 3, 8.0, MOMENTS)
        return own * each / own_share + experts * each / expert_share

    # --- activations

    def _alive(self, rank: Numbers) -> Numbers:
        """Return the largest number of microbatches in flight on a rank."""
        p, m, v = self.plan.pp, microbatches(self.plan), self.plan.chunks
        match self.plan.schedule:
            case "GPipe":
                most = m
            case "ZB-2p" | "ZB-H2":
                most = 2 * p - 1
            case "ZB-1p" | "ZB-H1" | "ZB-V":
                most = p
            case "Interleaved 1F1B":
                most = (p * (v - 1) + 1 + 2 * (p - rank - 1)) / v
            case _:
                most = p - rank
        return np.where(p > 1, np.minimum(m, most), 1.0)

    def _activations(self, dense: Numbers, sparse: Numbers, alive: Numbers) -> Numbers:
        count, kept = dense + sparse, dense * self._dense() + sparse * self._sparse()
        most = np.maximum(self._dense(), self._sparse() if self.model.experts else 0.0)
        match self.plan.recompute:
            case "none":
                return kept * alive
            case "selective" if self.software.fused_attention:
                return kept * SELECTED * alive + 0.5 * most
            case "selective":
                scores = count * self._scores()
                return (kept - scores) * alive + self._scores()
            case _:
                layers = (1.0 if self.software.stowed is None else 0.0) * count
                layers += np.where(self.plan.pp > 1, self.software.outputs, 0.0)
                working = 2 if self.software.stops_early else 1
                return layers * self._rows * HALF * self.model.hidden * alive + working * most

    @property
    def _rows(self) -> Numbers:
        return residual_tokens(self.plan)

    def _dense(self) -> Numbers:
        """Return the bytes that a layer without experts keeps of one microbatch."""
        m, t = self.model, self.plan.tp
        if not self.software.fused_attention:
            inner = 24 * m.hidden if not m.gated else 8 * m.hidden + 6 * m.ffn
            return self._rows * 10.0 * m.hidden + tokens(self.plan) * inner / t + self._scores()
        feed = tokens(self.plan) * (6 if m.gated else 4) * m.ffn / t
        return self._attention() + self._rows * 4.0 * m.hidden + feed

    def _attention(self) -> Numbers:
        m, t, x = self.model, self.plan.tp, self.model.latent
        if x is None:
            wide, narrow = 2 * (m.heads + 2 * m.kv_heads) * m.head_dim + 2 * m.heads * m.head_dim, 0
        else:
            wide = m.heads * (4 * m.key_width + 4 * m.value_width)
            narrow = 4 * x.query + 4 * x.key + 2 * x.rotary
        return self._rows * 4.0 * m.hidden + tokens(self.plan) * ((wide + 4 * m.heads) / t + narrow)

    def _sparse(self) -> Numbers:
        m, x = self.model, self.model.experts
        if x is None:
            return 0.0
        each = (
            x.fullest(self.plan.ep) * (x.chosen * (4 * m.hidden + 6 * x.ffn))
            + 8 * x.count
            + 6 * x.shared / self.plan.tp
        )
        return self._attention() + self._rows * 4.0 * m.hidden + tokens(self.plan) * each

    def _scores(self) -> Numbers:
        keys = self.plan.sequence / self.plan.cp
        return tokens(self.plan) * (5 * self.model.heads * keys / self.plan.tp)

    # --- temporary values

    def _brief(self, has_table: Numbers) -> Numbers:
        """Return the bytes of temporary values at the peak.

        These are a table's gradient before it is added, gradients inside a layer, and sums that are not reduced yet.
        """
        m, t = self.model, self.plan.tp
        table = np.where(has_table, HALF * m.embedding_parameters / t, 0.0)
        summed = np.where(t > 1, 6.5 + 4.0 * self.software.tensor, 2.0)
        inner = tokens(self.plan) * (6.0 * m.ffn / t + summed * m.hidden)
        return np.where(self.plan.zero == 3, 0.0, table) + inner
