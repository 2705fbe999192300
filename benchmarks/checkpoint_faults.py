"""Checkpoints: writers killed at random moments, files damaged at random places, resumes on other meshes.

*Killed*: a process of four simulated ranks saves one step after the other, synchronously and in the background, and
gets SIGKILL at a random moment. The latest complete checkpoint must be at least the last one for which `wait` returned,
and have the right numbers to the bit. *Damaged*: one bit of any file is flipped; files are truncated, missing,
exchanged, or of another kind. Each damage must raise a CheckpointError, with nothing loaded. *Other meshes*: a Llama
trained on dp 2 x tp 2 with AdamW resumes on the same mesh (equal losses), on 8 ranks with every weight sharded over all
of them, on 2 pipeline stages, and on one device.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import meshwright as mw
from meshwright.checkpoint import CheckpointError, open_checkpoint
from meshwright.models import Llama, LlamaConfig, mark

KILLS, FLIPS, CUTS = 200, 150, 50
STEPS, MORE, BATCH, SEQUENCE = 3, 3, 8, 16
MODEL = LlamaConfig(vocab=64, hidden=32, layers=2, heads=4, kv_heads=2, feed_forward=48)
MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
CLOSE = 1e-6


# --- killed ------------------------------------------------------------------------------------------------------


def state_of(step: int, lay: bool) -> dict[str, Any]:
    """Return a state whose numbers all follow from its step."""
    whole = {
        "w": torch.arange(40_000.0).reshape(200, 200) + step,
        "b": torch.full((1_001,), float(step)),
        "p": torch.arange(30_000) * step,
    }
    cuts = {"w": [mw.Shard(1), mw.Shard(0)], "b": [mw.Replicate(), mw.Shard(0)], "p": []}
    tensors = {name: mw.shard_tensor(x, MESH, cuts[name]) for name, x in whole.items()} if lay else whole
    return {**tensors, "step": step}


def write_until_killed(folder: Path, step: int, tell: int) -> None:
    """Save step after step on four ranks until the process is killed; write each complete step to the pipe `tell`."""

    def program() -> None:
        at = step
        while True:
            at += 1
            saving = mw.save_state_dict(
                state_of(at, lay=True), folder / f"step_{at:08}", async_save=at % 2 == 0, keep=2
            )
            saving.wait()
            if mw.get_rank() == 0:
                os.write(tell, at.to_bytes(8, "little"))

    mw.simulate(program, 4)


def killed(folder: Path, seed: int) -> dict[str, bool]:
    """Start a writer, kill it, and return whether it died while writing and whether the checkpoint is right."""
    latest = mw.latest_checkpoint(folder)
    before = open_checkpoint(latest).values["step"] if latest else 0
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hear)
        write_until_killed(folder, before, tell)
        os._exit(0)
    os.close(tell)
    told = int.from_bytes(os.read(hear, 8), "little")
    time.sleep(random.Random(seed).uniform(0.0, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(hear, 8):
        told = int.from_bytes(more, "little")
    os.close(hear)
    inside = any(path.name.endswith(".writing") for path in folder.iterdir())
    return {"inside": inside, "right": is_intact(folder, told)}


def is_intact(folder: Path, told: int) -> bool:
    """True if the latest complete step is `told` or a later one, and has the right numbers."""
    state = {name: torch.zeros_like(x) if isinstance(x, Tensor) else 0 for name, x in state_of(1, lay=False).items()}
    try:
        mw.load_state_dict(state, folder)
    except CheckpointError:
        return False
    expected = state_of(state["step"], lay=False)
    same = all(torch.equal(state[name], x) for name, x in expected.items() if isinstance(x, Tensor))
    return same and state["step"] >= told > 0


def all_killed(count: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as place:
        lives = [killed(Path(place) / "run", seed) for seed in range(count)]
    return {
        "kills": count,
        "while writing": sum(life["inside"] for life in lives),
        "not loaded": sum(not life["right"] for life in lives),
    }


# --- damaged -----------------------------------------------------------------------------------------------------


def damage_kinds(folder: Path, flips: int, cuts: int) -> dict[str, Callable[[Path], Any]]:
    """Return all damages by name, each a function of a folder like this one."""
    draw = random.Random(0)
    files = sorted(path.name for path in folder.iterdir())
    found: dict[str, Callable[[Path], Any]] = {}
    for n in range(flips):
        name = files[n % len(files)]
        bit = draw.randrange(8 * (folder / name).stat().st_size)
        found[f"bit {bit} of {name}"] = lambda place, name=name, bit=bit: flip(place / name, bit)
    for n in range(cuts):
        name = files[n % len(files)]
        size = draw.randrange((folder / name).stat().st_size)
        found[f"{name} cut to {size}"] = lambda place, name=name, size=size: os.truncate(place / name, size)
    for at, name in enumerate(files):
        other = files[at - 1]
        found[f"no {name}"] = lambda place, name=name: os.remove(place / name)
        found[f"{other} as {name}"] = lambda place, name=name, other=other: shutil.copy(place / other, place / name)
        found[f"text as {name}"] = lambda place, name=name: (place / name).write_text("a file of something else")
    return found


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)


def is_refused(folder: Path) -> bool:
    """True if two ranks refuse the checkpoint together, and have loaded nothing."""
    pair = mw.ProcessMesh([0, 1], ["x"])
    left: list[Tensor] = []

    def load() -> None:
        w = mw.shard_tensor(torch.zeros(200, 200), pair, [mw.Shard(0)])
        state = {"w": w, "b": torch.zeros(1_001), "p": torch.zeros(30_000, dtype=torch.int64)}
        left.extend([w.to_local(), state["b"], state["p"]])
        mw.load_state_dict(state, folder)

    try:
        mw.simulate(load, 2)
    except CheckpointError as error:
        return all((error.asked, error.found, error.why, error.write)) and not any(x.any() for x in left)
    return False


def all_damaged(flips: int, cuts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        good, bad = Path(place) / "good", Path(place) / "bad"
        mw.simulate(lambda: mw.save_state_dict(state_of(7, lay=True), good), 4)
        missed: list[str] = []
        damages = damage_kinds(good, flips, cuts)
        for name, harm in damages.items():
            shutil.copytree(good, bad)
            harm(bad)
            if not is_refused(bad):
                missed.append(name)
            shutil.rmtree(bad)
    return {"damages": len(damages), "not told": len(missed), "which": missed}


# --- other meshes ------------------------------------------------------------------------------------------------


def tokens(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    row = torch.randint(MODEL.vocab, (BATCH, SEQUENCE + 1), generator=g)
    return row[:, :-1], row[:, 1:]


def marked(way: str) -> Llama:
    model = Llama(MODEL, seed=1)
    if way == "zero":
        mesh = mw.ProcessMesh(range(8), ["dp"])

        def cut(name: str, layer: torch.nn.Module, on: mw.ProcessMesh) -> None:
            for key, p in list(layer.named_parameters(recurse=False)):
                setattr(layer, key, mw.shard_tensor(p, on, [mw.Shard(0)]))

        mw.shard_layer(model, mesh, cut, lambda xs, on: tuple(mw.reshard(x, on, [mw.Shard(0)]) for x in xs))
    elif way != "one device":
        sizes = {"dp x tp": (1, 2, 2), "pipeline": (2, 1, 1)}[way]
        mark(model, mw.ProcessMesh(np.arange(np.prod(sizes)).reshape(sizes), ["pp", "dp", "tp"]))
    return model


def train(way: str, folder: Path, first: bool) -> list[float]:
    """Return the losses after the checkpoint, of the run that wrote it or of one that resumes."""
    torch.manual_seed(0 if first else 99)
    model = marked(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    saving: Any = None
    start = 0 if first else mw.load_checkpoint(folder, model, optimizer).step
    for step in range(start, STEPS + MORE):
        if first and step == STEPS:
            saving = mw.save_checkpoint(folder, step, model, optimizer, async_save=True)
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if saving is not None:
        saving.wait()
    return losses[-MORE:]


def other_meshes() -> dict[str, float]:
    """Return the largest relative difference of the next losses, by the mesh that resumes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        expected = mw.simulate(train, 4, "dp x tp", folder, True)[0]
        found = {
            way: mw.simulate(train, ranks, way, folder, False)[-1]
            for way, ranks in {"dp x tp": 4, "zero": 8, "pipeline": 2}.items()
        }
        found["one device"] = train("one device", folder, False)
    return {
        way: max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)) for way, losses in found.items()
    }


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the writers that left nothing to load, and the undetected damages; both must be none."""
    torch.set_num_threads(1)
    dead = all_killed(20 if quick else KILLS)
    hurt = all_damaged(20 if quick else FLIPS, 10 if quick else CUTS)
    apart = other_meshes()
    good = not dead["not loaded"] and not hurt["not told"] and dead["while writing"] > 0
    return {
        "name": "checkpoint_faults",
        "value": {"not loaded": dead["not loaded"], "not told": hurt["not told"], "apart": max(apart.values())},
        "goal": f"none of {dead['kills']} kills and {hurt['damages']} damages; next losses equal on the same mesh, "
        f"within {CLOSE:g} on others",
        "ok": good and apart["dp x tp"] == 0.0 and max(apart.values()) <= CLOSE,
        "rival": None,
        "details": {"killed": dead, "damaged": hurt, "apart": apart},
    }
