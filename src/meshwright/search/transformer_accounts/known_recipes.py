"""Recipes by which models were trained, or which documentation recommends, and the nearest ones to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, log2

import numpy as np
import torch

from meshwright.cost import Cluster, cluster
from meshwright.pipeline import ScheduleError

from ..plan_data.plan import Plan
from ..transformer_plans.candidates import candidates
from ..transformer_plans.choose import PricedPlan
from ..transformer_plans.peak_memory import hold
from ..transformer_plans.simulated_step import simulate_step
from ..transformer_plans.sizes import Experts, Latent, Transformer
from ..transformer_plans.software import MESHWRIGHT, Software

LLAMA_8B = Transformer(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = Transformer(80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_405B = Transformer(126, 16384, 128, 8, 128, 53248, 128256)
GPT_175B = Transformer(96, 12288, 96, 96, 128, 49152, 51200, gated=False, tied=True)
MIXTRAL = Transformer(32, 4096, 32, 8, 128, 14336, 32000, experts=Experts(8, 2, 14336))
DEEPSEEK = Transformer(
    61, 7168, 128, 128, 128, 18432, 129280,
    experts=Experts(256, 8, 2048, 2048, 3, nodes=4), latent=Latent(1536, 512, 128, 64, 128),
)  # fmt: skip
QWEN_235B = Transformer(94, 4096, 64, 4, 128, 0, 151936, experts=Experts(128, 8, 1536))


@dataclass(frozen=True)
class Recipe:
    """A model on a cluster, and the plan that others use for it; `source` says who."""

    model: Transformer
    cluster: str
    plan: Plan
    source: str


KNOWN_RECIPES: Mapping[str, Recipe] = {
    "Llama-3-8B, 8 x H100": Recipe(
        LLAMA_8B, "8xH100",
        Plan(dp=4, cp=2, zero=1, batch=128, sequence=8192),
        "Megatron-Bridge r0.1.0, scripts/performance/configs",
    ),
    "Llama-3-70B, 64 x H100": Recipe(
        LLAMA_70B, "64xH100, 8 per node, 400G",
        Plan(2, 4, 4, 2, 1, 5, 1, True, "Interleaved 1F1B", 1, 128, 8192),
        "Megatron-Bridge r0.1.0, scripts/performance/configs",
    ),
    "Llama-3.1-405B, 16,384 x H100": Recipe(
        LLAMA_405B, "16384xH100, 8 per node, 400G",
        Plan(128, 8, 16, 1, 1, 1, 2, True, "1F1B", 1, 2048, 8192),
        "arXiv 2407.21783, table 4",
    ),
    "GPT-3 175B, 64 x A100": Recipe(
        GPT_175B, "64xA100, 8 per node, 200G",
        Plan(1, 8, 8, 1, 1, 3, 0, True, "Interleaved 1F1B", 1, 64, 2048, "selective"),
        "arXiv 2205.05198, table 3",
    ),
    "Mixtral 8x7B, 64 x H100": Recipe(
        MIXTRAL, "64xH100, 8 per node, 400G",
        Plan(16, 1, 4, 1, 8, 8, 1, False, "Interleaved 1F1B", 1, 256, 4096),
        "NeMo 2.0, performance guide",
    ),
    "DeepSeek-V3, 2,048 x H800": Recipe(
        DEEPSEEK, "2048xH800, 8 per node, 400G",
        Plan(128, 1, 16, 1, 64, 2, 1, False, "DualPipe-V", 1, 15360, 4096, "selective", "fp8"),
        "arXiv 2412.19437, section 3",
    ),
    "DeepSeek-V3, 256 x GB300": Recipe(
        DEEPSEEK, "256xGB300, 72 per node, 800G",
        Plan(128, 1, 2, 1, 32, 8, 1, False, "Interleaved 1F1B", 1, 4096, 4096, "selective", "mxfp8"),
        "Megatron-Bridge 26.06, scripts/performance/configs",
    ),
    "Qwen3-235B-A22B, 256 x H100": Recipe(
        QWEN_235B, "256xH100, 8 per node, 400G",
        Plan(16, 2, 8, 1, 32, 4, 1, True, "Interleaved 1F1B", 1, 2048, 4096, "none", "fp8"),
        "Megatron-Bridge 25.11, scripts/performance/configs",
    ),
    "Llama-3-8B, 8 x A100 on PCIe": Recipe(
        LLAMA_8B, "8xA100-PCIe",
        Plan(dp=8, zero=3, batch=64, sequence=4096, recompute="full"),
        "PyTorch FSDP, the usual advice for nodes without NVLink",
    ),
    "Llama-3-8B, 16 x A100 on 25G": Recipe(
        LLAMA_8B, "16xA100, 8 per node, 3G",
        Plan(4, 2, 2, 1, 1, 1, 1, True, "1F1B", 1, 128, 4096),
        "Megatron-LM, the usual advice: stages between nodes on slow networks",
    ),
    "Llama-3-8B, 8 x H100 and 8 x A100": Recipe(
        LLAMA_8B, "8xH100 + 8xA100",
        Plan(dp=16, zero=1, batch=128, sequence=4096),
        "PyTorch FSDP, equal parts on unequal devices",
    ),
    "Llama-3-70B, 8 x B300": Recipe(
        LLAMA_70B, "8xB300",
        Plan(dp=1, tp=8, batch=32, sequence=4096, sequence_parallel=True, recompute="full"),
        "Megatron-LM, the usual advice: tensor parallelism inside a node",
    ),
}  # fmt: skip

SIMILAR = 8.0
"""Largest ratio of the parameters of a model and of a recipe's model. Degrees of much larger models say nothing."""
DEGREES = ("tp", "pp", "cp", "chunks", "sequence_parallel", "schedule", "microbatch", "recompute")
"""Fields of a plan that a recipe decides for a model of another size too."""


