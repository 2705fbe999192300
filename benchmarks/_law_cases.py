"""Random models, clusters and sizes of a step, for the laws that all plans obey."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost import Cluster, cluster_of, link_of
from meshwright.layout import JsonValue
from meshwright.search import Experts, Latent, Plan, Plans, Transformer, plan_of
from meshwright.search.transformer_plans.candidates import candidates
from meshwright.search.transformer_plans.degrees import NUMBERS

LAYERS = (1, 2, 3, 7, 12, 16, 22, 24, 32, 37, 40, 48, 61, 80, 94, 96, 126)
DEVICES = ("A100", "A100-40GB", "H100", "H800", "B200", "GB300", "MI300X", "V100")
NETWORKS = ("InfiniBand-HDR", "InfiniBand-NDR", "RoCE-400", "Ethernet-100", "EFA-400")
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Case:
    """A model on a cluster, with the number of ranks and the sizes of a step."""

    model: Transformer
    cluster: Cluster
    ranks: int
    batch: int
    sequence: int

    def bundles(self) -> Iterator[Plans]:
        """Yield all candidate plans."""
        return candidates(self.model, self.ranks, self.batch, self.sequence, "bf16", self.cluster.per_node, {})


def random_case(seed: int) -> Case:
    """Return a random case: about a third of the models have experts, and some an odd number of layers."""
    draw = random.Random(seed)
    cluster = cluster_of(draw.choice(DEVICES))
    outside = replace(link_of(draw.choice(NETWORKS)), bandwidth=draw.choice((1.25e9, 5e9, 2.5e10, 5e10)))
    cluster = replace(cluster, outside=outside, per_node=draw.choice((1, 2, 4, 8)))
    ranks = draw.choice(RANKS)
    batch = draw.choice((1, 2, 3, 5, 8)) * draw.choice((8, 16, 64, ranks))
    return Case(random_model(draw), cluster, ranks, batch, draw.choice((512, 1000, 2048, 4096, 32768)))


def random_model(draw: random.Random) -> Transformer:
    """Return a random transformer; some predict a token ahead."""
    heads, head_dim = draw.choice((8, 12, 16, 32, 40, 64)), draw.choice((64, 128))
    kv_heads = draw.choice([n for n in (1, 2, 4, 8, heads) if heads % n == 0])
    layers, hidden = draw.choice(LAYERS), heads * head_dim
    experts = latent = None
    if draw.random() < 0.35:
        count, width = draw.choice((8, 16, 60, 64, 128)), draw.choice((512, 1408, 4096))
        shared, dense = draw.choice((0, 2048)), draw.choice((0, 0, 1, 3))
        experts = Experts(
            count, draw.choice((1, 2, 8)), width, shared, min(dense, layers), nodes=draw.choice((None, 4))
        )
    if draw.random() < 0.2:
        latent, kv_heads = Latent(draw.choice((0, 1536)), 512, 128, 64, 128), heads
    ffn, vocab = draw.choice((1024, 4 * hidden, 14336)), draw.choice((1000, 32000, 129280))
    gated, tied = draw.random() < 0.7, draw.random() < 0.4
    ahead = draw.choice((0, 0, 1))
    return Transformer(layers, hidden, heads, kv_heads, head_dim, ffn, vocab, gated, tied, experts, latent, ahead=ahead)


def random_plan(case: Case, seed: int) -> Plan | None:
    """Return a random candidate plan of a case, or None if it has none."""
    draw = random.Random(seed)
    bundles = list(case.bundles())
    if not bundles:
        return None
    return plan_at(plans := draw.choice(bundles), draw.randrange(len(plans.dp)))


def plan_at(plans: Plans, n: int) -> Plan:
    """Return the n-th plan of a bundle."""
    numbers = {name: int(np.asarray(getattr(plans, name))[n]) for name in NUMBERS}
    divided = bool(numbers.pop("sequence_parallel"))
    words: dict[str, JsonValue] = {
        "schedule": plans.schedule,
        "recompute": plans.recompute,
        "precision": plans.precision,
    }
    return plan_of({**numbers, **words, "sequence_parallel": divided})
