"""Predicted seconds of a training step under plans: layers, stages, pipeline, synchronisation, optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from meshwright.cost import Cluster, Flags, Habits, KernelTimes, Numbers
from meshwright.reshard import CollectiveKind

from .degrees import Degrees, microbatches, tokens
from .layer_pass import LayerPass
from .layer_shares import different_ranks
from .layer_time import BESIDE, HALF, NARROW, LayerTime, PassSeconds, check_precision
from .schedule_facts import DOUBLE, FLUSH, check_chunks, facts_of
from .sizes import Transformer
from .software import MESHWRIGHT, Software
from .states import SINGLE, Split, copies, dense_layer, most_parameters, sparse_layer

UPDATE = 32.0
"""Bytes that Adam with a master copy reads and writes per parameter."""
SPREAD = 0.025
"""Standard deviation of the speed of equal devices of a cluster, relative to their mean.

Products took up to 14 % longer on some devices than on others of a cluster (arXiv 2510.15596), and 8 % on average of
five clusters (arXiv 2208.11035). Ranges of five deviations are usual for a hundred devices.
"""
NODE = 8
"""Ranks of the runs for which the rates of devices hold."""
BACKWARD = 2 / 3
"""Share of the backward pass in the time of a microbatch."""
STEP = 5e-3
"""Seconds of work of the host per step, besides its work for layers."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and their parts; one element per plan."""

    seconds: Numbers
    parts: dict[str, Numbers]


def predict(
    model: Transformer,
    plan: Degrees,
    cluster: Cluster,
    software: Software = MESHWRIGHT,
    habits: Habits | None = None,
    pipeline: Numbers | None = None,
) -> Prediction:
    """Return the predicted seconds of a step under a plan, or under each of many.

    `pipeline` is the seconds of all microbatches through all stages, if they are known from a table.

    >>> from meshwright.cost import cluster_of
    >>> llama = Transformer(32, 4096, 32, 8, 128, 14336, 128256)
    >>> from meshwright.search import Plan
    >>> round(float(predict(llama, Plan(dp=8, zero=1, batch=64), cluster_of("H100")).seconds), 1)
    1.7

    Raises:
        SearchError: the bubble of the schedule is not known, or it has another number of chunks; the precision is
            unknown, or slower than 16 bits on the device.
    """
    check_priced(plan, cluster)
    return StepTime(model, plan, cluster, software, habits or Habits(), pipeline).prediction()


