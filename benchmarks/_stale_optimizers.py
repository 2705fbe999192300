"""Kinds of change: options, groups, states and attributes of optimizers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from ._stale_case import Case, Net, Run, attribute, item, kind, kind_on_mesh, sgd


def with_option(name: str, off: Any, on: Any, make: Any = torch.optim.SGD, **options: Any) -> Case:
    """Return a training whose optimizer has an option that its group switches."""
    model = Net()
    optimizer = make(model.parameters(), **{"lr": 0.1, **options, name: off})

    def change(factor: float) -> None:
        optimizer.param_groups[0][name] = off if factor == 1 else on

    return Case(model, change, optimizer=optimizer)


ADAM = partial(torch.optim.Adam, eps=1e-2)


@kind_on_mesh
def learning_rate(run: Run) -> Case:
    return with_option("lr", 0.1, 0.5)


@kind
def learning_rate_that_is_a_tensor(run: Run) -> Case:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), eps=1e-2, foreach=False)
    rate: Any = optimizer.param_groups[0]["lr"]
    return Case(model, lambda factor: rate.fill_(0.1 * factor), optimizer=optimizer)


@kind
def learning_rate_of_a_scheduler(run: Run) -> Case:
    model = Net()
    optimizer = sgd(model)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    return Case(model, lambda factor: scheduler.step(), optimizer=optimizer)


@kind
def learning_rate_of_the_second_group(run: Run) -> Case:
    model = Net()
    groups = [{"params": model.a.parameters()}, {"params": model.b.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return Case(model, item(optimizer.param_groups[1], "lr"), optimizer=optimizer)


@kind
def momentum(run: Run) -> Case:
    return with_option("momentum", 0.9, 0.1)


@kind
def momentum_from_zero(run: Run) -> Case:
    return with_option("momentum", 0.0, 0.9)


@kind
def dampening(run: Run) -> Case:
    return with_option("dampening", 0.0, 0.5, momentum=0.9)


@kind
def nesterov(run: Run) -> Case:
    return with_option("nesterov", False, True, momentum=0.9)


@kind
def maximize(run: Run) -> Case:
    return with_option("maximize", False, True)


@kind
def betas(run: Run) -> Case:
    return with_option("betas", (0.9, 0.999), (0.5, 0.9), ADAM)


@kind
def weight_decay(run: Run) -> Case:
    return with_option("weight_decay", 0.0, 0.5)


@kind
def epsilon_of_adam(run: Run) -> Case:
    return with_option("eps", 1e-2, 1.0, torch.optim.Adam)


@kind
def decoupled_weight_decay(run: Run) -> Case:
    return with_option("decoupled_weight_decay", False, True, ADAM, weight_decay=0.5)


@kind
def parameter_group_added(run: Run) -> Case:
    model = Net()
    optimizer = torch.optim.SGD(model.a.parameters(), lr=0.1)

    def change(factor: float) -> None:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": model.b.parameters()})

    return Case(model, change, optimizer=optimizer)


@kind
def parameter_taken_out_of_a_group(run: Run) -> Case:
    model = Net()
    optimizer = sgd(model)
    params = optimizer.param_groups[0]["params"]
    return Case(model, lambda factor: params.pop(), optimizer=optimizer)


@kind
def parameters_moved_to_another_group(run: Run) -> Case:
    model = Net()
    optimizer = torch.optim.SGD(
        [{"params": model.a.parameters(), "lr": 0.1}, {"params": model.b.parameters(), "lr": 0.5}]
    )

    def change(factor: float) -> None:
        first, second = optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]

    return Case(model, change, optimizer=optimizer)


@kind
def state_of_an_optimizer_loaded(run: Run) -> Case:
    model = Net()
    optimizer = sgd(model, momentum=0.9)

    def change(factor: float) -> None:
        loaded = optimizer.state_dict()
        state = {key: {"momentum_buffer": torch.zeros_like(v["momentum_buffer"])} for key, v in loaded["state"].items()}
        optimizer.load_state_dict({**loaded, "state": state})

    return Case(model, change, optimizer=optimizer)


@kind
def state_of_an_optimizer_cleared(run: Run) -> Case:
    model = Net()
    optimizer = sgd(model, momentum=0.9)
    return Case(model, lambda factor: optimizer.state.clear(), optimizer=optimizer)


# --- user-defined optimizers -----------------------------------------------------------------------------------------


class Scaled(torch.optim.SGD):
    """An optimizer with an attribute that its step reads."""

    scale = 1.0

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.factor = 1.0

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(self.factor * self.scale)
        return super().step(closure)


class Own(Optimizer):
    """A user-defined optimizer whose step reads settings."""

    def __init__(self, params: Any, settings: Any) -> None:
        super().__init__(params, {"lr": 0.1, "own": 1.0})
        self.settings = settings

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * group["own"] * self.settings["factor"])


@kind
def attribute_of_an_optimizer(run: Run) -> Case:
    model = Net()
    optimizer = Scaled(model.parameters())
    return Case(model, attribute(optimizer, "factor"), optimizer=optimizer)


@kind
def class_attribute_of_an_optimizer(run: Run) -> Case:
    class Local(Scaled):
        pass

    model = Net()
    return Case(model, attribute(Local, "scale"), optimizer=Local(model.parameters()))


@kind
def settings_that_an_optimizer_reads(run: Run) -> Case:
    model, settings = Net(), {"factor": 1.0}
    return Case(model, item(settings, "factor"), optimizer=Own(model.parameters(), settings))


@kind
def option_of_a_user_defined_optimizer(run: Run) -> Case:
    model = Net()
    optimizer = Own(model.parameters(), {"factor": 1.0})
    return Case(model, item(optimizer.param_groups[0], "own"), optimizer=optimizer)


@kind
def step_of_an_optimizer_replaced(run: Run) -> Case:
    class Local(Scaled):
        pass

    model = Net()
    optimizer = Local(model.parameters())

    def change(factor: float) -> None:
        Local.step = lambda self, closure=None: Scaled.step(self, closure) if factor == 1 else None

    return Case(model, change, optimizer=optimizer)
