"""Seconds and memory from a module to the program of every rank, for models and meshes beyond this machine.

Llama-3-8B on 64 ranks and Llama-3-70B on 8,192 (a mesh of three axes), forward, backward and AdamW, with parameters on
the meta device. Each case runs in a process of its own, whose peak memory is read at the end.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import meshwright as mw
from meshwright.comm import PeerlessCommunicator, using_communicator
from meshwright.models import Llama, LlamaConfig

from ._own_process import own_process

SIZES = {
    "8b": {"vocab": 128256, "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "feed_forward": 14336},
    "70b": {"vocab": 128256, "hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "feed_forward": 28672},
}
MESHES = {8: (1, 1, 8), 64: (2, 4, 8), 8192: (4, 256, 8), 16384: (4, 512, 8)}
GOALS = {("8b", 64): 60.0, ("70b", 8192): 120.0}
ENDS, LAYERS = (8, 16384), (8, 16, 32)
NOISE = 1.25


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: seconds for the larger of the two models; the whole table is in the details."""
    repeats = 1 if quick else 3
    rows = {f"{name} on {ranks} ranks": cases([(name, ranks, 0)], repeats)[0] for name, ranks in GOALS}
    ends = dict(zip(ENDS, cases([("8b" if quick else "70b", ranks, 0) for ranks in ENDS], repeats), strict=True))
    layers = dict(zip(LAYERS, cases([("8b", 64, n) for n in LAYERS], repeats), strict=True))
    least = [layers[n]["least"] for n in LAYERS]
    growth = (least[2] - least[1]) / (2 * (least[1] - least[0]))
    flat = max(e["least"] for e in ends.values()) / min(e["least"] for e in ends.values())
    value = rows["70b on 8192 ranks"]["seconds"]
    reached = all(rows[f"{name} on {ranks} ranks"]["seconds"] <= goal for (name, ranks), goal in GOALS.items())
    return {
        "name": "compile_scale",
        "value": value,
        "goal": "s for Llama-3-70B on 8,192 ranks at most 120, Llama-3-8B on 64 at most 60, no growth with ranks",
        "ok": reached and flat <= NOISE and growth <= NOISE,
        "details": {
            "cases": rows,
            "8 and 16384 ranks": ends,
            "slower of the two, times": round(flat, 3),
            "layers": layers,
            "second doubling of layers, against linear": round(growth, 3),
        },
    }


def cases(asked: Sequence[tuple[str, int, int]], repeats: int) -> list[dict[str, Any]]:
    """Return median and least seconds of several processes per case; cases alternate, so that they share slow moments.

    Ratios use the least seconds, because other work on the machine only adds time.
    """
    runs: list[list[dict[str, Any]]] = [[] for _ in asked]
    for _ in range(repeats):
        for case, found in zip(asked, runs, strict=True):
            found.append(own_process("compile_scale", *case))
    return [summary(found) for found in runs]


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = [run["seconds"] for run in runs]
    return {**runs[0], "seconds": round(statistics.median(seconds), 2), "least": min(seconds)}


def record(name: str, ranks: int, layers: int) -> dict[str, Any]:
    """Return the seconds and the memory of one case, in this process."""
    sizes = SIZES[name] | ({"layers": layers} if layers else {})
    stages, data, _ = shape = MESHES[ranks]
    with using_communicator(PeerlessCommunicator(rank=0, size=ranks)):
        mesh = mw.ProcessMesh(np.arange(ranks).reshape(shape), ["node", "dp", "tp"])
        with torch.device("meta"):
            model = Llama(LlamaConfig(**sizes))
            batch = [torch.empty(stages * data, 4096, dtype=torch.long) for _ in range(2)]
        mark(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        static = mw.to_static(model, None, None, optimizer)
        laid = [mw.shard_tensor(x, mesh, [mw.Shard(0), mw.Shard(0)]) for x in batch]
        start = time.perf_counter()
        program = static.compile(*laid)
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {"seconds": round(seconds, 2), "peak_mib": peak, "nodes": len(program.nodes)}


def mark(model: Llama, mesh: mw.ProcessMesh) -> None:
    """Shard the weights as Megatron does; all other layouts follow from them and from the layout of the batch."""
    replicated = [mw.Replicate(), mw.Replicate()]
    for name, part in model.named_modules():
        cut = {"q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "o": 1, "down": 1}.get(name.split(".")[-1])
        if cut is not None:
            part.weight = mw.shard_tensor(part.weight, mesh, [*replicated, mw.Shard(cut)])


if __name__ == "__main__":
    print(json.dumps(record(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
