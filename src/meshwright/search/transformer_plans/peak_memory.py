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
from .layer_shares import RankLayers, different_ranks, rank_layers
from .layer_time import HALF
from .schedule_facts import microbatches_in_flight
from .sizes import Transformer
from .software import MESHWRIGHT, Software
from .states import state_bytes

SELECTED = 0.55
"""Fraction of the kept bytes of a layer that is left if every other product is recomputed.

It has the result of the layer's last product, which a program keeps unless it is compiled.
"""


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
        """Return the fullest rank of each pipeline; of ranks with like layers, the first has the most microbatches."""
        ranks = [self._rank(own) for own in different_ranks(self.model, self.plan)]
        shape = np.broadcast_shapes(*(np.shape(x) for x in ranks[0].values()))
        totals = np.stack([np.broadcast_to(sum(parts.values()), shape) for parts in ranks])
        fullest = np.argmax(totals, axis=0)[np.newaxis]
        each = {name: np.stack([np.broadcast_to(rank[name], shape) for rank in ranks]) for name in ranks[0]}
        parts = {name: np.take_along_axis(nbytes, fullest, axis=0)[0] for name, nbytes in each.items()}
        return Held(np.max(totals, axis=0), parts)

    def each(self, ranks: int) -> list[dict[str, Numbers]]:
        """Return the bytes of all ranks of one plan's pipeline, from the first to the last."""
        return [self._rank(own) for own in rank_layers(self.model, self.plan.schedule, ranks, int(self.plan.chunks))]

    def _rank(self, own: RankLayers) -> dict[str, Numbers]:
        m, states = self.model, state_bytes(self.model, self.plan, self.software, own)
        kept, working = self._kept(own.dense, own.sparse) * self._alive(own.rank), self._working()
        logits = tokens(self.plan) * (m.vocab / self.plan.tp) * (1 + m.ahead)
        loss = np.where(own.last, logits * self.software.logit, 0.0)
        return {
            "parameters and gradients": states.weights,
            "optimizer": states.optimizer,
            "gathered": states.gathered,
            "activations": kept + working,
            "loss": np.maximum(loss - working, 0.0) if self.software.reuses else loss,
            "brief": self._brief(np.logical_or(own.first, own.last)),
        }

    # --- activations

    def _alive(self, rank: Numbers) -> Numbers:
        p = self.plan
        return microbatches_in_flight(p.schedule, p.pp, microbatches(p), p.chunks, rank)

    def _kept(self, dense: Numbers, sparse: Numbers) -> Numbers:
        """Return the bytes that a rank's layers keep of one microbatch until its backward pass."""
        count = dense + sparse
        kept = (dense * self._dense() + sparse * self._sparse()) * (1 - self.software.offloaded)
        match self.plan.recompute:
            case "none":
                return kept
            case "selective" if self.software.fused_attention:
                unneeded = self._rows * HALF * self.model.hidden if self.software.compiled else 0.0
                return kept * SELECTED - count * unneeded
            case "selective":
                return kept - count * self._scores()
            case _:
                layers = (1.0 if self.software.stowed is None else 0.0) * count
                layers += np.where(self.plan.pp > 1, self.software.outputs, 0.0)
                return layers * self._rows * HALF * self.model.hidden

    def _working(self) -> Numbers:
        """Return the bytes of the recomputed values of one layer, which are there after those of the loss."""
        most = np.maximum(self._dense(), self._sparse() if self.model.experts else 0.0)
        match self.plan.recompute:
            case "none":
                return 0.0
            case "selective":
                return 0.5 * most if self.software.fused_attention else self._scores()
            case _:
                return (2 if self.software.stops_early else 1) * most

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
            wide, narrow = 4 * m.heads * m.head_dim, 4 * m.kv_heads_of(t) * m.head_dim
        else:
            wide = m.heads * (4 * m.key_width + 4 * m.value_width)
            narrow = 4 * x.query + 4 * x.key + 2 * x.rotary
        return self._rows * 4.0 * m.hidden + tokens(self.plan) * ((wide + 4 * m.heads) / t + narrow)

    def _sparse(self) -> Numbers:
        m, x = self.model, self.model.experts
        if x is None:
            return 0.0
        each = (
            x.fullest(self.plan.ep) * (x.chosen * (4 * m.hidden + 6 * x.ffn)) / self.plan.tp
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
