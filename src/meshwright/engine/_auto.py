"""No marks at all: the mesh and the cuts are chosen from the model, a batch and what the machines are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.comm import current
from meshwright.cost import Cluster, cluster_of
from meshwright.cost import cluster as read_cluster
from meshwright.graph import Program, capture
from meshwright.search import MeshPlan, SearchError, plan_mesh, shown

from ._static import DistModel
from ._strategy import Strategy


def plan(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Callable[..., Tensor] | None = None,
    *,
    cluster: Cluster | str | None = None,
    ranks: int | None = None,
) -> tuple[MeshPlan, ...]:
    """How `model` is best trained on `ranks` devices of a cluster, the fastest first; nothing runs.

    Model and batch may be on the meta device. `loss` is called as `to_static` calls it: with what the model gives for
    all of the batch but its last part, and that part; without it the model gives the loss itself. `cluster` is one, or
    its text ("64xH100"); by default the cores of this machine. Raises SearchError where nothing fits into memory, with
    what is missing, and CaptureError for a model that cannot be captured, with the line at fault.
    """
    machines = machines_of(cluster)
    devices = ranks or machines.devices or current().size
    with shown(f"plans for {devices} ranks") as on_step:
        return plan_mesh(_captured(model, batch, loss), machines, devices, on_step)


def machines_of(cluster: Cluster | str | None) -> Cluster:
    return read_cluster(cluster) if isinstance(cluster, str) else cluster or cluster_of("cpu core")


def _captured(model: nn.Module, batch: Sequence[Any], loss: Callable[..., Tensor] | None) -> Program:
    """The forward pass with the loss."""

    def call(*args: Any) -> Any:
        return model(*args) if loss is None else loss(model(*args[:-1]), args[-1])

    return capture(model, call, batch).program


def auto(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Callable[..., Tensor] | None,
    optimizer: Optimizer,
    loader: Iterable[Any] | None = None,
    *,
    cluster: Cluster | str | None = None,
    strategy: Strategy | None = None,
    plan: MeshPlan | None = None,
) -> DistModel:
    """`to_static` on the ranks there are, with the mesh and the cuts that are best; every rank must call it.

    A `plan` is taken as it is, and nothing is searched: one of those that the function `plan` gives, or one that a
    person wrote (`meshwright.search.parse_mesh_plan`). Raises SearchError for a plan that is none for this model, or
    for another number of ranks.

    >>> import meshwright as mw, torch
    >>> from torch.nn.functional import mse_loss
    >>> def train():
    ...     model = torch.nn.Linear(4, 2)
    ...     batch = torch.randn(8, 4), torch.randn(8, 2)
    ...     step = mw.auto(model, batch, mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    ...     return [step(*batch).item() for _ in range(2)]
    >>> first, then = mw.simulate(train, 4)[0]
    >>> then < first
    True
    """
    program, options = _captured(model, batch, loss), strategy or Strategy()
    chosen = plan or fastest(program, machines_of(cluster))
    if chosen.mesh.size != current().size:
        raise SearchError(
            f"a plan of {chosen.how}", f"{current().size} ranks", f"its mesh has {chosen.mesh.size}",
            f"as many ranks, or sizes of the mesh that make {current().size}",
        )  # fmt: skip
    layouts = {**chosen.specs(program), **(options.layouts or {})}
    step = DistModel(model, loader, loss, optimizer, replace(options, layouts=layouts))
    step.plan = chosen
    return step


def fastest(program: Program, machines: Cluster) -> MeshPlan:
    """The best plan for the ranks there are; the first of them shows how far it is."""
    here = current()
    with shown(f"plans for {here.size} ranks", silent=here.rank != 0) as on_step:
        return plan_mesh(program, machines, here.size, on_step)[0]
