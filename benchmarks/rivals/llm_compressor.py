"""Quantize a checkpoint of transformers with llm-compressor; run by the interpreter that has it, without Meshwright.

    PYTHON llm_compressor.py REQUEST

REQUEST is a JSON file: `model` (a folder), `calibration` (a file of safetensors with `input_ids` [batches, rows,
length]), `recipes` (name → modifiers as name → arguments, in order), `turns` (the runs that are timed) and `out` (a
folder for the quantized checkpoints, by the number of the recipe). The last line that it prints is a JSON object: the
version, and the seconds of each turn by the name of the recipe.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader


def modifiers(recipe: dict[str, dict[str, Any]]) -> list[Any]:
    """Return the modifiers of a recipe."""
    places = {
        "GPTQModifier": "llmcompressor.modifiers.gptq",
        "AWQModifier": "llmcompressor.modifiers.transform.awq",
        "SmoothQuantModifier": "llmcompressor.modifiers.transform.smoothquant",
        "QuantizationModifier": "llmcompressor.modifiers.quantization",
    }
    return [getattr(importlib.import_module(places[name]), name)(**arguments) for name, arguments in recipe.items()]


def quantized(folder: str, recipe: dict[str, dict[str, Any]], batches: Tensor) -> tuple[Any, float]:
    """Return the quantized model, and the seconds of the call."""
    transformers = importlib.import_module("transformers")
    llmcompressor = importlib.import_module("llmcompressor")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    data = DataLoader([{"input_ids": ids} for ids in batches], batch_size=None)  # type: ignore[arg-type]
    chosen = modifiers(recipe)
    tokens = importlib.import_module("tokenizers")  # `oneshot` wants a tokenizer; batches of tokens need none
    processor = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens.Tokenizer(tokens.models.BPE()))
    start = time.perf_counter()
    llmcompressor.oneshot(
        model=model, dataset=data, recipe=chosen, processor=processor, num_calibration_samples=len(batches)
    )
    return model, time.perf_counter() - start


def without_pinned_memory() -> None:
    """Let AWQ run without an accelerator: version 0.14 pins memory in any case, which changes no number."""
    cache = importlib.import_module("llmcompressor.pipelines.cache")
    cache.IntermediatesCache.pin_memory = lambda self, *args, **kwargs: None


def main(request: Path) -> None:
    torch.set_num_threads(1)
    without_pinned_memory()
    told = json.loads(request.read_text())
    batches = load_file(told["calibration"])["input_ids"]
    seconds: dict[str, list[float]] = {}
    for number, (name, recipe) in enumerate(told["recipes"].items()):
        for turn in range(told["turns"]):
            model, took = quantized(told["model"], recipe, batches)
            seconds.setdefault(name, []).append(took)
            if turn == told["turns"] - 1 and told["out"]:
                model.save_pretrained(Path(told["out"]) / str(number), save_compressed=True)
    print(json.dumps({"version": importlib.import_module("llmcompressor").__version__, "seconds": seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
