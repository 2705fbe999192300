"""Bytes and seconds of the move of weights from a trainer to a sampler, by the count of `mw.weights.sync`.

A rank receives the elements of its new parts that it does not hold. That is the lower bound for any algorithm, and
`reshard.Exchange` counts it. Where both layouts give each rank equal parts, both models use one memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from meshwright.cost import Cluster, Flags, Habits, KernelTimes
from meshwright.layout import ProcessMesh, Spec, parse_spec
from meshwright.passes import further_sharded
from meshwright.reshard import Exchange

from ..plan_data.plan import Plan
from ..transformer_plans.degrees import Degrees
from ..transformer_plans.layer_shares import RankLayers, rank_layers
from ..transformer_plans.sizes import Transformer
from ..transformer_plans.software import MESHWRIGHT, Software
from ..transformer_plans.tensor_layouts import tensor_layouts
from .generation import SamplerLayout

AXES = ("dp", "cp", "tp")
STORED = 2
"""First stage of ZeRO whose parameters are stored in parts."""
LOOKED_AT = 16
"""Ranks that are looked at in the first, the middle and the last pipeline stage, to find the one that receives most."""


class TensorKind(NamedTuple):
    """A tensor of each layer, of the embedding or of the head."""

    place: str
    name: str


@dataclass(frozen=True, slots=True)
class WeightMove:
    """A move of weights: bytes that the busiest rank receives, its exchanges, and the seconds.

    `is_shared` is true if the sampler uses the trainer's memory, so that nothing moves.
    """

    received: int
    rounds: int
    seconds: float
    is_shared: bool


@lru_cache(maxsize=4096)
def weight_move(
    model: Transformer, plan: Plan, layout: SamplerLayout, cluster: Cluster, software: Software = MESHWRIGHT
) -> WeightMove:
    """Return the move of the weights after a training step under `plan`.

    A rank sends as much as it receives, on average, and has memory for a bucket of messages at a time.
    """
    if shares_memory(plan, layout):
        return WeightMove(0, 0, 0.0, True)
    received = most_received(model, plan, layout)
    rounds = ceil(2 * received / software.bucket)
    copied = KernelTimes(cluster.device, Habits()).stream(2.0 * sampler_bytes(model, layout))
    return WeightMove(received, rounds, _message_seconds(plan, received, rounds, cluster) + float(copied), False)


def shares_memory(plan: Degrees, layout: SamplerLayout) -> Flags:
    """True if each rank has equal parts of all weights in both phases; one element per plan."""
    is_stored_whole = np.logical_or(plan.zero < STORED, plan.dp * plan.cp == 1)
    return np.logical_and(np.logical_and(plan.pp == 1, plan.tp == layout.tp), is_stored_whole)


def most_received(model: Transformer, plan: Plan, layout: SamplerLayout) -> int:
    """Return the bytes that the busiest of the looked-at ranks receives."""
    size = plan.dp * plan.cp * plan.tp
    stages = sorted({0, plan.pp // 2, plan.pp - 1})
    ranks = [stage * size + at for stage in stages for at in range(min(size, LOOKED_AT))]
    return max(received_bytes(model, plan, layout, rank) for rank in ranks)


def received_bytes(model: Transformer, plan: Plan, layout: SamplerLayout, rank: int) -> int:
    """Return the bytes that a rank receives, in half precision."""
    size = plan.dp * plan.cp * plan.tp
    stage = rank // size
    own = rank_layers(model, plan.schedule, plan.pp, plan.chunks)[stage]
    trained = _specs(model, plan.dp, plan.cp, plan.tp, plan.zero >= STORED, stage * size)
    sampled = _specs(model, layout.replicas, 1, layout.tp, False, 0)
    nbytes = 0
    for kind, target in sampled.items():
        source, need = trained[kind], prod(target.local_shape(rank)) * target.dtype.itemsize
        is_comparable = source.shape == target.shape  # more ranks than key heads repeat heads
        lacking = Exchange(target).received(source, rank) if is_comparable else need
        held = _count(model, kind, own)
        nbytes += (_whole_count(model, kind) - held) * need + held * lacking
    return nbytes


def sampler_bytes(model: Transformer, layout: SamplerLayout) -> int:
    """Return the bytes of a sampler's own weights on a rank."""
    sampled = _specs(model, layout.replicas, 1, layout.tp, False, 0)
    each = {kind: prod(spec.local_shape(0)) * spec.dtype.itemsize for kind, spec in sampled.items()}
    return sum(_whole_count(model, kind) * nbytes for kind, nbytes in each.items())


def _message_seconds(plan: Plan, received: int, rounds: int, cluster: Cluster) -> float:
    """Return the seconds of the messages of a rank.

    Ranks of other nodes send the bytes if a node lacks parts of the model. It then holds as many parts as it has ranks.
    """
    has_parts_elsewhere = plan.ranks > cluster.per_node and (plan.pp > 1 or plan.zero >= STORED)
    away = 1 - cluster.per_node / plan.ranks if has_parts_elsewhere else 0.0
    each = received / max(rounds, 1)
    near, far = cluster.message((1 - away) * each, False), cluster.message(away * each, True)
    return rounds * float(near + (far if away else 0.0))


def _count(model: Transformer, kind: TensorKind, own: RankLayers) -> int:
    """Return the number of these tensors of which a pipeline rank has a part. A tied table is on both ends."""
    if kind.place == "layer":
        return int(own.dense)
    is_first = bool(own.first) and kind.place == "embedding"
    is_last = bool(own.last) and (kind.place == "head" or model.tied)
    return int(is_first or is_last)


def _whole_count(model: Transformer, kind: TensorKind) -> int:
    return model.layers if kind.place == "layer" else 1


@lru_cache(maxsize=1024)
def _specs(
    model: Transformer, dp: int, cp: int, tp: int, is_stored_in_parts: bool, first: int
) -> Mapping[TensorKind, Spec]:
    """Return the specs of the weights on dp * cp * tp ranks from `first` on; a tied table is in them once."""
    mesh = ProcessMesh((first + np.arange(dp * cp * tp)).reshape(dp, cp, tp), AXES)
    found: dict[TensorKind, Spec] = {}
    for row in tensor_layouts(model, Plan(dp=dp, cp=cp, tp=tp)):
        place = row.layer.partition(".")[2]
        kind = TensorKind(place if place in ("embedding", "head") else "layer", row.name)
        if place and not (kind.place == "head" and model.tied):
            spec = parse_spec(row.layout, mesh)
            found[kind] = further_sharded(spec, ("dp", "cp")) if is_stored_in_parts else spec
    return found