def nearest_recipes(
    model: Transformer, plan: Plan, there: Cluster, software: Software = MESHWRIGHT, count: int = 2
) -> list[tuple[str, PricedPlan]]:
    """Return the names of the nearest recipes, with their plans for this model, its work and its ranks, priced.

    Models with experts take the recipes of such models, and others those of others. Recipes of models of another size
    are left out (`SIMILAR`), and those whose degrees do not divide the model, the batch or the ranks.
    """
    found: dict[Plan, tuple[str, PricedPlan]] = {}
    alike = {name: recipe for name, recipe in KNOWN_RECIPES.items() if _is_alike(recipe.model, model)}
    for name in sorted(alike, key=lambda name: _distance(alike[name], model, plan, there)):
        recipe = alike[name]
        theirs = _adapted(recipe, model, plan, there)
        if theirs is None or theirs in found:
            continue
        try:
            seconds = simulate_step(model, theirs, there, software)
        except ScheduleError:
            continue
        nbytes = float(np.asarray(hold(model, theirs, software).nbytes))
        found[theirs] = f"{name} ({recipe.source})", PricedPlan(theirs, seconds, nbytes)
        if len(found) == count:
            break
    return list(found.values())


def _is_alike(known: Transformer, model: Transformer) -> bool:
    """True if both models have experts or neither has, and if they have nearly as many parameters."""
    same_kind = (known.experts is None) == (model.experts is None)
    return same_kind and 1 / SIMILAR <= known.parameters / model.parameters <= SIMILAR


def _distance(recipe: Recipe, model: Transformer, plan: Plan, there: Cluster) -> float:
    """Return how far a recipe is from a model and its cluster: doublings of sizes, rates and memory, summed."""
    known = cluster(recipe.cluster)
    rates = (c.device.peak(torch.bfloat16) for c in (known, there))
    pairs = (
        (recipe.model.parameters, model.parameters),
        (recipe.plan.ranks, plan.ranks),
        (recipe.plan.sequence, plan.sequence),
        (known.device.available, there.device.available),
        tuple(rates),
    )
    return sum(abs(log2(a / b)) for a, b in pairs)


def _adapted(recipe: Recipe, model: Transformer, plan: Plan, there: Cluster) -> Plan | None:
    """Return the plan of a recipe for another model, or None if its degrees do not divide the model or its work.

    If there are fewer replicas than in the recipe, experts are divided over fewer ranks.
    """
    own = recipe.plan
    dp, rest = divmod(plan.ranks, own.tp * own.pp * own.cp)
    if rest:
        return None
    has_copies, has_stages = dp * own.cp > 1, own.pp > 1
    zero = 0 if not has_copies else min(own.zero, 1) if has_stages else own.zero
    given = {name: getattr(own, name) for name in DEGREES}
    given |= {"dp": dp, "zero": zero, "ep": gcd(own.ep, dp * own.cp * own.tp)}
    work = plan.batch, plan.sequence, plan.precision
    if next(candidates(model, plan.ranks, *work, there.per_node, given), None) is None:
        return None
    return replace(plan, **given)