def check_priced(plan: Degrees, cluster: Cluster) -> None:
    """Raise SearchError if a plan has no price: its bubble is not known, or its precision is not that of the device."""
    check_chunks(plan.schedule, plan.chunks)
    check_precision(plan.precision, cluster.device)


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a layer without and with experts, of the embedding, of the head, and of a message."""

    dense: PassSeconds
    sparse: PassSeconds
    before: PassSeconds
    behind: PassSeconds
    message: Numbers

    def of(self, dense: Numbers, sparse: Numbers, first: Flags, last: Flags) -> PassSeconds:
        """Return the seconds of these layers, with the embedding if they are the first, and the head if the last."""
        spent = self.dense * dense + self.sparse * sparse
        return spent + self.before * np.where(first, 1.0, 0.0) + self.behind * np.where(last, 1.0, 0.0)


class Sharing(NamedTuple):
    """Number of ranks that have the same parameters, and how many of them share a node."""

    ranks: Numbers
    together: Numbers


def stages_of(
    model: Transformer, plan: Degrees, cluster: Cluster, software: Software = MESHWRIGHT, habits: Habits | None = None
) -> StageSeconds:
    """Return the seconds that layers, embedding and head take for one microbatch."""
    return StepTime(model, plan, cluster, software, habits or Habits()).stages()


@dataclass(frozen=True)
class GatherCosts:
    """Bytes that ZeRO-3 moves for a layer and for an embedding table, and the seconds of each collective.

    `again` is the number of times that a backward pass gathers a layer. `waits` is true if the computation waits for
    it.
    """

    layer: Numbers
    reduced: Numbers
    table: Numbers
    gather: Numbers
    scatter: Numbers
    tables: Numbers
    again: Numbers
    waits: Flags


@dataclass(frozen=True)
class StepTime:
    """Parts of a step under a plan, or under each of many."""

    model: Transformer
    plan: Degrees
    cluster: Cluster
    software: Software
    habits: Habits
    simulated: Numbers | None = None
    """Seconds of the pipeline by its table, instead of its closed form."""

    @cached_property
    def kernels(self) -> KernelTimes:
        return KernelTimes(self.cluster.device, self.habits, self.slowest)

    @cached_property
    def layers(self) -> LayerTime:
        return LayerTime(self.model, self.plan, self.cluster, self.kernels, self.software)

    @cached_property
    def passes(self) -> LayerPass:
        """Seconds of whole layers."""
        return LayerPass(self.layers, self.habits)

    def prediction(self) -> Prediction:
        """Return the seconds of the step, and its parts."""
        sharded = self.plan.zero == 3
        running = np.where(sharded, self.gathering(), self.pipeline)
        parts: dict[str, Numbers] = {
            "microbatches": running,
            "gradients": np.where(sharded, 0.0, self.synchronised()),
            "accumulation": self.accumulated(),
            "optimizer": self.updated(),
            "host": np.full(np.shape(running), STEP),
        }
        return Prediction(np.sum([np.broadcast_to(p, np.shape(running)) for p in parts.values()], axis=0), parts)

    # --- stages

    @cached_property
    def head(self) -> PassSeconds:
        """Seconds of the last linear map and the loss, for each token that is predicted."""
        h, vocab, ahead = self.model.hidden, self.model.vocab / self.plan.tp, self.model.ahead
        dtype = self.layers.dtype if self.software.narrow_head else torch.bfloat16
        logits = self.kernels.stream(tokens(self.plan) * vocab * self.software.cross_entropy / 2)
        each = self.layers.linear(vocab, h, dtype) + PassSeconds(logits, logits)
        return each * (1 + ahead) + self.layers.linear(h / self.plan.tp, 2 * h) * ahead

    @cached_property
    def embedding(self) -> PassSeconds:
        rows = tokens(self.plan) * self.model.hidden
        return self.layers.stream(4 * rows, 8 * rows)

    def stages(self) -> StageSeconds:
        """Return the seconds of what the ranks of the pipeline run."""
        return StageSeconds(self.passes.dense, self.passes.sparse, self.embedding, self.head, self._message())

    @property
    def slowest(self) -> Numbers:
        """Time of the slowest of all ranks, which the others wait for, relative to the slowest of `NODE` ranks."""
        p = self.plan
        return 1 + SPREAD * np.maximum(0.0, _deviations(p.dp * p.tp * (p.pp * p.cp)) - _deviations(NODE))

    # --- a step

    @cached_property
    def pipeline(self) -> Numbers:
        """Seconds of all microbatches through all stages."""
        if self.simulated is not None:
            return self.simulated
        p, m, s, model = self.plan.pp, microbatches(self.plan), self.stages(), self.model
        whole = s.of(*model.layer_counts, True, True)
        ranks = [s.of(*own[1:]) for own in different_ranks(model, self.plan)]
        if facts_of(self.plan.schedule).filling == FLUSH:
            running = self._longest(ranks) + (whole.forward + whole.backward) / p * (p - 1) / self.plan.chunks
        else:
            inner = s.of(*model.layer_counts, False, False) * (1 / np.asarray(p))
            running = self._with_late_weights(ranks, inner)
        sent = 2 * s.message * (p - 1) + 2 * self.plan.chunks * m * s.message * self.software.messages
        return np.where(np.asarray(p) > 1, running + sent, m * (whole.forward + whole.backward))

    def _longest(self, ranks: list[PassSeconds], weights: Numbers = 0.0, forwards: Numbers = 0.0) -> Numbers:
        """Return the seconds of all microbatches on the slowest rank, without so many weight gradients and forwards."""
        m = microbatches(self.plan)
        spent = (m * (x.forward + x.backward) - weights * x.weights - forwards * x.forward for x in ranks)
        return np.maximum.reduce([np.asarray(seconds) for seconds in spent])

    def _with_late_weights(self, ranks: list[PassSeconds], mean: PassSeconds) -> Numbers:
        """Return the seconds of a schedule that puts weight gradients into the bubble; `mean` is a rank on average.

        The result is the larger of two lower bounds. The first is the closed form, in which weight gradients fill the
        bubble; a rank has only so many of them. The second holds for one chunk per rank: the first rank waits until its
        first microbatch comes back, less the time of the forwards that it may run meanwhile.
        """
        facts = facts_of(self.plan.schedule)
        f, b, w = facts.filling
        p, m = np.asarray(self.plan.pp), microbatches(self.plan)
        others = (p - 1) / (self.plan.chunks if facts.chunks is None else 1)
        inputs, late = mean.backward - mean.weights, np.minimum(max(-w, 0.0) * others, m)
        closed = others * (f * mean.forward + b * inputs + max(w, 0.0) * mean.weights)
        closed = np.maximum(self._longest(ranks, weights=late) + closed, self._longest(ranks))
        if facts.chunks != 1:
            return closed
        alive = np.minimum(m, 2 * p - 1 if self.plan.schedule in DOUBLE else p)
        back = np.maximum(p - alive, 0) * mean.forward + (p - 1) * inputs
        return np.maximum(closed, self._longest(ranks, forwards=np.maximum(alive - p, 0)) + back)

    def _message(self) -> Numbers:
        part = 1.0 / self.plan.tp if self.software.scattered else 1.0
        nbytes = tokens(self.plan) * (HALF * self.model.hidden) * part
        inside = self.plan.dp * self.plan.cp * (self.plan.tp * self.plan.pp)
        return self.cluster.message(nbytes, inside > self.cluster.per_node) + 10e-6

    def gathers(self) -> GatherCosts:
        """Return the collectives of ZeRO-3, for the mean of all layers."""
        m, p, (dense, sparse) = self.model, self.plan, self.model.layer_counts
        layer = [
            (x * dense + y * sparse) / (dense + sparse)
            for x, y in zip(dense_layer(m, p), sparse_layer(m, p), strict=True)
        ]
        parameters, table = layer[0] + layer[1], m.embedding_parameters * HALF / p.tp
        waits, replicas = parameters > self.software.live, self.replicas()

        def all_of(kind: CollectiveKind, nbytes: float) -> Numbers:
            meetings = [
                self.cluster.meeting(kind, x * nbytes, *ranks) for x, ranks in zip(layer, replicas, strict=True)
            ]
            return meetings[0] + np.where(np.asarray(layer[1]) > 0, meetings[1], 0.0)

        return GatherCosts(
            parameters * HALF,
            parameters * self.software.reduced,
            table,
            all_of("all-gather", HALF),
            all_of("reduce-scatter", self.software.reduced),
            self.cluster.meeting("all-gather", table, *replicas[0]),
            np.where(waits & (p.recompute == "full"), 2.0, 1.0),
            waits,
        )

    def gathering(self) -> Numbers:
        """Return the seconds of all microbatches with ZeRO-3.

        The parameters of a layer are gathered while another layer computes, forward and backward.
        """
        p, each, (dense, sparse) = self.plan, self.gathers(), self.model.layer_counts
        stages = self.stages()
        spent = (stages.dense * dense + stages.sparse * sparse) * (1 / (dense + sparse))
        again = each.again * each.gather
        forward = np.where(each.waits, spent.forward + each.gather, _overlapped_seconds(spent.forward, each.gather))
        backward = np.where(
            each.waits,
            again + _overlapped_seconds(spent.backward, each.scatter),
            _overlapped_seconds(spent.backward, again + each.scatter),
        )
        ends = stages.before + stages.behind
        once = (dense + sparse) / p.pp * (forward + backward) + (ends.forward + ends.backward) / p.pp
        filling = (p.pp - 1) / p.chunks
        return (microbatches(p) + filling) * once + 3 * each.tables

    def replicas(self) -> tuple[Sharing, Sharing]:
        """Return the ranks that have the same parameters, and those that have the same experts."""
        ranks, node = copies(self.plan), self.cluster.per_node
        experts = np.clip(node / np.asarray(self.plan.ep), 1, ranks.experts)
        return Sharing(ranks.own, np.clip(node / self.plan.tp, 1, ranks.own)), Sharing(ranks.experts, experts)

    @cached_property
    def parameters(self) -> Split:
        """Number of parameters of a rank, before ZeRO divides them."""
        return most_parameters(self.model, self.plan)

    def _over_replicas(self, kind: CollectiveKind, nbytes: float) -> Numbers:
        """Return the seconds of a collective on all parameters of a rank, of so many bytes each."""
        found = [
            np.where(np.asarray(own) > 0, self.cluster.meeting(kind, own * nbytes, *ranks), 0.0)
            for own, ranks in zip(self.parameters, self.replicas(), strict=True)
        ]
        return found[0] + found[1]

    def synchronised(self) -> Numbers:
        """Return the exposed seconds of reducing gradients over replicas.

        With ZeRO, they include the gather of updated parameters.
        """
        whole = self._over_replicas("all-reduce", self.software.reduced)
        parts = self._over_replicas("reduce-scatter", self.software.reduced)
        summed = np.where(self.sums_whole, whole, parts)
        updated = np.where(self.plan.zero == 0, 0.0, self._over_replicas("all-gather", HALF))
        each = self.pipeline / microbatches(self.plan)
        shown = self.reductions * self._exposed(summed, each * BACKWARD)
        return shown + self._exposed(updated, each * (1 - BACKWARD))

    def _exposed(self, seconds: Numbers, beside: Numbers) -> Numbers:
        """Return the seconds of a collective over replicas that nothing hides.

        Only the pass of one microbatch can hide it, which takes `beside` seconds. With several chunks on a rank, the
        pass takes as long as those of all ranks, because a chunk waits for other ranks. All reductions of a step
        together have the whole pipeline to hide in, and not more.
        """
        several = np.minimum(self.plan.pp, microbatches(self.plan) / self.reductions)
        passes = np.where(np.asarray(self.plan.chunks) > 1, several, 1.0)
        return np.maximum(seconds * self.software.exposed, seconds - beside * passes)

    @property
    def reductions(self) -> Numbers:
        """Number of reductions of the gradients in a step.

        A rank of ZeRO-2 has no memory for the other ranks' gradients, so it reduces those of each microbatch.
        """
        return np.where(self.plan.zero == 2, microbatches(self.plan), 1.0)

    @property
    def sums_whole(self) -> Flags:
        """True if every rank has the whole sum of the gradients."""
        return self.plan.zero < (1 if self.software.reduces_parts else 3)

    def accumulated(self) -> Numbers:
        """Return the seconds of adding each microbatch's gradients to those of the others."""
        m, share = microbatches(self.plan), (self.parameters / copies(self.plan)).total
        whole = self.parameters.total * self.software.accumulation
        nbytes = np.where(self.plan.zero >= 2, np.minimum(share * 3 * SINGLE, whole), whole)
        return np.where(m > 1, m * self.kernels.stream(nbytes), 0.0)

    def updated(self) -> Numbers:
        """Return the seconds of the optimizer's step."""
        own = np.where(self.plan.zero > 0, (self.parameters / copies(self.plan)).total, self.parameters.total)
        hosted = self.software.hosted
        return self.kernels.stream(own * UPDATE) if hosted is None else self._updated_by_hosts(own, hosted)

    def _updated_by_hosts(self, own: Numbers, memory: float) -> Numbers:
        """Return the seconds of the optimizer's step on hosts.

        The devices of a node share its memory. Gradients are moved there, and parameters back.
        """
        p = self.plan
        ranks = p.dp * p.tp * (p.pp * p.cp)
        each = memory / np.minimum(ranks, self.cluster.per_node)
        way = (self.software.reduced + HALF) / (self.software.stowed or each)
        return own * (UPDATE / (each * self.habits.streamed) + way)


