"""Perplexity of language models that are trained here, for each scheme, relative to the model in float32.

The text is the source of Python's standard library, as bytes. Batches for training, calibration and evaluation are
different samples. The value is the largest increase of the perplexity by a scheme of 4 bits, in percent. The increases
by 8 bits have a goal of their own, and GPTQ must be better than rounding to the nearest.
"""

from __future__ import annotations

import copy
import json
from math import exp
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from meshwright.models import Llama, LlamaConfig, batch
from meshwright.quantize import NumberFormat, Scheme

LENGTH, BATCH = 128, 8
HEAD = ("exit.head",)
CALIBRATION, HELD_OUT = 100_000, 200_000
"""First samples for calibration and for evaluation; training uses the samples before."""
MODELS = {
    "2 layers": LlamaConfig.of_width(64, 2),
    "4 layers": LlamaConfig.of_width(64, 4),
    "wide": LlamaConfig.of_width(128, 2),
}
STEPS = 400
MOST = {8: 0.2, 4: 0.6}
"""Bits → goal, in percent."""


def schemes() -> dict[str, Scheme]:
    int4, int3 = (NumberFormat(bits, strategy="group", group_size=16) for bits in (4, 3))
    presets = ("int8", "int8-dynamic", "w8a8-smoothquant", "fp8-dynamic", "nvfp4")
    return {name: Scheme.preset(name, ignore=HEAD) for name in presets} | {
        "nf4": Scheme.preset("nf4", group_size=16, ignore=HEAD),
        "int4": Scheme(int4, ignore=HEAD),
        "int4, gptq": Scheme(int4, method="gptq", act_order=True, ignore=HEAD),
        "int4, awq": Scheme(int4, method="awq", ignore=HEAD),
        "int3": Scheme(int3, ignore=HEAD),
        "int3, gptq": Scheme(int3, method="gptq", act_order=True, ignore=HEAD),
        "int3, awq": Scheme(int3, method="awq", ignore=HEAD),
    }


def trained(config: LlamaConfig, steps: int) -> Llama:
    model = Llama(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        model(*batch(step, BATCH, LENGTH, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def samples(first: int, count: int) -> list[tuple[Tensor, Tensor]]:
    return [batch(first // BATCH + i, BATCH, LENGTH, 0) for i in range(count)]


@torch.no_grad()
def perplexity(model: Any, data: list[tuple[Tensor, Tensor]]) -> float:
    return exp(sum(float(model(*each)) for each in data) / len(data))


def increases(config: LlamaConfig, steps: int) -> dict[str, float]:
    """Return the perplexity of a model, and the increase by each scheme in percent."""
    model, data, seen = trained(config, steps), samples(HELD_OUT, 8), samples(CALIBRATION, 8)
    exact = perplexity(model, data)
    found = {"perplexity": exact}
    for name, scheme in schemes().items():
        quantized = mw.quantize(copy.deepcopy(model), scheme, seen)
        found[name] = 100 * (perplexity(quantized, data) / exact - 1)
    return found


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the largest increase by a scheme of 4 bits."""
    chosen = dict(list(MODELS.items())[: 1 if quick else None])
    found = {name: increases(config, STEPS // 2 if quick else STEPS) for name, config in chosen.items()}
    bits = {name: scheme.weights.num_bits for name, scheme in schemes().items()}
    largest = {n: max(each[name] for each in found.values() for name in bits if bits[name] == n) for n in MOST}
    worse = [
        f"{model}, {name}"
        for model, each in found.items()
        for name in ("int4", "int3")
        if each[f"{name}, gptq"] > each[name]
    ]
    return {
        "name": "quantize_quality",
        "value": round(largest[4], 3),
        "goal": f"at most {MOST[4]} % by 4 bits and {MOST[8]} % by 8 bits; GPTQ no worse than rounding to the nearest",
        "ok": all(largest[n] <= most for n, most in MOST.items()) and not worse,
        "details": {
            "percent": {model: {n: round(x, 4) for n, x in each.items()} for model, each in found.items()},
            "worse": worse,
        },
    }


if __name__ == "__main__":
    print(json.dumps(run()))
