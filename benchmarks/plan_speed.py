"""Search: seconds from a module, or from the sizes of a model, to the best plan, without a device.

Llama-3-8B as a module on the meta device: captured, and every operator's sharding chosen, on every mesh of 64 ranks.
And models that are trained on thousands of devices, by their sizes: degrees, schedule, chunks, microbatch, ZeRO,
recompute. Each case runs in a process of its own, whose peak memory is read at the end.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

import meshwright as mw
from meshwright.cost import cluster
from meshwright.models import Llama, LlamaConfig
from meshwright.search import Transformer, choose

from ._own_process import own_process, peak_gibibytes

SECONDS, GIBIBYTES, LARGE = 5.0, 1.5, 60.0
MODULE = "Llama-3-8B, module, 64 ranks"
SIZES = {
    "Llama-3.1-405B, 16,384 ranks": (Transformer(126, 16384, 128, 8, 128, 53248, 128256), "16384xH100", 2048, 8192),
    "GPT-1T, 3,072 ranks": (
        Transformer(128, 25600, 160, 160, 160, 102400, 51200, gated=False, tied=True), "3072xA100", 3072, 2048,
    ),
}  # fmt: skip


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: seconds for the module; the others are in the details."""
    found = {name: own_process("plan_speed", name) for name in (MODULE, *SIZES)}
    module = found[MODULE]
    reached = module["seconds"] <= SECONDS and module["GiB"] <= GIBIBYTES
    return {
        "name": "plan_speed",
        "value": module["seconds"],
        "goal": f"s from module to plan, at most {SECONDS:g}, in at most {GIBIBYTES} GiB; by sizes at most {LARGE:g} s",
        "ok": reached and all(found[name]["seconds"] <= LARGE for name in SIZES),
        "details": found,
    }


def case(name: str) -> dict[str, Any]:
    """Return the result of one case, in this process."""
    begin = time.perf_counter()
    found = of_module() if name == MODULE else of_sizes(name)
    seconds = time.perf_counter() - begin
    return {"seconds": round(seconds, 2), "GiB": peak_gibibytes(), **found}


def of_module() -> dict[str, Any]:
    """Return the best meshes for 64 sequences of 1,024 tokens."""
    with torch.device("meta"):
        model = Llama(LlamaConfig(vocab=128256, hidden=4096, layers=32, heads=32, kv_heads=8, feed_forward=14336))
        batch = [torch.empty(64, 1024, dtype=torch.long) for _ in range(2)]
    plans = mw.plan(model, batch, cluster="64xH100, 8 per node, 400G")
    return {"plans": [f"dp={p.dp} tp={p.tp}: {p.seconds:.3f} s" for p in plans]}


def of_sizes(name: str) -> dict[str, Any]:
    """Return the best of the plans that were compared."""
    model, machines, batch, sequence = SIZES[name]
    there = cluster(machines)
    found = choose(model, there, there.devices or 1, batch, sequence)
    return {"considered": found.considered, "fitting": found.fitting, "plan": str(found.best)}


if __name__ == "__main__":
    print(json.dumps(case(sys.argv[1])))
