"""Communication of the ranks of a plan: every kind with its count, bytes, link and seconds.

Counts are those of one step on the pipeline rank with the most layers. `predict` sums the same prices, and a test
compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.cost import Cluster, Habits, Numbers
from meshwright.reshard import CollectiveKind

from ..plan_data.account import Communication
from ..plan_data.plan import Plan
from .degrees import microbatches, tokens
from .expert_time import ExpertTime
from .layer_shares import rank_layers
from .layer_time import HALF
from .predict import StepTime
from .sizes import Transformer
from .software import MESHWRIGHT, Software


def communications(
    model: Transformer, plan: Plan, cluster: Cluster, software: Software = MESHWRIGHT
) -> tuple[Communication, ...]:
    """Return the communication of a step, starting with that inside layers."""
    return tuple(_PlanCommunication(model, plan, cluster, software).rows())


def link_name(cluster: Cluster, ranks: float, together: float) -> str:
    """Return the link of a collective of `ranks` ranks, of which `together` share a node, as text."""
    if ranks <= together or cluster.outside is None:
        return f"{cluster.inside.name}, inside a node"
    return f"{cluster.outside.name}, between nodes"


class _PlanCommunication:
    def __init__(self, model: Transformer, plan: Plan, cluster: Cluster, software: Software) -> None:
        self.model, self.plan, self.cluster, self.software = model, plan, cluster, software
        self.step = StepTime(model, plan, cluster, software, Habits())
        self.microbatches = float(microbatches(plan))
        ranks = rank_layers(model, plan.schedule, plan.pp, plan.chunks)
        dense, sparse = max(((own.dense, own.sparse) for own in ranks), key=sum)
        self.passes = ("forward", "backward", *(["recomputed"] if plan.recompute == "full" else []))
        self.exchanges = (*self.passes, *(["recomputed"] if self.step.passes.repeats("experts") else []))
        self.layers, self.sparse = float(dense + sparse), float(sparse)

    def rows(self) -> Iterator[Communication]:
        if self.plan.tp > 1:
            yield from self._tensor_parallel()
        if self.plan.cp > 1:
            yield from self._rings()
        if self.step.passes.experts is not None and self.plan.ep > 1:
            yield from self._experts(self.step.passes.experts)
        if self.plan.pp > 1:
            yield self._messages()
        if self.plan.dp * self.plan.cp > 1:
            yield from self._gathered() if self.plan.zero == 3 else self._synchronised()

    def _collective(
        self,
        kind: str,
        what: str,
        where: str,
        nbytes: Numbers,
        ranks: Numbers,
        together: Numbers,
        count: float,
        seconds: Numbers,
        shown: float | None,
    ) -> Communication:
        """Return a row of `count` collectives that take `seconds` each, of which the fraction `shown` is exposed."""
        whole = count * float(seconds)
        link = link_name(self.cluster, float(ranks), float(together))
        return Communication(
            kind, what, where, link, count, float(nbytes), whole, None if shown is None else whole * shown
        )

    def _tensor_parallel(self) -> Iterator[Communication]:
        p = self.plan
        kind = "reduce-scatter and all-gather" if p.sequence_parallel else "all-reduce"
        nbytes, together = self.step.layers.joined(), min(p.tp, self.cluster.per_node)
        each = self.step.layers.joining()
        for where in self.passes:
            what = "its gradient" if where == "backward" else "the residual"
            yield self._collective(
                kind,
                f"{what} over tp",
                f"twice per layer, {where}",
                nbytes,
                p.tp,
                together,
                2 * self.layers * self.microbatches,
                each,
                self.software.tensor,
            )

    def _rings(self) -> Iterator[Communication]:
        p, m = self.plan, self.model
        nbytes = tokens(p) * (HALF * 2 * m.kv_heads_of(p.tp) * m.head_dim)
        together = np.clip(self.cluster.per_node / p.tp, 1, p.cp)
        each = nbytes / self.cluster.bandwidth(p.cp, together)
        hidden = 1 - float(self.step.layers.ring()) / max((p.cp - 1) * float(each), 1e-30)
        for where in self.passes:
            times = 2 if where == "backward" else 1
            yield self._collective(
                "message",
                "keys and values over cp",
                f"a ring in each layer, {where}",
                nbytes,
                p.cp,
                together,
                times * (p.cp - 1) * self.layers * self.microbatches,
                each,
                1 - hidden,
            )

    def _experts(self, x: ExpertTime) -> Iterator[Communication]:
        p, together = self.plan, min(self.plan.ep, self.cluster.per_node)
        nbytes, each = x.routed(), x.exchange()
        for where in self.exchanges:
            yield self._collective(
                "all-to-all",
                "tokens over ep",
                f"to the experts and back, {where}",
                nbytes,
                p.ep,
                together,
                2 * self.sparse * self.microbatches,
                each,
                self.software.exchange,
            )

    def _messages(self) -> Communication:
        p = self.plan
        part = 1 / p.tp if self.software.scattered else 1.0
        inside = self.cluster.per_node if p.ranks <= self.cluster.per_node else 1
        return self._collective(
            "message",
            "the residual, and its gradient",
            "between stages",
            tokens(p) * HALF * self.model.hidden * part,
            p.pp,
            p.pp if inside > 1 else 1,
            2 * p.chunks * self.microbatches,
            self.step.stages().message,
            None,
        )

    def _synchronised(self) -> Iterator[Communication]:
        step, shown = self.step, self.software.exposed
        for ranks, parameters, names in zip(step.replicas(), step.parameters, ("", "of experts "), strict=True):
            if ranks.ranks == 1 or not float(parameters):
                continue
            kinds: list[tuple[CollectiveKind, str, float, Numbers]] = [
                (
                    "all-reduce" if step.sums_whole else "reduce-scatter",
                    f"gradients {names}over dp",
                    float(step.reductions),
                    parameters * self.software.reduced,
                )
            ]
            if self.plan.zero:
                kinds.append(("all-gather", f"updated parameters {names}over dp", 1.0, parameters * HALF))
            for kind, what, count, nbytes in kinds:
                where = "after the backward pass" if count == 1 else "after each microbatch"
                each = self.cluster.meeting(kind, nbytes, ranks.ranks, ranks.together)
                yield self._collective(kind, what, where, nbytes, ranks.ranks, ranks.together, count, each, shown)

    def _gathered(self) -> Iterator[Communication]:
        ranks, _ = self.step.replicas()
        each, count = self.step.gathers(), self.layers * self.microbatches
        again = float(each.again) * count
        rows = (
            ("all-gather", "parameters over dp", "each layer, forward", each.layer, each.gather, count),
            ("all-gather", "parameters over dp", "each layer, backward", each.layer, each.gather, again),
            ("reduce-scatter", "gradients over dp", "each layer, backward", each.reduced, each.scatter, count),
            ("all-gather", "tables of tokens over dp", "once, at both ends", each.table, each.tables, 3),
        )
        for kind, what, where, nbytes, seconds, times in rows:
            yield self._collective(kind, what, where, nbytes, ranks.ranks, ranks.together, times, seconds, None)
