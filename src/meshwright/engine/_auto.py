"""No marks at all: the mesh and the cuts are chosen from the model, a batch and what the machines are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.comm import current
from meshwright.cost import Cluster, cluster_of
from meshwright.cost import cluster as read_cluster
from meshwright.graph import Program, capture
from meshwright.layout import Spec
from meshwright.search import REPLICAS, Evenly, MeshPlan, SearchError, evenly, plan_mesh, rows_of, shown
from meshwright.tensor import context, leaves_in

from ._context import ContextHooks
from ._errors import BatchError
from ._in_stages import lay_in_stages
from ._shared import searched_once
from ._static import DistModel
from ._strategy import GradientMerge, Pipeline, Recomputing, Sharding, Strategy

ADAM, SMALL = 2.0, 64
"""States of Adam as large as their parameter; the size of a parameter on which an optimizer shows its own."""
MOST = 20_000
"""Operators of a forward pass that a search looks at: layers have about a hundred each."""


def plan(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizer | None = None,
    *,
    cluster: Cluster | str | None = None,
    ranks: int | None = None,
    stages: int | None = None,
) -> tuple[MeshPlan, ...]:
    """How `model` is best trained on `ranks` devices of a cluster, the fastest first; nothing runs.

    Model and batch may be on the meta device. `loss` is called as `to_static` calls it: with what the model gives for
    all of the batch but its last part, and that part; without it the model gives the loss itself. `optimizer` tells how
    much memory its states take; without it they are Adam's. `cluster` is one, or its text ("64xH100"); without it the
    cores of this machine. A pipeline is among the plans where it is the fastest of all; with `stages` all plans have as
    many, and with stages=1 none has a pipeline. Raises SearchError where nothing fits into memory, with what is
    missing, and CaptureError for a model that cannot be captured, with the line at fault.
    """
    machines = machines_of(cluster)
    devices = ranks or machines.devices or current().size
    program, states = _captured(model, batch, loss), states_of(optimizer)
    with shown(f"plans for {devices} ranks") as on_step:
        leaves = list(leaves_in(batch))
        return plan_mesh(program, machines, devices, on_step, batch=leaves, states=states, stages=stages)


def states_of(optimizer: Optimizer | None) -> float:
    """How many states as large as their parameter an optimizer has, by a step of its kind on a small one."""
    if optimizer is None:
        return ADAM
    kind, weight = type(optimizer), torch.zeros(SMALL, SMALL, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    try:
        twin: Any = kind([weight], **optimizer.defaults)
        twin.step()
    except (TypeError, ValueError, RuntimeError):  # made or called in another way: as large as most
        return ADAM
    return sum(x.numel() for x in twin.state[weight].values() if isinstance(x, Tensor) and x.dim()) / weight.numel()


def machines_of(cluster: Cluster | str | None) -> Cluster:
    return read_cluster(cluster) if isinstance(cluster, str) else cluster or cluster_of("cpu core")


def _captured(model: nn.Module, batch: Sequence[Any], loss: Callable[..., Tensor] | None) -> Program:
    """The forward pass with the loss. Raises BatchError where nothing is left for the model."""
    if loss is not None and len(batch) < 2:
        raise BatchError(
            "a plan for a model and a loss", f"a batch of {len(batch)}",
            "the loss takes the last part of it, and the model all others",
            "(inputs, labels), or a model that gives its loss itself and loss=None",
        )  # fmt: skip

    def call(*args: Any) -> Any:
        return model(*args) if loss is None else loss(model(*args[:-1]), args[-1])

    return capture(model, call, batch, most=MOST).program


def auto(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Iterable[Any],
    loss: Callable[..., Tensor] | None = None,
    *,
    cluster: Cluster | str | None = None,
    strategy: Strategy | None = None,
    plan: MeshPlan | None = None,
) -> DistModel:
    """`to_static` on the ranks there are, with the mesh and the cuts that are best; every rank must call it.

    `loader` gives batches, a tuple each: a DataLoader, or a list of one batch. The first is looked at; every rank has
    all of each. Without a `loss` the model gives it. A `plan` is taken as it is, and nothing is searched: one of those
    that the function `plan` gives, or one that a person wrote (`meshwright.search.parse_mesh_plan`). Raises SearchError
    for a plan that is none for this model, or for another number of ranks, and BatchError for a loader without a batch.

    >>> import meshwright as mw, torch
    >>> from torch.nn.functional import mse_loss
    >>> def train():
    ...     model = torch.nn.Linear(4, 2)
    ...     batch = torch.randn(8, 4), torch.randn(8, 2)
    ...     step = mw.auto(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch], mse_loss)
    ...     return [step(*batch).item() for _ in range(2)]
    >>> first, then = mw.simulate(train, 4)[0]
    >>> then < first
    True
    """
    batch, options = _first(optimizer, loader), strategy or Strategy()
    program, leaves = _captured(model, batch, loss), list(leaves_in(batch))
    chosen = plan or fastest(program, machines_of(cluster), batch=leaves, states=states_of(optimizer))
    if chosen.mesh.size != current().size:
        raise SearchError(
            f"a plan of {chosen.how}", f"{current().size} ranks", f"its mesh has {chosen.mesh.size}",
            f"as many ranks, or sizes of the mesh that make {current().size}",
        )  # fmt: skip
    specs = _of_pieces(chosen, program)
    if chosen.pipeline is not None:
        lay_in_stages(model, optimizer, chosen)
        specs = {}
    if chosen.context != "gather" and context() == "gather":
        ContextHooks(chosen.context).put_on(model)
    layouts = {**specs, **(options.layouts or {})}
    step = DistModel(model, loader, loss, optimizer, replace(carried_out(chosen, options), layouts=layouts))
    step.plan = chosen
    if chosen.pieces > 1:
        step.before.append(_Counted(evenly(program), chosen))
    return step


def _first(optimizer: Any, loader: Any) -> Sequence[Any]:
    """The first batch of a loader that can begin again."""
    if not isinstance(optimizer, Optimizer):
        raise BatchError(
            f"mw.auto with the optimizer {optimizer!r:.60}", f"a {type(optimizer).__name__}",
            "the optimizer comes behind the model, and then the batches", "mw.auto(model, optimizer, loader, loss)",
        )  # fmt: skip
    known = isinstance(loader, Iterable) and not isinstance(loader, (Tensor, Iterator, Mapping))
    batch: Any = next(iter(loader), None) if known else None
    if batch is None or (isinstance(loader, tuple) and isinstance(batch, Tensor)):
        raise BatchError(
            f"mw.auto with a loader that is a {type(loader).__name__}",
            "no batches in it" if known and batch is None else "tensors, or what begins only once",
            "its first batch is looked at, and then it is gone through from the beginning",
            "a DataLoader, or a list of one batch: [(inputs, labels)]",
        )  # fmt: skip
    return batch if isinstance(batch, (tuple, list)) else (batch,)


@dataclass(frozen=True)
class _Counted:
    """Refuses batches whose pieces count unlike each other: the mean of their losses would not be that of the batch."""

    how: Evenly
    plan: MeshPlan

    def __call__(self, leaves: Sequence[Any]) -> None:
        if self.how.ignores(leaves):
            raise SearchError(
                f"a step of {self.plan.how}", "labels that are ignored, perhaps more in some pieces of the batch",
                "the mean over pieces is that of the batch where as many labels count in each",
                "mw.auto with such a batch, which plans without pieces, or Strategy(gradient_merge=...) for their mean",
            )  # fmt: skip


def carried_out(plan: MeshPlan, options: Strategy) -> Strategy:
    """The strategy with a plan's pipeline, and what it does to take less memory; what a person has switched on stays
    as it is.
    """
    saving, chosen = plan.saving, dict[str, Any]()
    if saving.zero and not options.sharding.enable:
        axes = (REPLICAS,) if REPLICAS in plan.mesh.sizes else None
        chosen["sharding"] = Sharding(enable=True, stage=saving.zero, axes=axes)
    if saving.recompute and not options.recompute.enable:
        chosen["recompute"] = Recomputing(enable=True, layers=saving.recompute)
    if saving.accumulate > 1 and options.merge is None:
        chosen["gradient_merge"] = GradientMerge(enable=True, k_steps=saving.accumulate)
    if plan.pipeline is not None and not options.pipeline.enable:
        how = plan.pipeline
        chosen["pipeline"] = Pipeline(enable=True, schedule_mode=how.schedule, accumulate_steps=how.microbatches)
    return replace(options, **chosen)


def _of_pieces(plan: MeshPlan, program: Program) -> dict[str, Spec]:
    """The layouts by the names of values; those of a batch that is taken in pieces are a piece's."""
    specs, pieces = plan.specs(program), plan.saving.accumulate
    rows = rows_of(program)
    for given in program.inputs:
        spec = specs.get(given.value.name)
        if given.role == "batch" and spec is not None and spec.shape[:1] == (rows,) and pieces > 1:
            specs[given.value.name] = Spec(spec.mesh, spec.layout, (rows // pieces, *spec.shape[1:]), spec.dtype)
    return specs


def fastest(
    program: Program, machines: Cluster, saving: bool = True, batch: Sequence[Any] = (), states: float = ADAM
) -> MeshPlan:
    """The best plan for the ranks there are; the first of them shows how far it is.

    Without `saving` nothing is chosen but the mesh and the cuts.
    """
    here = current()

    def search() -> MeshPlan:
        with shown(f"plans for {here.size} ranks", silent=here.rank != 0) as on_step:
            return plan_mesh(program, machines, here.size, on_step, saving, batch, states)[0]

    return searched_once(here, program, (machines, saving, states), search)
