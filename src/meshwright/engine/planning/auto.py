"""Training without marks: the mesh and the shardings are chosen from the model, a batch and the machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.comm import current_communicator
from meshwright.cost import Cluster, cluster_of
from meshwright.cost import cluster as read_cluster
from meshwright.graph import Program, capture
from meshwright.layout import Spec, TorchValue
from meshwright.search import (
    REPLICAS,
    AccumulationCheck,
    GenerationSizes,
    MeshPlan,
    PhasePlan,
    SearchError,
    check_accumulation,
    first_tensor_rows,
    plan_mesh,
    progress_bar,
)
from meshwright.tensor import attention_algorithm, leaves_in

from .._errors import BatchError
from ..marks.context_parallel import ContextHooks
from ..recording.shared_recordings import searched_once
from ..recording.strategy import GradientMerge, Pipeline, Recomputing, Sharding, Strategy
from ..static.to_static import DistModel
from .phases import check_phases, plan_both_phases
from .stage_distribution import distribute_over_stages

ADAM, SMALL = 2.0, 64
"""Adam's states, in multiples of the parameter's size; and the size of the parameter of an optimizer's trial step."""
MOST = 20_000
"""Most operators of a forward pass that a search accepts; a layer has about a hundred."""


@overload
def plan(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizer | None = None,
    *,
    cluster: Cluster | str | None = None,
    ranks: int | None = None,
    stages: int | None = None,
    phases: tuple[Literal["train"]] = ("train",),
) -> tuple[MeshPlan, ...]: ...


@overload
def plan(
    model: object,
    *,
    cluster: Cluster | str | None = None,
    ranks: int | None = None,
    stages: int | None = None,
    phases: tuple[Literal["train"], Literal["generate"]],
    generation: GenerationSizes,
) -> tuple[PhasePlan, ...]: ...


def plan(
    model: Any,
    batch: Sequence[Any] | None = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizer | None = None,
    *,
    cluster: Cluster | str | None = None,
    ranks: int | None = None,
    stages: int | None = None,
    phases: tuple[str, ...] = ("train",),
    generation: GenerationSizes | None = None,
) -> tuple[MeshPlan, ...] | tuple[PhasePlan, ...]:
    """Return the plans for training `model` on `ranks` devices of a cluster, fastest first; nothing runs.

    Model and batch may be on the meta device. `loss` is called as by `to_static`, as `loss(model(*batch[:-1]),
    batch[-1])`; without it the model returns the loss itself. `optimizer` determines the memory of its states; without
    it they are Adam's. `cluster` is a cluster or its text ("64xH100"); without it, the cores of this machine. A plan
    with a pipeline is included if it is the fastest of all. With `stages`, all plans have that many pipeline stages,
    and with stages=1 no plan has a pipeline.

    With `phases=("train", "generate")`, a step generates sequences, trains on them, and moves the weights to the
    sampler. The result has a layout for each phase (`PhasePlan`). The model is one of transformers, its configuration,
    or a `meshwright.search.Transformer`. `generation` has the number and the lengths of the sequences. Leave out
    `batch`, `loss` and `optimizer`. `stages` are those of training.

    Raises:
        SearchError: no plan fits into memory; the message says how much is missing.
        CaptureError: the model cannot be captured; the message names the line at fault.
    """
    machines = resolve_cluster(cluster)
    if check_phases(phases):
        unused = {"batch": batch, "loss": loss, "optimizer": optimizer}
        return plan_both_phases(model, generation, machines, ranks, stages, unused)
    if batch is None or generation is not None:
        raise _not_for_training(batch)
    devices = ranks or machines.devices or current_communicator().size
    program, states = _captured(model, batch, loss), states_of(optimizer)
    with progress_bar(f"plans for {devices} ranks") as on_step:
        leaves = list(leaves_in(batch))
        return plan_mesh(program, machines, devices, on_step, batch=leaves, states=states, stages=stages)


def _not_for_training(batch: Sequence[Any] | None) -> BatchError:
    """Return the error for a plan of training without a batch, or with sizes of a generation."""
    return BatchError(
        "mw.plan for training",
        "no batch" if batch is None else "the sizes of a generation",
        "the search captures the forward pass of a batch, and nothing is generated",
        'pass the batch alone; or phases=("train", "generate") and generation=...',
    )


