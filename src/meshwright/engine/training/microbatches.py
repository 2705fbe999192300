"""Microbatches in the eager mode: a model with stages on the ranks of a mesh, run in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm import PostedCommunicator, current_communicator
from meshwright.fixed_order import GradientTrees, in_same_numbers, one_of_microbatches
from meshwright.layout import ProcessMesh, TorchValue
from meshwright.passes import Merge
from meshwright.pipeline import ActionKind, Schedule, StageError, Stages
from meshwright.tensor import DistTensor, returns_to

from ..recording.strategy import Pipeline
from ..static.pipeline_step import schedule_of
from .buffer_copies import BufferCopies

_BACKWARD = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
"""The actions that run a backward pass. It computes the gradients of weights too, so W has nothing left to do."""


@contextmanager
def _forward_only(schedule: str) -> Generator[None]:
    """Refuse, in forward passes inside the context, values with gradients that go back to an earlier stage."""

    def refuse(x: DistTensor, mesh: ProcessMesh) -> None:
        raise StageError(
            f"schedule {schedule!r} in the eager mode",
            f"a tensor {x.spec!r} on ranks {x.mesh.process_ids}, which the earlier stage on {mesh.process_ids} reads",
            "a rank runs its part of a microbatch as a whole, so ranks would wait for one another",
            'use schedule "GPipe", or mw.to_static with schedule_mode="auto"; or split the model so that values only '
            "go forward: mw.split_pipeline orders modules by their calls if you pass example=(inputs,), and at= names "
            "where chunks begin",
        )

    token = returns_to.set(refuse)
    try:
        yield
    finally:
        returns_to.reset(token)


class Microbatches:
    """A training step of forward and backward passes over microbatches in the order of a schedule, run eagerly.

    Call it with a batch, whose leaves are split along dim 0. Gradients are added to `.grad`. Gradients and the returned
    loss are means over the microbatches. The caller runs the optimizer. Forward passes run under `autocast` if it is a
    dtype, and gradients are those of the loss scaled by `scaler`.
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
        self._stages, self._copies = stages, BufferCopies(model)

    def under(self, autocast: torch.dtype | None, scaler: torch.amp.GradScaler | None) -> Microbatches:
        """Return the same steps with another autocast dtype and another scaler."""
        steps = Microbatches(self.model, self.loss, self.schedule, self._stages, autocast, scaler)
        steps._copies = self._copies
        return steps

    def __call__(self, *batch: TorchValue) -> Tensor:
        """Return the mean loss of all microbatches of a batch. Raises RewriteError if their sizes would differ."""
        count = self.schedule.microbatches
        return self.accumulate([Merge(count).piece(batch, m) for m in range(count)])

    def accumulate(self, batches: Iterable[Sequence[Any]]) -> Tensor:
        """Return the mean loss of these batches: each is a microbatch, and their sizes may differ."""
        given, count = list(batches), self.schedule.microbatches
        if len(given) != count:
            raise StageError(
                f"a step of {len(given)} microbatches",
                f"a schedule for {count} microbatches",
                "a schedule is made for a fixed number of microbatches",
                f"pass {count} batches",
            )
        if in_same_numbers():
            return self._in_one_tree(given)
        return self._run(given, lambda _: None)

    def _in_one_tree(self, given: Sequence[Any]) -> Tensor:
        """Run the step with gradients that are one tree over the pieces of the batch."""
        with one_of_microbatches(given):
            trees = GradientTrees(self.model.parameters(), len(given))
            total = self._run(given, trees.take)
        trees.give()
        return total

    def _run(self, given: Sequence[Any], after_backward: Callable[[int], None]) -> Tensor:
        """Return the mean loss; `after_backward` is called with each microbatch after its backward pass."""
        here, count = PostedCommunicator(current_communicator()), len(given)
        running: dict[int, Tensor] = {}
        total: Any = 0.0
        for is_backward, m in self._row(here.rank):
            name = f"{ActionKind.BACKWARD if is_backward else ActionKind.FORWARD}{m}"
            with here.during(2 * m + is_backward), here.seen.doing("pipeline", name):
                if is_backward:
                    loss = running.pop(m)
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                    after_backward(m)
                else:
                    with self._autocast(), self._one_way(), self._copies.during():
                        running[m] = self._loss_of(given[m]) / count
                    total = running[m].detach() + total
        return total

    def _row(self, rank: int) -> Iterator[tuple[bool, int]]:
        """Yield (is_backward, microbatch) in the order of this rank; a rank without a stage follows the first stage."""
        for action in self.schedule.rows[self._stages.of(rank) or 0]:
            for atom in action.atoms:
                if atom.kind is ActionKind.FORWARD or atom.kind in _BACKWARD:
                    yield atom.kind in _BACKWARD, atom.microbatch

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(next(self.model.parameters()).device.type, self.autocast)

    def _one_way(self) -> AbstractContextManager[Any]:
        """Return a context that refuses forward passes that return to an earlier stage, unless all rows are equal."""
        rows = {tuple(self._row(ranks[0])) for ranks in self._stages.ranks}
        return _forward_only(self.schedule.name) if len(rows) > 1 else nullcontext()

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
    """Return `model`, with its stages on `mesh` along `axis`, as steps over microbatches in the eager mode.

    `loss` gets the model's result and the last input of a batch; without it, the model returns the loss itself.
    `schedule` is the name or the text of a table with one chunk per rank. Schedules with recomputation or two copies
    of the model need `to_static`. Forward passes run under `autocast`. Losses are scaled by `scaler`, with which the
    caller makes the optimizer's step.

    Raises:
        StageError: the mesh has no such axis.
        ScheduleError, StageError: the table does not fit.

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
    if axis not in mesh.dim_names:
        raise StageError(
            f"a step over microbatches, with stages along the axis {axis!r}",
            f"the axes {', '.join(mesh.dim_names)}",
            "each place on that axis is one stage of the model",
            f"make the mesh with it, as in mw.init_mesh(dp=-1, {axis}=2), and call mw.split_pipeline(model, mesh); "
            "without stages, call backward for each microbatch and then optimizer.step()",
        )
    ranks = tuple(mesh[axis, stage].process_ids for stage in range(mesh.get_dim_size(axis)))
    stages = Stages(tuple(tuple(sorted(r)) for r in ranks), tuple(range(len(ranks))))
    found = schedule_of(Pipeline(schedule_mode=schedule, accumulate_steps=microbatches), stages)
    if len(found.ways) > 1 or found.recomputed:
        raise StageError(
            f"schedule {found.name!r} in the eager mode",
            "recomputation (R), or two copies of the model",
            "in the eager mode each forward pass runs once, as a whole, on the only copy of the model",
            "use torch.utils.checkpoint in the model, or mw.to_static(model, loader, loss, optimizer, strategy)",
        )
    return Microbatches(model, loss, found, stages, autocast, scaler)
