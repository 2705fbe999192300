"""Kinds of change: torch's own objects that a model, a loss or a hook reads, such as optimizers and samplers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from ._stale_case import Case, Net, Run, by_loss_too, item, kind, kind_on_mesh, reads, sgd


def _zeros(number: int) -> Dataset[Any]:
    return TensorDataset(torch.zeros(number, dtype=torch.float32))


def _other() -> torch.optim.Optimizer:
    """Return an optimizer of a parameter that is not in the model."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(1, dtype=torch.float32))], lr=1.0)


@kind_on_mesh
def learning_rate_that_the_loss_reads(run: Run) -> Case:
    model = Net()
    optimizer = sgd(model)
    groups = optimizer.param_groups
    change = item(groups[0], "lr")
    return Case(
        model, change, loss=lambda out, y: F.mse_loss(out, y) * optimizer.param_groups[0]["lr"], optimizer=optimizer
    )


@by_loss_too
@kind
def learning_rate_of_another_optimizer(run: Run) -> Case:
    other = _other()
    return reads(run, lambda owner: owner.other.param_groups[0]["lr"], item(other.param_groups[0], "lr"), other=other)


@by_loss_too
@kind
def last_epoch_of_a_schedule(run: Run) -> Case:
    schedule = lr_scheduler.StepLR(_other(), 1)
    return reads(
        run,
        lambda owner: 1 + owner.schedule.last_epoch,
        lambda factor: setattr(schedule, "last_epoch", int(factor)),
        schedule=schedule,
    )


@by_loss_too
@kind
def rate_of_a_schedule(run: Run) -> Case:
    schedule = lr_scheduler.StepLR(_other(), 1)
    return reads(
        run,
        lambda owner: owner.schedule.get_last_lr()[0],
        lambda factor: setattr(schedule, "_last_lr", [factor]),
        schedule=schedule,
    )


@by_loss_too
@kind
def scale_of_a_distribution(run: Run) -> Case:
    prior = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))
    return reads(
        run,
        lambda owner: owner.prior.entropy(),
        lambda factor: setattr(prior, "scale", torch.tensor(factor)),
        prior=prior,
    )


@by_loss_too
@kind
def epoch_of_a_sampler(run: Run) -> Case:
    sampler = DistributedSampler(_zeros(4), num_replicas=1, rank=0)
    return reads(
        run, lambda owner: 1 + owner.sampler.epoch, lambda factor: sampler.set_epoch(int(factor)), sampler=sampler
    )


@by_loss_too
@kind
def length_of_a_loader(run: Run) -> Case:
    data: Any = _zeros(4)
    loader = DataLoader(data, 1)
    return reads(
        run,
        lambda owner: len(owner.loader),
        lambda factor: setattr(data, "tensors", (torch.zeros(int(4 * factor), dtype=torch.float32),)),
        loader=loader,
    )


@kind_on_mesh
def learning_rate_that_a_hook_of_a_gradient_reads(run: Run) -> Case:
    model = Net()
    optimizer = sgd(model)
    model.a.weight.register_hook(lambda grad: grad * optimizer.param_groups[0]["lr"])
    return Case(model, item(optimizer.param_groups[0], "lr"), optimizer=optimizer)


@kind_on_mesh
def setting_that_a_hook_of_a_gradient_holds(run: Run) -> Case:
    model, settings = Net(), {"factor": 1.0}
    model.a.weight.register_hook(lambda grad: grad * settings["factor"])
    return Case(model, item(settings, "factor"))
