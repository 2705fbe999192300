"""Processor seconds of the first static step of GPT-2 (12 layers, 4 simulated ranks), and of a restart.

    python -m benchmarks first_static_step

The first step captures, records and runs a training step with AdamW, and stores the program in a folder. The second
step may take at most 1.2 times as long as later ones (the median of ten). The restart makes a step with a new model,
which loads the stored program: nothing may be recorded. Processor time is that of the process, over all threads. The
time to build the models is not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import current_communicator

RANKS = 4
LATER = 10
FIRST_GOAL, SECOND_GOAL, RESTART_GOAL = 8.0, 1.2, 2.0


class Logits(nn.Module):
    """A GPT-2 language model that returns its logits alone."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": layers, "n_embd": width, "n_head": width // 64, "vocab_size": 1024, "n_positions": 64}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, **off))

    def forward(self, tokens_bs: Tensor) -> Tensor:
        return self.model(tokens_bs, use_cache=False).logits


def _loss(logits_bsv: Tensor, labels_bs: Tensor) -> Tensor:
    return F.cross_entropy(logits_bsv.flatten(0, 1), labels_bs.flatten())


def _seconds(steps: int, layers: int, width: int, restart: bool) -> list[float]:
    """Return the processor seconds of each step, from the first rank's start to the last one's end."""
    spans: list[tuple[int, float, float]] = []

    def run(act: Callable[[], Any], at: int) -> None:
        begin = time.process_time()
        act()
        spans.append((at, begin, time.process_time()))

    def train() -> int:
        mesh = mw.init_mesh(dp=2, tp=2)
        torch.manual_seed(0)
        model = Logits(layers, width)
        for block in model.model.transformer.h:
            for layer, dim in ((block.attn.c_proj, 0), (block.mlp.c_fc, 1), (block.mlp.c_proj, 0)):
                layer.weight = mw.shard_tensor(layer.weight, mesh, [mw.Replicate(), mw.Shard(dim)])
        step = mw.to_static(model, None, _loss, torch.optim.AdamW(model.parameters(), lr=1e-3))
        batch = [mw.shard_tensor(torch.randint(0, 1024, (4, 32)), mesh, [mw.Shard(0), mw.Replicate()]) for _ in "xy"]
        current_communicator().barrier(tuple(range(RANKS)))  # measure from the moment when every rank has its model
        for at in range(steps):
            run(lambda: step(*batch).item(), at)
        return step.recordings

    recordings = mw.simulate(train, RANKS)
    if restart and any(recordings):
        raise RuntimeError(f"the restart recorded {recordings} programs")
    ends = [[(begin, end) for n, begin, end in spans if n == at] for at in range(steps)]
    return [max(end for _, end in found) - min(begin for begin, _ in found) for found in ends]


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure; `quick` takes two layers."""
    layers, width = (2, 64) if quick else (12, 256)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHWRIGHT_PROGRAMS"] = folder
        _seconds(1, 1, 64, restart=False)  # imports
        first, second, *later = _seconds(2 + LATER, layers, width, restart=False)
        restart = _seconds(1, layers, width, restart=True)[0]
    ratio = second / statistics.median(later)
    value = {"first step s": round(first, 2), "second / later": round(ratio, 2), "restart s": round(restart, 2)}
    return {
        "name": "first_static_step",
        "value": value,
        "goal": f"first step <= {FIRST_GOAL:g} s, second <= {SECOND_GOAL} x a later one, restart <= {RESTART_GOAL:g} s",
        "ok": first <= FIRST_GOAL and ratio <= SECOND_GOAL and restart <= RESTART_GOAL,
        "rival": None,
        "details": {"layers": layers, "width": width, "ranks": RANKS, "later step s": statistics.median(later)},
    }


if __name__ == "__main__":
    print(json.dumps(run()))
