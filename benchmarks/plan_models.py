"""Search: seconds from a module to a plan for models that others wrote, at the sizes of real training.

Each model of `transformers` is made on the meta device, captured, and planned on every mesh of 64 devices (256 for the
largest), in a process of its own, whose peak memory is read at the end.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import meshwright as mw
from meshwright.graph import CaptureError

from ._matrix_subject import Task
from ._own_process import own_process, peak_gibibytes

MACHINES = "{}xH100, 8 per node, 400G"
SECONDS = 30.0
SECONDS_OF = {"BigBird-base": 60.0}
"""Goal of models whose attention has blocks of its own for each text."""
LENGTH = 1024


@dataclass(frozen=True)
class Large:
    """A model's class, its configuration, and the shapes of its batch after the rows; a row per so many devices."""

    model: str
    config: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batch: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"input_ids": (LENGTH,), "labels": (LENGTH,)})
    constants: Mapping[str, Any] = field(default_factory=lambda: {"use_cache": False})
    ranks: int = 64
    trains: bool = True
    """False for a model that draws numbers outside of torch in training, which no program can do."""

    def make(self) -> Task:
        """Return the model on the meta device, with its loss."""
        library = importlib.import_module("transformers")
        config = getattr(library, self.config)(**self.options)
        with torch.device("meta"):
            return Task(getattr(library, self.model)(config).train(self.trains), tuple(self.batch), self.constants)

    def draw(self) -> list[torch.Tensor]:
        """Return a batch without values: integers, except for images."""
        return [
            torch.empty(self.ranks, *shape, device="meta", dtype=torch.float32 if len(shape) == 3 else torch.long)
            for shape in self.batch.values()
        ]


LONG = {"input_ids": (4096,), "labels": (4096,)}
IMAGES = {"pixel_values": (3, 224, 224), "labels": ()}
MODELS = {
    "BERT-large": Large(
        "BertForMaskedLM", "BertConfig",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
        {"input_ids": (512,), "labels": (512,)}, {},
    ),
    "ViT-L/16": Large(
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
         "num_labels": 1000}, IMAGES, {},
    ),
    "T5-3B": Large(
        "T5ForConditionalGeneration", "T5Config",
        {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32, "decoder_start_token_id": 0},
        {"input_ids": (512,), "labels": (512,)},
    ),
    "BigBird-base": Large("BigBirdForMaskedLM", "BigBirdConfig", {}, LONG, {}, trains=False),
    "GPT-2 XL": Large("GPT2LMHeadModel", "GPT2Config", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "Mixtral-8x7B": Large("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 8}),
    "DeepSeek-V3": Large("DeepseekV3ForCausalLM", "DeepseekV3Config", ranks=256),
    "RWKV-4 1.5B": Large(
        "RwkvForCausalLM", "RwkvConfig", {"hidden_size": 2048, "num_hidden_layers": 24, "context_length": LENGTH}
    ),
    "Mamba 1.4B": Large("MambaForCausalLM", "MambaConfig", {"hidden_size": 2048, "num_hidden_layers": 48}),
    "Mamba-2 2.7B": Large(
        "Mamba2ForCausalLM", "Mamba2Config",
        {"hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64, "n_groups": 8},
    ),
}  # fmt: skip


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: seconds of the slowest model; each model is in the details."""
    found = {name: own_process("plan_models", name) for name in ([*MODELS][:2] if quick else MODELS)}
    late = [name for name, case in found.items() if case["seconds"] > SECONDS_OF.get(name, SECONDS)]
    slowest = max(case["seconds"] for case in found.values())
    return {
        "name": "plan_models",
        "value": slowest,
        "goal": f"s from module to plan of the slowest of {len(found)} models, at most {SECONDS:g};"
        f" at most {max(SECONDS_OF.values()):g} for {' and '.join(SECONDS_OF)}",
        "ok": not late,
        "details": found,
    }


def case(name: str) -> dict[str, Any]:
    """Return the result of one model, in this process: a plan, or a refusal if its forward is a long Python loop."""
    model, batch = MODELS[name].make(), MODELS[name].draw()
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    begin, used = time.perf_counter(), time.process_time()
    found = planned(model, batch, MODELS[name].ranks)
    return {
        "seconds": round(time.perf_counter() - begin, 2),
        "processor seconds": round(time.process_time() - used, 2),
        "GiB": peak_gibibytes(),
        "parameters": f"{billions:.2f}e9",
        **found,
    }


def planned(model: Task, batch: list[torch.Tensor], ranks: int) -> dict[str, Any]:
    try:
        best = mw.plan(model, batch, cluster=MACHINES.format(ranks))[0]
    except CaptureError as error:
        return {"refused": re.sub(r"\S*/site-packages/", "", error.found)}
    return {"operators": len(best.cuts.program.nodes) if best.cuts else 0, "plan": str(best).splitlines()[0]}


if __name__ == "__main__":
    print(json.dumps(case(sys.argv[1])))
