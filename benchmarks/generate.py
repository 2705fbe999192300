"""Tokens of models that others wrote, unmodified, under every kind of parallelism, compared with one device.

    python -m benchmarks.generate                                 every cell
    python -m benchmarks.generate --model Llama --layout tp       some of them

A cell is one call on simulated ranks, by the sampler or by `generate()` of transformers, of prompts with different
lengths. The value is the number of cells with other tokens than on one device, or with an error. The goal is 0 for at
least 20 models.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks._generate_layouts import LAYOUTS
from benchmarks._matrix_models import MODELS

FAMILIES = (
    *("Llama", "Mistral", "Qwen3", "Gemma-2", "Phi", "GPT-2", "GPT-NeoX", "GPT-J", "OPT", "Falcon", "Bloom", "MPT"),
    *("Gemma-3", "OLMo-2", "StableLM", "T5", "BART", "Marian", "Pegasus", "Mixtral", "Qwen3-MoE", "OLMoE", "Mamba"),
)
PROMPTS = ([5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15])
LENGTH, NEW, PAD = 5, 5, 0
GOAL, LEAST = 0, 20
QUICK = ("Llama", "T5"), ("dp", "tp"), ("greedy", "sampled", "HF greedy")

Way = Callable[[nn.Module], Tensor]
"""A function from a model to its tokens."""


def by_sampler(**options: Any) -> Way:
    return lambda model: mw.sampler(model).generate(PROMPTS, NEW, **options).tokens


def by_transformers(**options: Any) -> Way:
    def generate(model: Any) -> Tensor:
        torch.manual_seed(3)
        right = bool(model.config.is_encoder_decoder)
        pads = [[PAD] * (LENGTH - len(prompt)) for prompt in PROMPTS]
        ids = [[*p, *pad] if right else [*pad, *p] for p, pad in zip(PROMPTS, pads, strict=True)]
        seen = [[1] * len(p) + pad if right else pad + [1] * len(p) for p, pad in zip(PROMPTS, pads, strict=True)]
        found = model.generate(
            torch.tensor(ids), attention_mask=torch.tensor(seen), max_new_tokens=NEW, pad_token_id=PAD, **options
        )
        return mw.unshard_dtensor(found)

    return generate


WAYS: dict[str, Way] = {
    "greedy": by_sampler(temperature=0),
    "sampled": by_sampler(seed=3, top_k=20, top_p=0.95),
    "n = 4": by_sampler(seed=3, n=4, temperature=0.8),
    "HF greedy": by_transformers(do_sample=False),
    "HF sampled": by_transformers(do_sample=True),
    "HF beams": by_transformers(do_sample=False, num_beams=2),
    "HF n = 4": by_transformers(do_sample=True, num_return_sequences=4),
}


@dataclass(frozen=True)
class Cell:
    """The result of a call: "equal", "other tokens", "refused" or "bug"; the first line of an error; and seconds."""

    model: str
    layout: str
    way: str
    verdict: str
    why: str = ""
    seconds: float = 0.0


def make(name: str) -> nn.Module:
    """Return the model with random weights, in evaluation mode; large logits make clear choices."""
    torch.manual_seed(0)
    model = MODELS[name].make().model.eval()
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None
    return model


def check(name: str, layout: str, way: str) -> Cell:
    """Return the comparison of one cell with one device."""
    call, start = WAYS[way], time.perf_counter()
    try:
        wanted = call(make(name))
    except Exception as error:
        return Cell(name, layout, way, "one device fails", _first_line(error))
    try:
        found = mw.simulate(lambda: call(LAYOUTS[layout].put_on(make(name))), LAYOUTS[layout].ranks)
    except Exception as error:
        verdict = "refused" if isinstance(error, mw.MeshwrightError) else "bug"
        return Cell(name, layout, way, verdict, _first_line(error), time.perf_counter() - start)
    equal = all(torch.equal(tokens, wanted) for tokens in found)
    return Cell(name, layout, way, "equal" if equal else "other tokens", "", time.perf_counter() - start)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def cells(models: Sequence[str], layouts: Sequence[str], ways: Sequence[str], show: bool = False) -> list[Cell]:
    found: list[Cell] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in models:
            for layout in layouts:
                for way in ways:
                    found.append(check(model, layout, way))
                    if show:
                        print(json.dumps(vars(found[-1])), flush=True)
    return found


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the cells whose tokens are not those of one device."""
    models, layouts, ways = QUICK if quick else (FAMILIES, tuple(LAYOUTS), tuple(WAYS))
    found = cells(models, layouts, ways)
    wrong = [cell for cell in found if cell.verdict != "equal"]
    return {
        "name": "generate",
        "value": len(wrong),
        "goal": GOAL,
        "ok": not wrong and (quick or len(models) >= LEAST),
        "details": {
            "cells": len(found),
            "models": len(models),
            "verdicts": dict(Counter(cell.verdict for cell in found)),
            "by_way": {way: sum(c.verdict == "equal" for c in found if c.way == way) for way in ways},
            "by_layout": {name: sum(c.verdict == "equal" for c in found if c.layout == name) for name in layouts},
            "wrong": [f"{c.model}, {c.layout}, {c.way}: {c.verdict} {c.why}".strip() for c in wrong],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare generated tokens with those of one device.")
    parser.add_argument("--model", action="append", choices=MODELS, help="only this model; repeat for several")
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--way", action="append", choices=WAYS)
    asked = parser.parse_args()
    found = cells(asked.model or FAMILIES, asked.layout or tuple(LAYOUTS), asked.way or tuple(WAYS), show=True)
    print(json.dumps(dict(Counter(cell.verdict for cell in found))))


if __name__ == "__main__":
    main()
