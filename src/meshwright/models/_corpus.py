"""A training text that every machine has: the source files of Python's standard library, as bytes.

A sample depends on its global number only, so any number of ranks draws the same batches.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.models._llama import ModelError

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def source_files(root: Path) -> Iterator[Path]:
    """Yield all `.py` files below `root` in a fixed order, without tests and installed packages."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED)
        yield from (Path(folder) / file for file in sorted(files) if file.endswith(".py"))


@functools.cache
def corpus() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the standard library as one row of bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return np.frombuffer(b"\n".join(path.read_bytes() for path in source_files(root)), dtype=np.uint8)


def sample(number: int, length: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return `length` consecutive bytes, at a place that depends on (seed, number) only."""
    text = corpus()
    if length >= len(text):
        asked, why = f"sequences of {length - 1} bytes", "a sequence must be shorter than the text"
        raise ModelError(asked, f"a text of {len(text)}", why, "pass --seq 128")
    start = np.random.default_rng([seed, number]).integers(len(text) - length)
    return text[start : start + length]


def batch(step: int, size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens and the tokens that follow them, both [size, length], of the samples from `step * size` on."""
    return samples(step * size, size, length, seed)


def samples(first: int, count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens and the tokens that follow them, both [count, length], of the samples from `first` on."""
    rows = np.stack([sample(first + i, length + 1, seed) for i in range(count)])
    tokens = torch.from_numpy(rows.astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Text:
    """Endless batches of the corpus; a resumed run continues after the samples taken, also with another batch size."""

    def __init__(self, size: int, length: int, seed: int) -> None:
        self.size, self.length, self.seed = size, length, seed
        self.taken = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            self.taken += self.size
            yield samples(self.taken - self.size, self.size, self.length, self.seed)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken, self.seed = state["taken"], state["seed"]
