"""Seconds and memory of a whole step of GRPO: generation in its own layout, beside generation in that of training.

A Llama with 6 layers of width 512 in float32 trains with ZeRO-3 on two processes over Gloo. A step gives the sampler
the weights, generates 128 tokens for 2 samples of 4 prompts, and makes a training step on them with AdamW. The sampler
has tensor parallelism, and its decode step is a program. The rivals call `generate()` of transformers on the
trainer, with a cache and without one. All take turns in the same processes, with one thread each.

The memory is the peak of the tensors that a step allocates, in 16 tokens: with `sampler.sleep()` before the training
step, beside a training step alone. Bytes of weights that the sampler copies are counted for equal layouts too.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from benchmarks._transports import environment
from benchmarks.generate_speed import LAYERS, PROMPT, RANKS, STYLES, llama, prompts, timed
from benchmarks.static_speed import python_path
from benchmarks.weight_sync import allocated
from meshwright.comm import launch

LEAST = {"cache": 2.1, "no cache": 4.0}
PROMPTS, SAMPLES, NEW, QUICK_NEW, MEMORY_NEW = 4, 2, 128, 48, 16
CAP = 4 << 20
TURNS = 3
LINE = list(range(RANKS))


def main(path: str, new: int) -> None:
    """Run one rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    mw.init_process(backend="gloo")
    found = {"seconds": seconds_of_steps(new), "memory": memory_of_a_step(), "copied": bytes_copied_by_equal_layouts()}
    if torch.distributed.get_rank() == 0:
        Path(path).write_text(json.dumps(found))
    torch.distributed.barrier()


def trainer_and_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mw.parallelize(model, optimizer, mw.ProcessMesh(LINE, ["dp"]), mw.Parallelism(zero=3))
    return model, optimizer


def tensor_parallel_sampler(static_after: int | None) -> mw.Sampler:
    with torch.device("meta"):
        model = llama()
    mw.parallelize(model, None, mw.ProcessMesh(LINE, ["tp"]), mw.Parallelism(STYLES))
    return mw.sampler(model, static_after=static_after)


def train(trainer: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, new: int) -> None:
    """Make a step with the loss of GRPO; the reward is the parity of the last token."""
    reward = (tokens[:, -1] % 2).float().unflatten(0, (PROMPTS, SAMPLES))
    advantage = (reward - reward.mean(1, True)).flatten()[:, None]
    logits = trainer(tokens[:, :-1]).logits[:, -new:].log_softmax(-1)
    now = logits.gather(-1, tokens[:, -new:, None])[..., 0]
    (-advantage * (now - now.detach()).exp()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def seconds_of_steps(new: int) -> dict[str, float]:
    """Return the median seconds of a step, by the way of generation."""
    trainer, optimizer = trainer_and_optimizer()
    sampler = tensor_parallel_sampler(static_after=0)
    ids = torch.tensor(prompts(PROMPTS, PROMPT))
    rows = ids.repeat_interleave(SAMPLES, 0)

    def by_sampler() -> torch.Tensor:
        mw.weights.sync(trainer, sampler)
        found = sampler.generate(ids, new, n=SAMPLES, seed=1)
        return torch.cat([rows, found.tokens], 1)

    def by_trainer(use_cache: bool) -> torch.Tensor:
        mask = torch.ones_like(rows)
        with torch.no_grad():
            return trainer.generate(rows, attention_mask=mask, max_new_tokens=new, do_sample=True, use_cache=use_cache)

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "sampler": by_sampler,
        "cache": lambda: by_trainer(True),
        "no cache": lambda: by_trainer(False),
    }
    by_sampler()  # records the program
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS):
        for name, way in ways.items():
            if name == "sampler" or turn == 0 or (name == "cache" and new == NEW):
                times[name].append(timed(lambda way=way: train(trainer, optimizer, way(), new)))
    return {name: round(statistics.median(found), 3) for name, found in times.items()}


def memory_of_a_step() -> dict[str, int]:
    """Return the peaks of a training step and of a whole step, and the bytes of the cache, on this rank."""
    trainer, optimizer = trainer_and_optimizer()
    sampler = tensor_parallel_sampler(static_after=None)
    ids = torch.tensor(prompts(PROMPTS, PROMPT))
    rows = ids.repeat_interleave(SAMPLES, 0)
    tokens = torch.cat([rows, torch.ones(len(rows), MEMORY_NEW, dtype=torch.long)], 1)
    for _ in range(2):
        train(trainer, optimizer, tokens, MEMORY_NEW)

    def whole_step() -> None:
        mw.weights.sync(trainer, sampler, memory_cap=CAP)
        found = sampler.generate(ids, MEMORY_NEW, n=SAMPLES, seed=1)
        sampler.sleep()
        train(trainer, optimizer, torch.cat([rows, found.tokens], 1), MEMORY_NEW)

    training = allocated(lambda: train(trainer, optimizer, tokens, MEMORY_NEW))
    whole = allocated(whole_step)
    cache = 2 * LAYERS * len(rows) * (PROMPT + MEMORY_NEW) * 512 * 4 // RANKS
    return {"training step": training, "whole step": whole, "cache": cache, "bucket": CAP}


def bytes_copied_by_equal_layouts() -> int:
    """Return the bytes of weights that a sampler with the trainer's layout copies."""
    trainer, model = llama(), llama()
    for each in (trainer, model):
        mw.parallelize(each, None, mw.ProcessMesh(LINE, ["tp"]), mw.Parallelism(STYLES))
    copied = set(mw.weights.sync(trainer, model).copied)
    return sum(p.to_local().nbytes for name, p in model.named_parameters() if name in copied)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: how many times faster a whole step is, and its memory beyond what it may take."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        env = {"PYTHONPATH": python_path(), **environment(gloo=True), "MESHWRIGHT_PROGRAMS": f"{folder}/programs"}
        argv = ["-m", "benchmarks.rlhf", str(path), str(QUICK_NEW if quick else NEW)]
        status = launch(argv, RANKS, {**os.environ, **env}, timeout=1800)
        found = {"failed": f"the processes ended with status {status}"} if status else json.loads(path.read_text())
    value = {} if "failed" in found else values(found)
    is_faster = bool(value) and all(value[f"{name} / sampler"] >= least for name, least in LEAST.items())
    return {
        "name": "rlhf",
        "value": value,
        "goal": f"seconds in the training layout / sampler at least {LEAST}; memory at most 1; nothing copied",
        "ok": is_faster and value["memory / bound"] <= 1 and not value["copied where layouts agree"],
        "details": {"unit": "seconds and bytes, one thread a process, two processes over Gloo", **found},
    }


def values(found: dict[str, Any]) -> dict[str, float]:
    seconds, memory = found["seconds"], found["memory"]
    bound = memory["training step"] + memory["cache"] + memory["bucket"]
    return {
        **{f"{name} / sampler": round(seconds[name] / seconds["sampler"], 2) for name in LEAST},
        "memory / bound": round(memory["whole step"] / bound, 3),
        "copied where layouts agree": found["copied"],
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1], int(sys.argv[2]))
    else:
        print(json.dumps(run()))