def states_of(optimizer: Optimizer | None) -> float:
    """Return the bytes of an optimizer's states, in multiples of the bytes of their parameter.

    It is measured by one step of an optimizer of the same class on a small parameter.
    """
    if optimizer is None:
        return ADAM
    kind, weight = type(optimizer), torch.zeros(SMALL, SMALL, requires_grad=True, device="cpu")
    weight.grad = torch.zeros_like(weight)
    try:
        twin: Optimizer = kind([weight], **optimizer.defaults)
        twin.step()
    except (TypeError, ValueError, RuntimeError):  # created or called in another way: assume Adam's
        return ADAM
    states = [x for x in twin.state[weight].values() if isinstance(x, Tensor) and x.dim()]
    return sum(map(_stored_bytes, states)) / weight.nbytes


def _stored_bytes(x: Any) -> int:
    """Return the bytes that hold a tensor; a subclass, such as a quantized state, may hold them in other tensors."""
    if not hasattr(x, "__tensor_flatten__"):
        return x.nbytes
    names, _ = x.__tensor_flatten__()
    return sum(_stored_bytes(getattr(x, name)) for name in names)


def resolve_cluster(cluster: Cluster | str | None) -> Cluster:
    return read_cluster(cluster) if isinstance(cluster, str) else cluster or cluster_of("cpu core")


def _captured(model: nn.Module, batch: Sequence[Any], loss: Callable[..., Tensor] | None) -> Program:
    """Return the forward pass with the loss as a program.

    Raises:
        BatchError: the batch is no list of inputs, or has no input for the model.
    """
    if not isinstance(batch, (list, tuple)):
        raise BatchError(
            "a plan for a model and a batch",
            f"a batch that is a {type(batch).__name__}",
            "a batch is a list or a tuple of the inputs, in the order of the model's forward pass",
            "pass (inputs, labels); for inputs by name, pass a module whose forward(ids, labels) calls"
            " model(input_ids=ids, labels=labels).loss",
        )
    if loss is not None and len(batch) < 2:
        raise BatchError(
            "a plan for a model and a loss",
            f"a batch with {len(batch)} elements",
            "the loss takes the last element of the batch, and the model takes the others",
            "pass (inputs, labels); or pass loss=None and return the loss from the model",
        )

    def call(*args: TorchValue) -> TorchValue:
        return model(*args) if loss is None else loss(model(*args[:-1]), args[-1])

    return capture(model, call, batch, most=MOST, is_run=False).program


def auto(
    model: nn.Module,
    loader: Iterable[Any],
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizer | None = None,
    *,
    cluster: Cluster | str | None = None,
    strategy: Strategy | None = None,
    plan: MeshPlan | None = None,
) -> DistModel:
    """Return `to_static` of the model on all ranks, with the best mesh and shardings; every rank must call it.

    `loader` yields batches, a tuple each: a DataLoader, or a list of one batch. The first batch is captured for the
    search. Every rank gets all of each batch. Without a `loss` the model returns the loss. With a `plan` there is no
    search: it is one of the results of the function `plan`, or the result of `meshwright.search.parse_mesh_plan` for a
    plan that a person wrote.

    Raises:
        SearchError: the plan does not fit this model, or is for another number of ranks.
        BatchError: the loader has no batch, or there is no optimizer.

    >>> import meshwright as mw, torch
    >>> from torch.nn.functional import mse_loss
    >>> def train():
    ...     model = torch.nn.Linear(4, 2)
    ...     batch = torch.randn(8, 4), torch.randn(8, 2)
    ...     step = mw.auto(model, [batch], mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    ...     return [step(*batch).item() for _ in range(2)]
    >>> first, then = mw.simulate(train, 4)[0]
    >>> then < first
    True
    """
    batch, options = _first(loader), strategy or Strategy()
    optimizer = _checked(optimizer)
    program, leaves = _captured(model, batch, loss), list(leaves_in(batch))
    chosen = plan or fastest(program, resolve_cluster(cluster), batch=leaves, states=states_of(optimizer))
    if chosen.mesh.size != current_communicator().size:
        raise SearchError(
            f"a plan of {chosen.how}",
            f"{current_communicator().size} ranks",
            f"the mesh of the plan has {chosen.mesh.size} ranks",
            f"start {chosen.mesh.size} ranks, or choose mesh sizes whose product is {current_communicator().size}",
        )
    specs = _layouts_for_pieces(chosen, program)
    if chosen.pipeline is not None:
        distribute_over_stages(model, optimizer, chosen)
        specs = {}
    if chosen.context != "gather" and attention_algorithm() == "gather":
        ContextHooks(chosen.context).put_on(model)
    layouts = {**specs, **(options.layouts or {})}
    step = DistModel(model, loader, loss, optimizer, replace(strategy_for_plan(chosen, options), layouts=layouts))
    step.plan = chosen
    if chosen.pieces > 1:
        step.before.append(_Counted(check_accumulation(program), chosen))
    return step


