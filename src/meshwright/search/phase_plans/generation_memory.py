"""Bytes of the fullest rank while a model generates: the states of training stay, and the cache comes beside them."""

from __future__ import annotations

import numpy as np

from meshwright.cost import Numbers

from ..transformer_plans.degrees import Degrees
from ..transformer_plans.layer_shares import different_ranks
from ..transformer_plans.layer_time import HALF
from ..transformer_plans.sizes import Transformer
from ..transformer_plans.software import MESHWRIGHT, Software
from ..transformer_plans.states import state_bytes
from .generation import GenerationSizes, SamplerLayout
from .generation_time import cache_bytes, memory_positions
from .weight_moves import sampler_bytes, shares_memory

LOGIT = 8
"""Bytes of a logit while a token is chosen: in half precision on one rank and gathered, and in single precision."""


def generation_bytes(
    model: Transformer,
    plan: Degrees,
    layout: SamplerLayout,
    generation: GenerationSizes,
    received: Numbers,
    software: Software = MESHWRIGHT,
) -> dict[str, Numbers]:
    """Return the bytes of the fullest rank while the model generates, by kind; one element per plan.

    A rank receives `received` bytes of weights. Messages that it sends and receives share one bucket.
    """
    states = training_state_bytes(model, plan, software)
    return {"states of training": states, **sampler_parts(model, plan, layout, generation, received, software)}


def sampler_parts(
    model: Transformer,
    plan: Degrees,
    layout: SamplerLayout,
    generation: GenerationSizes,
    received: Numbers,
    software: Software,
) -> dict[str, Numbers]:
    """Return the bytes that generation takes beside the states of training, by kind."""
    return {
        "sampler's weights": np.where(shares_memory(plan, layout), 0.0, sampler_bytes(model, layout)),
        "cache": cache_bytes(model, layout, layout.rows(generation), memory_positions(generation, software)),
        "bucket": np.minimum(2.0 * received, software.bucket),
        "temporary": _temporary(model, layout, generation),
    }


def training_state_bytes(model: Transformer, plan: Degrees, software: Software) -> Numbers:
    """Return the bytes of parameters, gradients and optimizer states of the rank with the most."""
    ranks = [state_bytes(model, plan, software, own) for own in different_ranks(model, plan)]
    return np.maximum.reduce([np.asarray(states.weights + states.optimizer) for states in ranks])


def _temporary(model: Transformer, layout: SamplerLayout, generation: GenerationSizes) -> float:
    """Return the bytes of the larger of the prompts' pass, with a cache of its own, and of a choice of tokens."""
    prompts, length = layout.prompts(generation), generation.prompt_tokens
    inner = (3 if model.gated else 2) * model.ffn / layout.tp + 4 * model.hidden
    prefill = cache_bytes(model, layout, prompts, length) + prompts * length * inner * HALF
    return max(prefill, float(layout.rows(generation) * model.vocab * LOGIT))
