"""The training loop of the main job: the same lines on one device and on every rank of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

import meshwright as mw
from meshwright.models._corpus import batch
from meshwright.models._llama import Llama, LlamaConfig, ModelError, mark

AXES = ("pp", "dp", "tp")
OnStep = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What to train, on how many ranks, for how long; a job that cannot be cut as asked is refused."""

    model: LlamaConfig = field(default_factory=LlamaConfig)
    mesh: tuple[int, int, int] = (2, 2, 2)
    steps: int = 50
    batch: int = 16
    sequence: int = 128
    seed: int = 0
    learning_rate: float = 5e-4
    warm_up: int = 50

    def __post_init__(self) -> None:
        if self.mesh[0] > self.model.layers:
            raise ModelError(
                f"{self.mesh[0]} pipeline stages",
                f"a model of {self.model.layers} layers",
                "a stage without a layer has nothing to do",
                f"--mesh pp={self.model.layers} or fewer, or more --layers",
            )

    @property
    def ranks(self) -> int:
        return prod(self.mesh)

    @property
    def tokens(self) -> int:
        """Tokens in one step."""
        return self.batch * self.sequence

    def rate(self, step: int) -> float:
        """Learning rate: rises during the warm-up, then stays."""
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up)


def train(job: Job, mesh: mw.ProcessMesh | None = None, on_step: OnStep | None = None) -> list[float]:
    """The loss of each step; `on_step(step, loss)` is called after each."""
    model = Llama(job.model, job.seed)
    if mesh is not None:
        mark(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    losses: list[float] = []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = job.rate(step)
        loss = model(*batch(step, job.batch, job.sequence, job.seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if on_step:
            on_step(step, losses[-1])
    return losses


def train_on_mesh(job: Job, on_step: OnStep | None = None) -> list[float]:
    """`train` as each rank of `job.mesh` runs it; only rank 0 calls `on_step`."""
    mesh = mw.ProcessMesh(np.arange(job.ranks).reshape(job.mesh), dim_names=AXES)
    return train(job, mesh, on_step if mw.get_rank() == 0 else None)


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """The largest relative difference between two rows of losses; not a number where one of them is none.

    >>> largest_difference([2.0, 1.0], [2.0, 1.25])
    0.2
    """
    ours, theirs = np.array(losses), np.array(reference)
    return float(np.max(np.abs(ours - theirs) / np.abs(theirs)))
