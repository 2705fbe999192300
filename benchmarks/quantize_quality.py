"""Perplexity of language models that are trained here, for each scheme, relative to the model in float32.

The text is the source of Python's standard library, as bytes. Batches for training, calibration and evaluation are
different samples. The value is the largest increase of the perplexity by a scheme of 4 bits, in percent. The increases
by 8 bits have a goal of their own, and GPTQ must be better than rounding to the nearest. If llm-compressor is installed
(see `_llm_compressor`), it quantizes the same models with the same calibration batches. Meshwright reads its files, and
no scheme of Meshwright may be worse by more than 0.02 %.
"""

from __future__ import annotations

import copy
import json
import tempfile
from math import exp
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks._llm_compressor import ABSENT, of_transformers, quantized_by_rival
from meshwright.models import Llama, LlamaConfig, batch
from meshwright.quantize import NumberFormat, Scheme

LENGTH, BATCH = 128, 8
EVALUATED = 32
"""Batches for evaluation: with few of them, the perplexities of two roundings of 4 bits differ by chance."""
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
WORSE = 0.02
"""Most percent by which a scheme may be worse than that of llm-compressor."""


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


class Loss(nn.Module):
    """The mean loss of a model of transformers, with the arguments of ours."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        logits_bsv = self.model(input_ids=tokens_bs).logits
        return nn.functional.cross_entropy(logits_bsv.flatten(0, 1), targets_bs.flatten())


def increases_of_rival(model: Llama, config: LlamaConfig, seen: list[Any], data: list[Any]) -> dict[str, float]:
    """Return the increase by each scheme in percent if llm-compressor quantizes; nothing if it is not installed."""
    exact = perplexity(model, data)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        same = of_transformers(model, config)
        rival = quantized_by_rival(same, schemes(), [tokens for tokens, _ in seen], Path(folder))
        for name, written in {} if rival is None else rival.folders.items():
            read = mw.load_quantized(copy.deepcopy(same), written)
            found[name] = 100 * (perplexity(Loss(read), data) / exact - 1)
    return found


def increases(model: Llama, seen: list[Any], data: list[Any]) -> dict[str, float]:
    """Return the perplexity of a model, and the increase by each scheme in percent."""
    exact = perplexity(model, data)
    found = {"perplexity": exact}
    for name, scheme in schemes().items():
        quantized = mw.quantize(copy.deepcopy(model), scheme, seen)
        found[name] = 100 * (perplexity(quantized, data) / exact - 1)
    return found


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the largest increase by a scheme of 4 bits."""
    seen, data = samples(CALIBRATION, 8), samples(HELD_OUT, EVALUATED)
    found: dict[str, dict[str, float]] = {}
    theirs: dict[str, dict[str, float]] = {}
    for name, config in list(MODELS.items())[: 1 if quick else None]:
        model = trained(config, STEPS // 2 if quick else STEPS)
        found[name] = increases(model, seen, data)
        theirs[name] = increases_of_rival(model, config, seen, data)
    bits = {name: scheme.weights.num_bits for name, scheme in schemes().items()}
    largest = {n: max(each[name] for each in found.values() for name in bits if bits[name] == n) for n in MOST}
    worse = [
        f"{model}, {name}"
        for model, each in found.items()
        for name in ("int4", "int3")
        if each[f"{name}, gptq"] > each[name]
    ]
    behind = {
        f"{model}, {name}": found[model][name] - theirs[model][name] for model in theirs for name in theirs[model]
    }
    return {
        "name": "quantize_quality",
        "value": round(largest[4], 3),
        "goal": f"at most {MOST[4]} % by 4 bits and {MOST[8]} % by 8 bits; GPTQ no worse than rounding to the nearest; "
        f"no scheme worse than llm-compressor's by more than {WORSE} %",
        "rival": {
            "name": "llm-compressor",
            "value": {"worst scheme of ours, % behind it": round(max(behind.values()), 4)} if behind else ABSENT,
        },
        "ok": all(largest[n] <= most for n, most in MOST.items())
        and not worse
        and all(difference <= WORSE for difference in behind.values()),
        "details": {
            "percent": {model: {n: round(x, 4) for n, x in each.items()} for model, each in found.items()},
            "percent, llm-compressor": {
                model: {n: round(x, 4) for n, x in each.items()} for model, each in theirs.items()
            },
            "worse": worse,
        },
    }


if __name__ == "__main__":
    print(json.dumps(run()))
