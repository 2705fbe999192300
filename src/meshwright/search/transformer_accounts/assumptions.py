"""Assumptions of the price of a plan: overlap, kernels, the clock of devices, and memory that is left free."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright.cost import DATA_SHEET, Cluster, Habits

from ..plan_data.plan import Plan
from ..transformer_plans.choose import USABLE
from ..transformer_plans.layer_time import NARROW
from ..transformer_plans.predict import StepTime
from ..transformer_plans.sizes import Transformer
from ..transformer_plans.software import MESHWRIGHT, Software

GIBI = 2**30


def assumptions(model: Transformer, plan: Plan, cluster: Cluster, software: Software = MESHWRIGHT) -> tuple[str, ...]:
    """Return the assumptions of a plan's price, as sentences."""
    return tuple(_sentences(model, plan, cluster, software))


def _sentences(model: Transformer, plan: Plan, cluster: Cluster, software: Software) -> Iterator[str]:
    device = cluster.device
    attention = "fused attention" if software.fused_attention else "attention that writes its scores to memory"
    yield f"software: {attention}; {', '.join(_exposed(plan, software)) or 'no communication'}"
    yield (
        f"clock: under a long load, large products of 16 bits reach {100 * device.reach:.3g} % of the peak of"
        f" {device.name}, and fused attention {100 * device.attention[0]:.3g} % forward"
    )
    if device.source.startswith(DATA_SHEET):
        yield f"devices: these fractions of {device.name} are usual ones; no measured run was compared"
    if plan.precision == "bf16" and torch.bfloat16 not in device.flops:
        yield f"precision: {device.name} has no fast products in bf16, so the price is that of fp16; pass fp16"
    if plan.precision in NARROW:
        yield f"products in {plan.precision} reach {100 * device.share(NARROW[plan.precision]):.3g} % of their peak"
    slower = float(StepTime(model, plan, cluster, software, Habits()).slowest) - 1
    if slower > 0:
        yield f"devices: the slowest of {plan.ranks:,} takes {100 * slower:.2g} % longer than the slowest of 8"
    yield memory_left(cluster)
    if model.ahead:
        yield f"model: {model.ahead} further tokens are predicted, each by one more layer and one more pass of the head"
    if model.experts is not None and plan.ep > 1:
        yield f"experts: the fullest rank has {model.experts.fullest(plan.ep):.3g} times the average number of tokens"


def memory_left(cluster: Cluster) -> str:
    """Return a sentence on the memory of a device that no plan takes."""
    left = (1 - USABLE) * cluster.device.available / GIBI
    return f"memory: {left:.1f} GiB of each device are left to contexts, communicators and the allocator"


def _exposed(plan: Plan, software: Software) -> Iterator[str]:
    """Yield the exposed part of each kind of communication that the plan has."""
    kinds = (
        (plan.tp > 1, software.tensor, "sums of tensor parallelism"),
        (plan.pp > 1, software.messages, "messages between stages"),
        (plan.ep > 1, software.exchange, "exchanges of experts"),
        (plan.dp * plan.cp > 1 and plan.zero != 3, software.exposed, "reductions of gradients"),
    )
    yield from (f"{100 * shown:.3g} % of {what} exposed" for has_any, shown, what in kinds if has_any)
    if plan.zero == 3:
        yield "gathers of parameters beside the computation of the layer before"
