"""Tokens of quantized models under several kinds of parallelism that differ from those of one device.

The models are those of transformers. A cell is a model, a scheme, a mesh and a way to choose tokens. The time of a
token with quantized weights is compared with that in bfloat16, in a Llama whose layers are 2,048 wide.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import torch

import meshwright as mw
from benchmarks._generate_layouts import LAYOUTS
from benchmarks._quantized_decode import decode_ratios
from benchmarks.generate import WAYS, make
from meshwright.quantize import NumberFormat, Scheme

MODELS = ("Llama", "Qwen3", "OPT")
CHOSEN = ("dp", "tp", "dp×tp", "ZeRO-3")
DECODE_GOAL = 0.6
CHOICES = ("greedy", "sampled")
SCHEMES = {
    "int8": Scheme.preset("int8"),
    "int8-dynamic": Scheme.preset("int8-dynamic"),
    "int4": Scheme(NumberFormat(4, strategy="group", group_size=8)),
}


def different(model: str, scheme: Scheme, layout: str, way: str) -> bool:
    """True if some rank's tokens are not those of the quantized model on one device."""
    wanted = WAYS[way](mw.quantize(make(model), scheme))
    place = LAYOUTS[layout]
    found = mw.simulate(lambda: WAYS[way](mw.quantize(place.put_on(make(model)), scheme)), place.ranks)
    return not all(torch.equal(tokens, wanted) for tokens in found)


def wrong_cells(models: tuple[str, ...]) -> Iterator[str]:
    for model in models:
        for name, scheme in SCHEMES.items():
            for layout in CHOSEN:
                yield from (
                    f"{model}, {name}, {layout}, {way}" for way in CHOICES if different(model, scheme, layout, way)
                )


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of cells with other tokens."""
    models = MODELS[:1] if quick else MODELS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = list(wrong_cells(models))
        ratios = decode_ratios(hidden=512 if quick else 2048)
    is_fast = quick or max(ratios["int8"], ratios["w4a16"]) <= DECODE_GOAL
    return {
        "name": "quantize_generate",
        "value": len(wrong),
        "goal": f"0 cells with other tokens, on 4 meshes; a token at most {DECODE_GOAL} x of bfloat16",
        "ok": not wrong and is_fast,
        "details": {
            "models": list(models),
            "schemes": list(SCHEMES),
            "layouts": list(CHOSEN),
            "cells": len(models) * len(SCHEMES) * len(CHOSEN) * len(CHOICES),
            "wrong": wrong,
            "token_over_bfloat16": ratios,
        },
    }


if __name__ == "__main__":
    print(json.dumps(run()))
