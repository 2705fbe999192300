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
from meshwright.graph import capture
from meshwright.search import MeshPlan, plan_mesh

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
    machines = read_cluster(cluster) if isinstance(cluster, str) else cluster or cluster_of("cpu core")
    devices = ranks or machines.devices or current().size

    def call(*args: Any) -> Any:
        return model(*args) if loss is None else loss(model(*args[:-1]), args[-1])

    return plan_mesh(capture(model, call, batch).program, machines, devices)


def auto(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Callable[..., Tensor] | None,
    optimizer: Optimizer,
    loader: Iterable[Any] | None = None,
    *,
    cluster: Cluster | str | None = None,
    strategy: Strategy | None = None,
) -> DistModel:
    """`to_static` on the ranks there are, with the mesh and the cuts that `plan` finds; every rank must call it.

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
    best = plan(model, batch, loss, cluster=cluster, ranks=current().size)[0]
    options = strategy or Strategy()
    step = DistModel(
        model, loader, loss, optimizer, replace(options, layouts={**best.specs(), **(options.layouts or {})})
    )
    step.plan = best
    return step
