"""The training loop of the main job: the same code on one device and on every rank of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

import meshwright as mw
from meshwright.models._corpus import Text, batch
from meshwright.models._llama import Llama, LlamaConfig, ModelError, mark

AXES = ("pp", "dp", "tp")
OnStep = Callable[[int, float], None]
OnSchedule = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A training job: the model, its mesh, steps, batch and learning rate. Raises ModelError for too many stages."""

    model: LlamaConfig = field(default_factory=LlamaConfig)
    mesh: tuple[int, int, int] = (2, 2, 2)
    steps: int = 50
    batch: int = 16
    sequence: int = 128
    seed: int = 0
    learning_rate: float = 5e-4
    warm_up: int = 50
    microbatches: int = 4

    def __post_init__(self) -> None:
        if self.mesh[0] > self.model.layers:
            raise ModelError(
                f"{self.mesh[0]} pipeline stages",
                f"a model of {self.model.layers} layers",
                "each stage needs at least one layer",
                f"pass --mesh pp={self.model.layers} or fewer, or more --layers",
            )

    @property
    def ranks(self) -> int:
        return prod(self.mesh)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in one step."""
        return self.batch * self.sequence

    @property
    def pieces(self) -> int:
        """Return the number of microbatches of a pipeline's batch: at most `microbatches`, of equal sizes."""
        rows = self.batch // self.mesh[1]
        even = self.batch % self.mesh[1] == 0
        return max(n for n in range(1, self.microbatches + 1) if n == 1 or (even and rows % n == 0))

    def rate(self, step: int) -> float:
        """Return the learning rate: it rises during the warm-up, then stays constant."""
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up)


def train(
    job: Job, mesh: mw.ProcessMesh | None = None, on_step: OnStep | None = None, on_schedule: OnSchedule | None = None
) -> list[float]:
    """Return the loss of each step; `on_step(step, loss)` is called after each.

    Stages on meshes of their own run as a pipeline in the static mode; `on_schedule` is called with its schedule when
    it is chosen. Everything else runs eagerly.
    """
    model = Llama(job.model, job.seed)
    if mesh is not None:
        mark(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    step_of = _eager(model, optimizer)
    if mesh is not None and job.mesh[0] > 1:
        step_of = _pipelined(model, optimizer, job.pieces, on_schedule)
    losses: list[float] = []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = job.rate(step)
        loss = step_of(*batch(step, job.batch, job.sequence, job.seed))
        losses.append(loss.item())
        if on_step:
            on_step(step, losses[-1])
    return losses


def _eager(model: Llama, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step_of(*tensors: torch.Tensor) -> torch.Tensor:
        loss = model(*tensors)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step_of


def _pipelined(
    model: Llama, optimizer: torch.optim.Optimizer, pieces: int, on_schedule: OnSchedule | None
) -> Callable[..., torch.Tensor]:
    strategy = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": pieces})
    dist = mw.to_static(model, optimizer=optimizer, strategy=strategy)

    def step_of(*tensors: torch.Tensor) -> torch.Tensor:
        first = dist.pipeline is None
        loss = dist(*tensors)
        if first and dist.pipeline is not None and on_schedule:
            on_schedule(dist.pipeline.why)
        return loss

    return step_of


def train_on_mesh(job: Job, on_step: OnStep | None = None, on_schedule: OnSchedule | None = None) -> list[float]:
    """Run `train` on one rank of `job.mesh`; only rank 0 calls `on_step` and `on_schedule`."""
    mesh = mw.ProcessMesh(np.arange(job.ranks).reshape(job.mesh), dim_names=AXES)
    return train(job, mesh, on_step, on_schedule) if mw.get_rank() == 0 else train(job, mesh)


def train_on(job: Job, training: mw.Training) -> mw.TrainingEnd:
    """Run the job with a log, checkpoints and resume; each rank of `job.mesh` makes the call.

    Stages on meshes of their own run as a pipeline in the eager mode.
    """
    mesh = mw.ProcessMesh(np.arange(job.ranks).reshape(job.mesh), dim_names=AXES)
    model = Llama(job.model, job.seed)
    mark(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), job.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / job.warm_up))
    run = mw.microbatched(model, None, mesh, job.pieces) if job.mesh[0] > 1 else model
    return mw.train(run, optimizer, Text(job.batch, job.sequence, job.seed), training, scheduler=scheduler)


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference between two rows of losses; NaN if one of them has a NaN.

    >>> largest_difference([2.0, 1.0], [2.0, 1.25])
    0.2
    """
    ours, theirs = np.array(losses), np.array(reference)
    return float(np.max(np.abs(ours - theirs) / np.abs(theirs)))
