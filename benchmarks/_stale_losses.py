"""Kinds of change: losses, teachers, and schedules outside of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._stale_case import Case, Change, Net, Run, attribute, item, kind, kind_on_mesh, random_batch


def with_loss(loss: Callable[..., Tensor], change: Change) -> Case:
    return Case(Net(), change, loss=loss)


def with_classes(loss: Callable[..., Tensor], change: Change) -> Case:
    """Return a training whose targets are classes."""
    return Case(Net(), change, loss=loss, batch=lambda step: (random_batch(step)[0], torch.tensor([0, 1, 2, step % 3])))


# --- losses ----------------------------------------------------------------------------------------------------------


class Loss(nn.Module):
    """A loss with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * self.weight


class Trainer:
    """An object whose method is the loss."""

    factor = 1.0

    def __init__(self) -> None:
        self.options = SimpleNamespace(weight=1.0)
        self.loss_fn: Any = F.mse_loss

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return self.loss_fn(out, y) * self.options.weight * self.factor


@kind_on_mesh
def weight_of_a_loss_module(run: Run) -> Case:
    loss = Loss()
    return with_loss(loss, attribute(loss, "weight"))


@kind
def weight_of_a_loss_in_a_closure(run: Run) -> Case:
    weights = {"mse": 1.0}
    return with_loss(lambda out, y: F.mse_loss(out, y) * weights["mse"], item(weights, "mse"))


@kind
def option_of_a_trainer(run: Run) -> Case:
    trainer = Trainer()
    return with_loss(trainer.loss, attribute(trainer.options, "weight"))


@kind
def options_of_a_trainer_replaced(run: Run) -> Case:
    trainer = Trainer()
    return with_loss(trainer.loss, lambda factor: setattr(trainer, "options", SimpleNamespace(weight=factor)))


@kind
def class_attribute_of_a_trainer(run: Run) -> Case:
    class Local(Trainer):
        pass

    return with_loss(Local().loss, attribute(Local, "factor"))


@kind
def loss_of_a_trainer_swapped(run: Run) -> Case:
    trainer = Trainer()

    def change(factor: float) -> None:
        trainer.loss_fn = F.mse_loss if factor == 1 else F.l1_loss

    return with_loss(trainer.loss, change)


@kind
def weight_of_a_partial_loss(run: Run) -> Case:
    def loss(weights: dict[str, float], out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * weights["mse"]

    weights = {"mse": 1.0}
    return with_loss(partial(loss, weights), item(weights, "mse"))


@kind
def label_smoothing(run: Run) -> Case:
    loss = nn.CrossEntropyLoss()

    def change(factor: float) -> None:
        loss.label_smoothing = 0.0 if factor == 1 else 0.3

    return with_classes(loss, change)


@kind
def reduction_of_a_loss(run: Run) -> Case:
    loss = nn.MSELoss()
    return with_loss(loss, lambda factor: setattr(loss, "reduction", "mean" if factor == 1 else "sum"))


@kind
def ignored_class_of_a_loss(run: Run) -> Case:
    loss = nn.CrossEntropyLoss()
    return with_classes(loss, lambda factor: setattr(loss, "ignore_index", -100 if factor == 1 else 1))


@kind
def class_weights_written_in_place(run: Run) -> Case:
    loss = nn.CrossEntropyLoss(torch.ones(3))
    weights: Any = loss.weight
    return with_classes(loss, weights[0].fill_)


@kind
def class_weights_replaced(run: Run) -> Case:
    loss = nn.CrossEntropyLoss(torch.ones(3))
    return with_classes(loss, lambda factor: setattr(loss, "weight", torch.tensor([factor, 1.0, 1.0])))


@kind
def weight_passed_with_the_batch(run: Run) -> Case:
    """Return a training whose batch contains a Python number."""
    weight = [1.0]

    class Model(Net):
        def forward(self, x: Tensor, weight: float = 1.0) -> Tensor:
            return super().forward(x) * weight

    def batch(step: int) -> tuple[Any, ...]:
        x, y = random_batch(step)
        return x, weight[0], y

    return Case(Model(), item(weight, 0), batch=batch)


# --- a teacher -------------------------------------------------------------------------------------------------------


@kind
def parameters_of_a_teacher(run: Run) -> Case:
    """Return a training whose loss compares with another model, whose parameters a moving average writes."""
    model, teacher = Net(), Net().requires_grad_(False)
    inputs = torch.ones(4, 4)

    def change(factor: float) -> None:
        for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
            p.lerp_(q.detach(), 0.5)

    return Case(model, change, loss=lambda out, y: F.mse_loss(out, y) + F.mse_loss(out, teacher(inputs)))


@kind
def teacher_replaced(run: Run) -> Case:
    teachers = {factor: Net().requires_grad_(False) for factor in run.factors}
    holder = SimpleNamespace(teacher=teachers[1.0])
    inputs = torch.ones(4, 4)
    return Case(
        Net(),
        lambda factor: setattr(holder, "teacher", teachers[factor]),
        loss=lambda out, y: F.mse_loss(out, y) + F.mse_loss(out, holder.teacher(inputs)),
    )


@kind
def attribute_of_a_teacher(run: Run) -> Case:
    teacher = nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(0.1)).requires_grad_(False)
    inputs = torch.ones(4, 4)
    return Case(
        Net(),
        attribute(teacher[1], "negative_slope"),
        loss=lambda out, y: F.mse_loss(out, y) + F.mse_loss(out, teacher(inputs)),
    )


# --- schedules outside of the optimizer ------------------------------------------------------------------------------


@kind_on_mesh
def schedule_of_a_step_that_the_loop_counts(run: Run) -> Case:
    """Return a training with a Python function of a counter, as warm-ups of a loss weight are written."""
    state = SimpleNamespace(step=0)

    def weight() -> float:
        return 1.0 if state.step < 2 else 2.0

    def change(factor: float) -> None:
        state.step += 2

    return with_loss(lambda out, y: F.mse_loss(out, y) * weight(), change)


@kind
def schedule_that_the_model_computes(run: Run) -> Case:
    class Model(Net):
        def scale(self) -> float:
            return min(1.0 + self.global_step / 10.0, 3.0)

    model = Model(global_step=0)
    return Case(model, lambda factor: setattr(model, "global_step", model.global_step + 5))
