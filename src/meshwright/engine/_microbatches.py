"""Microbatches in the eager mode: a model with its stages on the ranks of a mesh, in the order of a schedule's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm import Posted, current
from meshwright.layout import ProcessMesh
from meshwright.passes import Merge
from meshwright.pipeline import Kind, Schedule, StageError, Stages

from ._pipeline import schedule_of
from ._strategy import Pipeline

_BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""What runs a backward pass: eagerly it gives the gradients of weights too, so W has nothing left to do."""


class Microbatches:
    """A step of forward and backward passes over microbatches, as a schedule has them; the model runs eagerly.

    Call it with a batch, whose leaves are cut along dim 0. Gradients are added to `.grad`, and are means over the
    microbatches like the loss that it gives; the optimizer is left to the caller. Forward passes run under `autocast`,
    where that is a dtype, and gradients are those of the loss that `scaler` has scaled.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor] | None,
        schedule: Schedule,
        stages: Stages,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.model, self.loss, self.schedule = model, loss, schedule
        self.autocast, self.scaler = autocast, scaler
        self._stages = stages

    def under(self, autocast: torch.dtype | None, scaler: torch.amp.GradScaler | None) -> Microbatches:
        """The same steps under another autocast, with another scaler."""
        return Microbatches(self.model, self.loss, self.schedule, self._stages, autocast, scaler)

    def __call__(self, *batch: Any) -> Tensor:
        """The mean loss of all microbatches of a batch. RewriteError where they would be uneven."""
        count = self.schedule.microbatches
        return self.accumulate([Merge(count).piece(batch, m) for m in range(count)])

    def accumulate(self, batches: Iterable[Sequence[Any]]) -> Tensor:
        """The mean loss of these batches, which are the microbatches and may have sizes of their own."""
        given, count = list(batches), self.schedule.microbatches
        if len(given) != count:
            raise StageError(
                f"a step of {len(given)} microbatches", f"a schedule for {count}", "a table names its microbatches",
                f"{count} batches",
            )  # fmt: skip
        here = Posted(current())
        running: dict[int, Tensor] = {}
        total: Any = 0.0
        for is_backward, m in self._row(here.rank):
            name = f"{Kind.BACKWARD if is_backward else Kind.FORWARD}{m}"
            with here.during(2 * m + is_backward), here.seen.doing("pipeline", name):
                if is_backward:
                    loss = running.pop(m)
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                else:
                    with self._autocast():
                        running[m] = self._loss_of(given[m]) / count
                    total = running[m].detach() + total
        return total

    def _row(self, rank: int) -> Iterator[tuple[bool, int]]:
        """What a rank does, in order; one that is in no stage goes along with the first."""
        for action in self.schedule.rows[self._stages.of(rank) or 0]:
            for atom in action.atoms:
                if atom.kind is Kind.FORWARD or atom.kind in _BACKWARD:
                    yield atom.kind in _BACKWARD, atom.microbatch

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(next(self.model.parameters()).device.type, self.autocast)

    def _loss_of(self, batch: Sequence[Any]) -> Tensor:
        if self.loss is None:
            return self.model(*batch)
        *inputs, labels = batch
        return self.loss(self.model(*inputs), labels)


def microbatched(
    model: nn.Module,
    loss: Callable[..., Tensor] | None,
    mesh: ProcessMesh,
    microbatches: int,
    schedule: str = "1F1B",
    *,
    axis: str = "pp",
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Microbatches:
    """`model`, whose stages lie on `mesh` along `axis`, as steps over microbatches in the eager mode.

    `loss` takes what the model gives and the last input of a batch; without one the model gives the loss itself.
    `schedule` is the name or the text of a table with one chunk per rank: a forward pass that stops at a later chunk
    is for `to_static`. Forward passes run under `autocast`, and losses are scaled by `scaler`, with which the caller
    steps. Raises ScheduleError and StageError for tables that do not fit.

    >>> import torch, meshwright as mw
    >>> def step():
    ...     mesh = mw.ProcessMesh([0, 1], ["pp"])
    ...     net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    ...     for p in mw.split_pipeline(net, mesh).parameters():
    ...         nn.init.ones_(p)
    ...     run = mw.microbatched(net, lambda out, y: (out - y).mean(), mesh, microbatches=4)
    ...     return run(torch.ones(8, 4), torch.ones(8, 1)).item()
    >>> mw.simulate(step, 2)
    [15.0, 15.0]
    """
    ranks = tuple(mesh[axis, stage].process_ids for stage in range(mesh.get_dim_size(axis)))
    stages = Stages(tuple(tuple(sorted(r)) for r in ranks), tuple(range(len(ranks))))
    found = schedule_of(Pipeline(schedule_mode=schedule, accumulate_steps=microbatches), stages)
    if len(found.ways) > 1 or found.recomputed or found.slices > 1:
        raise StageError(
            f"schedule {found.name!r} in the eager mode", "R, slices of sequences, or two copies of the model",
            "a forward pass runs once and as a whole, and the model stands there once",
            "torch.utils.checkpoint in the model, or mw.to_static(model, loader, loss, optimizer, strategy)",
        )  # fmt: skip
    return Microbatches(model, loss, found, stages, autocast, scaler)
