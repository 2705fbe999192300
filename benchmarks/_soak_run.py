"""One rank of the figure `soak`: training steps with saves, loads and resizes, and its memory over time."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.layout import Cache

WARM = 0.2
"""Part of the run in which every size comes for the first time."""
SIZES, ROWS, LENGTHS = 300, (2, 32), (2, 32)
SAME, SAVE, LOAD, REMAKE, KEEP = 20, 100, 200, 7, 3
"""Steps of one size, steps between saves, steps between loads, loads between new models, checkpoints that stay."""
SAMPLES = 40
VOCABULARY, WIDTH, HEADS = 64, 32, 2


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of a process after a step: the resident set in MB, blocks of Python, and entries of bounded caches."""

    step: int
    resident: float
    blocks: int
    cached: int


def sample(step: int) -> Sample:
    """Return the memory of this process after everything that can be freed is freed."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    cached = sum(entries for entries, _ in caches().values())
    return Sample(step, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, sys.getallocatedblocks(), cached)


def caches() -> dict[str, tuple[int, int]]:
    """Return the number of entries of each bounded cache of the library, and its bound."""
    found: dict[str, tuple[int, int]] = {}
    seen: set[int] = set()
    for name, module in sorted(sys.modules.items()):
        for key, value in vars(module).items() if name.startswith("meshwright.") else ():
            bound = _bound(value)
            if bound is not None and id(value) not in seen:
                seen.add(id(value))
                found[f"{name}.{key}"] = bound
    return found


def _bound(value: Any) -> tuple[int, int] | None:
    if isinstance(value, Cache):
        return len(value), value.most
    if isinstance(value, type(lru_cache(len))):
        info = value.cache_info()
        return None if info.maxsize is None else (info.currsize, info.maxsize)
    return None


class Net(nn.Module):
    """A small causal language model that returns its loss. No table in it depends on a size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        logits = self.head(x + self.down(F.gelu(self.up(x))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Trainer:
    """A model with its optimizer, trained eagerly or as a static program; both read and write the same checkpoints."""

    def __init__(self, mesh: mw.ProcessMesh, static: bool) -> None:
        torch.manual_seed(0)
        self.is_static, self.net = static, Net()
        if "tp" in mesh.dim_names:
            _cut(self.net, mesh)
        mw.shard_layer(self.net, mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.model = mw.to_static(self.net, None, None, self.optimizer) if static else self.net

    def step(self, tokens: Tensor) -> None:
        """Train one step."""
        if self.is_static:
            self.model(tokens)
            return
        self.optimizer.zero_grad()
        self.model(tokens).backward()
        self.optimizer.step()

    def save(self, folder: Path, step: int, background: bool) -> None:
        """Write a checkpoint; if in the background, the next save or load waits for it."""
        mw.save_checkpoint(folder, step, self.model, self._own(), async_save=background, keep=KEEP)

    def load(self, folder: Path) -> None:
        """Read the latest checkpoint."""
        mw.load_checkpoint(folder, self.model, self._own())

    def _own(self) -> torch.optim.Optimizer | None:
        return None if self.is_static else self.optimizer


def _cut(net: Net, mesh: mw.ProcessMesh) -> None:
    """Shard the feed-forward layers over the axis `tp`."""
    whole = mw.Replicate()
    for layer, name, dim in ((net.up, "weight", 0), (net.up, "bias", 0), (net.down, "weight", 1)):
        setattr(layer, name, mw.shard_tensor(getattr(layer, name), mesh, [whole, mw.Shard(dim)]))


@dataclass(frozen=True, slots=True)
class Plan:
    """Length of a run, loads between new models (0 if the model stays), and steps between saves and between loads."""

    steps: int
    remake: int = 0
    seed: int = 0
    save: int = SAVE
    load: int = LOAD

    @property
    def warm(self) -> int:
        """Return the step from which on no size is new."""
        return int(self.steps * WARM)

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Yield rows and length for each step: first every size in turn, in steps of both modes, then any of them."""
        draw = random.Random(self.seed)
        every = max(1, self.warm // 2 // SIZES)
        pool = [(draw.randint(*ROWS), draw.randint(*LENGTHS)) for _ in range(max(1, min(SIZES, self.warm // 2)))]
        for step in range(self.warm):
            block, inside = divmod(step, self.load)
            yield pool[(block // 2 * self.load + inside) // every % len(pool)]
        size = pool[0]
        for step in range(self.warm, self.steps):
            size = draw.choice(pool) if step % SAME == 0 else size
            yield size

    def is_sampled(self, step: int) -> bool:
        """True if memory is sampled after this step."""
        every = max(SAME, self.steps // SAMPLES)
        return step >= self.warm and (step % every == 0 or step == self.steps)


def soak(folder: Path, plan: Plan, mesh: mw.ProcessMesh, at_sample: Callable[[int], Any]) -> list[Any]:
    """Return the results of `at_sample` at even distances, while blocks of eager and static steps alternate."""
    found: list[Any] = []
    trainers = [Trainer(mesh, static) for static in (False, True)]
    tokens, last = torch.empty(0), (0, 0)
    for step, (rows, length) in enumerate(plan.sizes()):
        block, inside = divmod(step, plan.load)
        static = block % 2 == 1
        if inside == 0 and block:
            if plan.remake and block % plan.remake == 0:
                trainers[static] = Trainer(mesh, static)
            trainers[static].load(folder)
        full = -(-rows // mesh.size) * mesh.size if static else rows  # programs with variable sizes need equal parts
        if last != (full, length):
            last = full, length
            tokens = mw.shard_tensor(torch.randint(0, VOCABULARY, last), mesh, [mw.Shard(0)])
        trainers[static].step(tokens)
        done = step + 1
        if done % plan.save == 0:
            trainers[static].save(folder, done, background=done % plan.load != 0)
        if plan.is_sampled(done):
            found.append(at_sample(done))
    return found


def on_processes(folder: str, steps: str, save: str = str(SAVE), load: str = str(LOAD)) -> None:
    """Run as one of several processes; write the samples."""
    mw.init_process(backend="gloo")
    mesh = mw.init_mesh(dp=-1)
    begin = time.perf_counter()
    found = soak(Path(folder) / "run", Plan(int(steps), save=int(save), load=int(load)), mesh, sample)
    _write(Path(folder) / f"seen.{mw.get_rank()}", found, begin)


def on_simulated_ranks(folder: str, steps: str) -> None:
    """Run all ranks in this process, two by two; write the samples of the process."""

    def train() -> list[Any]:
        mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
        look = sample if mw.get_rank() == 0 else _nothing  # the ranks share one process
        return soak(Path(folder) / "run", Plan(int(steps), REMAKE), mesh, look)

    begin = time.perf_counter()
    found = mw.simulate(train, 4)[0]
    _write(Path(folder) / "seen.0", found, begin)


def _nothing(_: int) -> None:
    """Return None: another rank of the same process samples the memory."""


def _write(path: Path, found: list[Sample], begin: float) -> None:
    told = {"samples": [asdict(s) for s in found], "caches": caches(), "seconds": round(time.perf_counter() - begin)}
    path.write_text(json.dumps(told))