def _checked(optimizer: object) -> Optimizer:
    """Return the optimizer. Raises BatchError if it is something else."""
    if not isinstance(optimizer, Optimizer):
        raise BatchError(
            f"mw.auto with the optimizer {optimizer!r:.60}",
            f"a {type(optimizer).__name__}",
            "a training step updates parameters, and the optimizer is the fourth argument",
            "call mw.auto(model, loader, loss, optimizer)",
        )
    return optimizer


def _first(loader: Any) -> Sequence[Any]:
    """Return the first batch of the loader. Raises BatchError unless the loader can be iterated again."""
    known = isinstance(loader, Iterable) and not isinstance(loader, (Tensor, Iterator, Mapping))
    batch: TorchValue = next(iter(loader), None) if known else None
    if batch is None or (isinstance(loader, tuple) and isinstance(batch, Tensor)):
        raise BatchError(
            f"mw.auto with a loader that is a {type(loader).__name__}",
            "a loader without batches" if known and batch is None else "tensors, or batches that can be read only once",
            "the search reads the first batch, and training then starts again with the first batch",
            "pass a DataLoader, or a list of one batch: [(inputs, labels)]",
        )
    return batch if isinstance(batch, (tuple, list)) else (batch,)


@dataclass(frozen=True)
class _Counted:
    """A check that refuses batches whose pieces have different numbers of ignored labels.

    The mean of the pieces' losses would then differ from the loss of the batch.
    """

    how: AccumulationCheck
    plan: MeshPlan

    def __call__(self, leaves: Sequence[Any]) -> None:
        if self.how.ignores(leaves):
            raise SearchError(
                f"a step of {self.plan.how}",
                "ignored labels, whose number may differ between the pieces of the batch",
                "the mean over pieces equals that of the batch only if equally many labels count in each piece",
                "plan with such a batch: mw.auto then uses no pieces. Or pass Strategy(gradient_merge=...)",
            )


def strategy_for_plan(plan: MeshPlan, options: Strategy) -> Strategy:
    """Return the strategy with a plan's pipeline and its options for saving memory.

    Options that the user has switched on stay as they are.
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
        schedule, microbatches = plan.pipeline.schedule, plan.pipeline.microbatches
        chosen["pipeline"] = Pipeline(enable=True, schedule_mode=schedule, accumulate_steps=microbatches)
    return replace(options, **chosen)


def _layouts_for_pieces(plan: MeshPlan, program: Program) -> dict[str, Spec]:
    """Return the layouts by the names of values. If the batch is taken in pieces, its layouts are those of a piece."""
    specs, pieces = plan.specs(program), plan.saving.accumulate
    rows = first_tensor_rows(program)
    for given in program.inputs:
        spec = specs.get(given.value.name)
        if given.role == "batch" and spec is not None and spec.shape[:1] == (rows,) and pieces > 1:
            specs[given.value.name] = Spec(spec.mesh, spec.layout, (rows // pieces, *spec.shape[1:]), spec.dtype)
    return specs


def fastest(
    program: Program, machines: Cluster, saving: bool = True, batch: Sequence[Any] = (), states: float = ADAM
) -> MeshPlan:
    """Return the best plan for the existing ranks; rank 0 shows the progress.

    Without `saving`, only the mesh and the shardings are chosen.
    """
    here = current_communicator()

    def search() -> MeshPlan:
        with progress_bar(f"plans for {here.size} ranks", silent=here.rank != 0) as on_step:
            return plan_mesh(program, machines, here.size, on_step, saving, batch, states)[0]

    return searched_once(here, program, (machines, saving, states), search)
