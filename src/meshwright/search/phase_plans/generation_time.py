"""Seconds of generation: one pass over the prompts, and a decode step for each further token.

The operators of a step are those of a layer's forward pass with one token in each row, so its products read weights at
the bandwidth of the memory. Each layer also reads the memory of keys and values. Two all-reduces in each layer, one
behind the embedding and a gather of the logits have the latency of their links.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost import Cluster, Habits

from ..plan_data.plan import Plan
from ..transformer_plans.layer_time import HALF
from ..transformer_plans.predict import StepTime
from ..transformer_plans.sizes import Transformer
from ..transformer_plans.software import MESHWRIGHT, Software
from .generation import GenerationSizes, SamplerLayout


@dataclass(frozen=True, slots=True)
class GenerationSeconds:
    """Seconds of the passes over the prompts, and of each of `steps` decode steps."""

    prefill: float
    step: float
    steps: int

    @property
    def decode(self) -> float:
        return self.step * self.steps

    @property
    def total(self) -> float:
        return self.prefill + self.decode


def generation_seconds(
    model: Transformer,
    layout: SamplerLayout,
    generation: GenerationSizes,
    cluster: Cluster,
    software: Software = MESHWRIGHT,
) -> GenerationSeconds:
    """Return the seconds in which all rows get all their tokens. The pass over the prompts chooses the first ones.

    >>> from meshwright.cost import cluster_of
    >>> llama = Transformer(32, 4096, 32, 8, 128, 14336, 128256)
    >>> found = generation_seconds(llama, SamplerLayout(1, 8), GenerationSizes(8, 512, 512), cluster_of("H100"))
    >>> found.prefill > found.step
    True
    """
    rows, prompts = layout.rows(generation), layout.prompts(generation)
    written = cache_bytes(model, layout, rows, generation.prompt_tokens)
    prefill = _PassTime(model, layout, cluster, software, prompts, generation.prompt_tokens)
    first = _PassTime(model, layout, cluster, software, rows, 1)
    after, waves = generation.new_tokens - 1, layout.waves
    step = first.layers(cache_bytes(model, layout, rows, memory_positions(generation, software)))
    step += first.ends() + first.asked(generation.rows) / software.ask_every
    begun = prefill.layers(0.0) + prefill.embedding() + first.head() + float(first.at.kernels.stream(2 * written))
    return GenerationSeconds(waves * begun, step, waves * after)


def memory_positions(generation: GenerationSizes, software: Software) -> int:
    """Return the number of positions for which each row has memory, which a decode step reads."""
    return -(-generation.positions // software.cache_block) * software.cache_block


def cache_bytes(model: Transformer, layout: SamplerLayout, rows: int, positions: int) -> float:
    """Return the bytes of the keys and values of so many rows on one rank; a window keeps its last positions only."""
    layers = float(model.layers)
    if model.window is not None and model.window.size < positions:
        layers *= 1 - (1 - model.window.size / positions) / model.window.every
    width = float(model.kv_heads_of(layout.tp)) * (model.key_width + model.value_width)
    return rows * positions * layers * width * HALF


class _PassTime:
    """Seconds of the parts of a forward pass over `rows` rows of `length` tokens on each replica."""

    def __init__(
        self,
        model: Transformer,
        layout: SamplerLayout,
        cluster: Cluster,
        software: Software,
        rows: int,
        length: int,
    ) -> None:
        plan = Plan(dp=layout.replicas, tp=layout.tp, microbatch=rows, batch=rows * layout.replicas, sequence=length)
        self.model, self.layout, self.cluster, self.rows = model, layout, cluster, rows
        self.time = StepTime(model, plan, cluster, software, Habits())
        self.at = self.time.layers

    def layers(self, read: float) -> float:
        """Return the seconds of all layers, which read so many bytes of keys and values besides."""
        spent = (self.at.dense() + self.at.meetings()).forward
        host, _ = self.time.passes.host_seconds(None)
        each = np.maximum(spent + self.at.kernels.stream(read / self.model.layers), host)
        return self.model.layers * float(each)

    def embedding(self) -> float:
        """Return the seconds of the look-up of tokens, and of its sum over the ranks of a replica."""
        return float(self.time.embedding.forward + self.at.joining())

    def head(self) -> float:
        """Return the seconds of the logits, of their gather on the ranks of a replica, and of the choice of tokens."""
        nbytes, tp = float(self.rows * self.model.vocab * HALF), self.layout.tp
        gathered = self.cluster.meeting("all-gather", nbytes, tp, min(tp, self.cluster.per_node))
        return float(self.time.head.forward + gathered)

    def ends(self) -> float:
        return self.embedding() + self.head()

    def asked(self, rows: int) -> float:
        """Return the seconds in which the replicas tell each other which rows have ended."""
        replicas, together = self.layout.replicas, max(1, self.cluster.per_node // self.layout.tp)
        return float(self.cluster.meeting("all-gather", float(rows), replicas, min(together, replicas)))
