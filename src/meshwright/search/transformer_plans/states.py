"""Parameters of a rank, the ranks that have the same ones, and the bytes of their states.

`ep` of the dp * cp * tp ranks of a stage divide the experts of a layer. The others of these ranks have copies, so an
expert has fewer copies than all other parameters if `ep` is larger than `tp`. ZeRO divides states over the copies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.cost import Numbers

from .degrees import Degrees
from .layer_shares import RankLayers, different_ranks
from .layer_time import HALF
from .sizes import Transformer
from .software import Software

SINGLE = 4.0
"""Bytes of a parameter or a gradient in single precision."""


class Split(NamedTuple):
    """Numbers of the parameters that ZeRO divides over all replicas, and of experts, which have fewer copies."""

    own: Numbers
    experts: Numbers

    @property
    def total(self) -> Numbers:
        return self.own + self.experts

    def __truediv__(self, ranks: Split) -> Split:
        """Return the part of each of `ranks` ranks."""
        return Split(self.own / ranks.own, self.experts / ranks.experts)


def copies(plan: Degrees) -> Split:
    """Return the number of ranks that have the same parameters."""
    replicas = plan.dp * plan.cp
    return Split(replicas, np.maximum(1.0, replicas * plan.tp / np.asarray(plan.ep)))


def dense_layer(model: Transformer, plan: Degrees) -> Split:
    """Return the parameters on a rank of a layer without experts."""
    return Split(model.attention_of(plan.tp) + model.mlp_parameters / plan.tp, 0.0)


def sparse_layer(model: Transformer, plan: Degrees) -> Split:
    """Return the parameters on a rank of a layer with experts."""
    return Split(model.attention_of(plan.tp) + model.shared_of(plan.tp), model.expert_parameters / plan.ep)


def rank_parameters(model: Transformer, plan: Degrees, layers: RankLayers) -> Split:
    """Return the parameters on a rank with these layers; one rank has a tied table once."""
    dense, sparse = dense_layer(model, plan), sparse_layer(model, plan)
    repeated = np.logical_and(model.tied, np.logical_and(layers.first, layers.last))
    tables = np.where(layers.first, 1.0, 0.0) + np.where(np.logical_and(layers.last, ~repeated), 1.0, 0.0)
    own = dense.own * layers.dense + sparse.own * layers.sparse + tables * model.embedding_parameters / plan.tp
    own = own + np.where(layers.last, model.joined_parameters / plan.tp, 0.0)
    return Split(own, sparse.experts * layers.sparse)


def most_parameters(model: Transformer, plan: Degrees) -> Split:
    """Return the parameters on the rank of the pipeline that has the most."""
    ranks = [rank_parameters(model, plan, own) for own in different_ranks(model, plan)]
    own, experts = (np.maximum.reduce([np.asarray(n) for n in column]) for column in zip(*ranks, strict=True))
    return Split(own, experts)


class StateBytes(NamedTuple):
    """Bytes of a rank's weights and gradients, of its optimizer states, and of whole values of layers in use."""

    weights: Numbers
    optimizer: Numbers
    gathered: Numbers


def state_bytes(model: Transformer, plan: Degrees, software: Software, layers: RankLayers) -> StateBytes:
    """Return the bytes of the states of a rank with these layers.

    Stage 3 never takes more than stage 2: a program that shards parameters may leave some of them gathered.
    """
    whole = rank_parameters(model, plan, layers)
    share, used = whole / copies(plan), _layer_in_use(model, plan, layers)
    zero, gradient, hosted = plan.zero, software.gradient, software.hosted is not None
    summed = np.where(zero >= 2, share.total * gradient, whole.total * gradient)
    moments = 0.0 if hosted else np.where(zero >= 1, share.total, whole.total) * software.moments
    bucket = np.minimum(used * gradient, np.maximum(whole.total - share.total, 0.0) * gradient)
    weights, bucket = whole.total * HALF + summed, np.where(zero >= 2, bucket, 0.0)
    sharded = share.total * (HALF + gradient if hosted else 2 * SINGLE)
    states = share.total * (0.0 if hosted else software.moments - SINGLE)
    spare = np.maximum(weights + moments + bucket - sharded - states, 0.0)
    gathered = np.minimum(_gathered_bytes(model, plan, software, used), spare)
    return StateBytes(
        np.where(zero == 3, sharded, weights),
        np.where(zero == 3, states, moments),
        np.where(zero == 3, gathered, bucket),
    )


def _layer_in_use(model: Transformer, plan: Degrees, layers: RankLayers) -> Numbers:
    """Return the parameters of the largest layer of a rank."""
    dense, sparse = dense_layer(model, plan).total, sparse_layer(model, plan).total
    return np.maximum(np.where(layers.dense > 0, dense, 0.0), np.where(layers.sparse > 0, sparse, 0.0))


def _gathered_bytes(model: Transformer, plan: Degrees, software: Software, layer: Numbers) -> Numbers:
    """Return the bytes of whole parameters and gradients in use with ZeRO-3: of two layers, or of one product.

    A program with a limit of gathered parameters gathers the products of a larger layer one by one.
    """
    table = model.embedding_parameters / plan.tp * HALF
    product = model.hidden * max(model.ffn, model.heads * model.head_dim) / plan.tp
    whole = np.where(layer > software.live, product * (HALF + software.gradient), layer * (2 * HALF + SINGLE))
    return whole + table
