"""Training with few bits: the loss of fp8 training relative to bfloat16, and int3 with quantization-aware training.

A byte Llama is trained from the same values with bfloat16 products and with products of float8 numbers, both under
autocast, on three sets of samples. The value is the difference of the mean losses on other samples after the last step,
in percent. A trained Llama is
trained further with weights rounded to int3, and without; both are then quantized to int3, and the perplexity of the
former must be lower. On meshes, models are trained inside `same_numbers`, and parameters with a bit other than on one
device are counted; the goal is 0.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from meshwright.models import Llama, LlamaConfig, batch
from meshwright.quantize import NumberFormat, Scheme

from ._generate_layouts import GenerationLayout
from .quantize_quality import BATCH, HEAD, HELD_OUT, LENGTH, perplexity, samples

CONFIG = LlamaConfig.of_width(64, 2)
STEPS, FURTHER, SETS = 300, 200, 3
"""Steps of training, of further training with rounded weights, and sets of samples."""
RATE = 1e-3
"""Learning rate of the training with float8 products. At three times this rate, chance hides the difference."""
MOST = 1.0
"""Goal: the difference between the losses of fp8 and bf16, in percent."""
RECIPES = ("tensorwise", "rowwise")
INT3 = Scheme(NumberFormat(3, strategy="group", group_size=16), ignore=HEAD)
SMALL = LlamaConfig(hidden=32, layers=2, heads=2, kv_heads=2, feed_forward=64)
SHORT = 16
"""Length of the sequences on meshes."""
LAYOUTS = {
    "dp 2": GenerationLayout({"dp": 2}),
    "tp 2": GenerationLayout({"tp": 2}, weights=True),
    "tp 4": GenerationLayout({"tp": 4}, weights=True),
    "dp 2 × tp 2": GenerationLayout({"dp": 2, "tp": 2}, weights=True),
    "ZeRO-3": GenerationLayout({"dp": 2}, zero=3),
}
Prepare = Callable[[Any], Any]
WAYS: dict[str, Prepare] = {
    "int3": lambda model: mw.prepare_qat(model, INT3),
    "fp8 tensorwise": lambda model: mw.convert_to_float8_training(model, "tensorwise", ignore=HEAD),
    "fp8 rowwise": lambda model: mw.convert_to_float8_training(model, "rowwise", ignore=HEAD),
}


def trained(model: Any, first: int, steps: int, lr: float, context: Callable[[], Any] = nullcontext) -> Any:
    """Return the model after these steps; the rate falls to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        with context():
            loss = model(*batch(first + step, BATCH, LENGTH, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@torch.no_grad()
def held_out_loss(model: Any, data: list[tuple[Tensor, Tensor]]) -> float:
    with autocast():
        return sum(float(model(*each)) for each in data) / len(data)


def losses(steps: int, sets: int, data: list[tuple[Tensor, Tensor]]) -> dict[str, list[float]]:
    """Return the loss after each training with bfloat16 products, and with float8 products by each recipe."""
    ways = {"bf16": lambda model: model} | {name: WAYS[f"fp8 {name}"] for name in RECIPES}
    return {
        name: [held_out_loss(trained(way(Llama(CONFIG)), n * steps, steps, RATE, autocast), data) for n in range(sets)]
        for name, way in ways.items()
    }


def perplexities(steps: int, further: int, data: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return perplexities after further training: exact weights, these rounded to int3, and QAT with int3."""
    start = trained(Llama(CONFIG), 0, steps, 3e-3)
    exact = trained(copy.deepcopy(start), steps, further, 1e-3)
    aware = trained(WAYS["int3"](copy.deepcopy(start)), steps, further, 1e-3)
    nearest = mw.quantize(copy.deepcopy(exact), INT3)
    models = {"exact": exact, "nearest": nearest, "QAT": mw.quantize(aware, INT3)}
    return {name: perplexity(model.eval(), data) for name, model in models.items()}


def parameters(layout: GenerationLayout | None, way: str, steps: int) -> dict[str, Tensor]:
    """Return the whole parameters after steps of training in a fixed order, on one device or on every rank."""
    model = WAYS[way](Llama(SMALL))
    with torch.no_grad():
        model(*batch(0, 1, SHORT, 0))  # makes the table of positions, which the block would refuse
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if layout is not None:
        model, optimizer = layout.with_optimizer(model, optimizer)
    for step in range(steps):
        with mw.same_numbers():
            model(*batch(step, BATCH, SHORT, 0)).backward()
            optimizer.step()
        optimizer.zero_grad()
    return {name: mw.unshard_dtensor(p).detach().clone() for name, p in model.named_parameters()}


def different(layout: GenerationLayout, way: str, steps: int) -> tuple[int, int]:
    """Return the number of parameters, and of those with another bit than on one device, over all ranks."""
    expected = parameters(None, way, steps)
    ranks = mw.simulate(lambda: parameters(layout, way, steps), layout.ranks)
    flags = [not torch.equal(found[name], x) for found in ranks for name, x in expected.items()]
    return len(flags), sum(flags)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the largest difference between the losses of fp8 and bf16, in percent."""
    data, parts = samples(HELD_OUT, 8), 10 if quick else 1
    loss = losses(STEPS // parts, 1 if quick else SETS, data)
    found = perplexities(STEPS // parts, FURTHER // parts, data)
    chosen = list(LAYOUTS)[1:2] if quick else list(LAYOUTS)
    bits = {f"{way}, {name}": different(LAYOUTS[name], way, 2 if quick else 4) for way in WAYS for name in chosen}
    percent = {name: 100 * (sum(loss[name]) / sum(loss["bf16"]) - 1) for name in RECIPES}
    largest, wrong = max(map(abs, percent.values())), sum(count for _, count in bits.values())
    return {
        "name": "low_precision",
        "value": round(largest, 3),
        "goal": f"at most {MOST:g} %; QAT below the nearest numbers at int3; 0 different parameters on meshes",
        "ok": largest <= MOST and found["QAT"] < found["nearest"] and wrong == 0,
        "details": {
            "losses": {name: [round(x, 4) for x in each] for name, each in loss.items()},
            "percent": {name: round(x, 3) for name, x in percent.items()},
            "perplexity at int3": {name: round(x, 4) for name, x in found.items()},
            "parameters compared": sum(count for count, _ in bits.values()),
            "different": {name: count for name, (_, count) in bits.items() if count},
        },
    }


if __name__ == "__main__":
    print(json.dumps(run()))