def _deviations(ranks: Numbers) -> Numbers:
    """Return the expected maximum of so many normal numbers, in standard deviations (asymptotic formula)."""
    twice = np.sqrt(2 * np.log(np.maximum(ranks, 2.0)))
    return twice - (np.log(twice**2 / 2) + np.log(4 * np.pi)) / (2 * twice)


def _overlapped_seconds(computed: Numbers, meeting: Numbers) -> Numbers:
    """Return the seconds of computation that overlaps with a collective."""
    return np.maximum(computed, meeting) + BESIDE * np.minimum(computed, meeting)


def model_flops(model: Transformer, plan: Degrees) -> Numbers:
    """Return the operations of a step that the model needs, without recomputation; scores count that are seen.

    Products of parameters with tokens count once forward and twice for gradients. The embedding table is looked up and
    does not count; a head is multiplied.
    """
    x, (dense, sparse) = model.experts, model.layer_counts
    active: float = model.parameters + model.embedding_parameters * (model.ahead - (0 if model.tied else 1))
    if x is not None:
        active -= model.expert_parameters * sparse * (1 - x.chosen / x.count)
    scores = model.seen(plan.sequence) * ((dense + sparse) * model.heads * (model.key_width + model.value_width))
    return 6.0 * (plan.batch * plan.sequence) * (active + scores)


def flops_utilisation(model: Transformer, plan: Degrees, cluster: Cluster, seconds: float) -> float:
    """Return the model FLOPs utilisation: `model_flops` of a step, relative to the peak in the plan's precision."""
    ranks = float(plan.dp * plan.tp * (plan.pp * plan.cp))
    rate = cluster.device.peak(NARROW.get(plan.precision, torch.bfloat16))
    return float(model_flops(model, plan)) / (rate * ranks * seconds)
