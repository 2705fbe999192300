"""Kinds of change: parameters, buffers, tensors that are attributes, parametrizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from ._stale_case import Case, Net, Run, attribute, calls, item, kind, kind_on_mesh, reads, replaces, sets, sgd, switch


@kind
def parameter_replaced(run: Run) -> Case:
    model = Net()
    return Case(model, lambda factor: setattr(model.b, "weight", nn.Parameter(torch.full((3, 6), factor))))


@kind
def parameter_replaced_in_the_optimizer_too(run: Run) -> Case:
    model = Net()
    optimizer = sgd(model)

    def change(factor: float) -> None:
        model.b.weight = nn.Parameter(torch.full((3, 6), factor))
        optimizer.param_groups[0]["params"][:] = list(model.parameters())

    return Case(model, change, optimizer=optimizer)


@kind_on_mesh
def parameter_frozen(run: Run) -> Case:
    model = Net()
    return Case(model, lambda factor: model.a.requires_grad_(factor == 1))


@kind
def parameter_unfrozen(run: Run) -> Case:
    model = Net()
    model.a.requires_grad_(False)
    return Case(model, lambda factor: model.a.requires_grad_(factor != 1))


@kind
def parameters_tied(run: Run) -> Case:
    model = Net(c=nn.Linear(6, 6), d=nn.Linear(6, 6))
    model.between = lambda x: model.d(model.c(x))
    return Case(model, lambda factor: setattr(model.c, "weight", model.d.weight))


@kind
def parameters_untied(run: Run) -> Case:
    model = Net(c=nn.Linear(6, 6), d=nn.Linear(6, 6))
    model.between = lambda x: model.d(model.c(x))
    model.c.weight = model.d.weight
    optimizer = sgd(model)

    def change(factor: float) -> None:
        model.c.weight = nn.Parameter(model.d.weight.detach().clone())
        optimizer.add_param_group({"params": [model.c.weight]})

    return Case(model, change, optimizer=optimizer)


@kind
def data_of_a_parameter_set(run: Run) -> Case:
    model = Net()
    return Case(model, lambda factor: setattr(model.b.weight, "data", torch.full((3, 6), factor)))


@kind
def parameter_written_in_place(run: Run) -> Case:
    model = Net()

    def change(factor: float) -> None:
        with torch.no_grad():
            model.b.weight.fill_(factor)

    return Case(model, change)


@kind
def state_dict_loaded(run: Run) -> Case:
    model = Net()
    start = {name: x.clone() for name, x in model.state_dict().items()}
    return Case(model, lambda factor: model.load_state_dict(start))


@kind
def state_dict_loaded_by_assignment(run: Run) -> Case:
    model = Net()
    start = {name: x.clone() for name, x in model.state_dict().items()}

    def change(factor: float) -> None:
        model.load_state_dict({name: x.clone() for name, x in start.items()}, assign=True)

    return Case(model, change)


@kind
def dtype_of_the_parameters(run: Run) -> Case:
    """Return a training whose layers compute in the dtype of their parameters."""

    class Cast(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.to(self.weight.dtype)).float()

    model = Net()
    model.a, model.b = Cast(4, 6), Cast(6, 3)
    return Case(model, switch(torch.float32, torch.bfloat16, model.to))


@kind
def bias_set_to_none(run: Run) -> Case:
    model = Net()
    return Case(model, lambda factor: setattr(model.b, "bias", None))


@kind
def bias_added(run: Run) -> Case:
    model = Net()
    model.b.bias = None
    return Case(model, lambda factor: setattr(model.b, "bias", nn.Parameter(torch.full((3,), factor))))


@kind
def gradient_left_by_the_user(run: Run) -> Case:
    """Return a training in which a gradient is not None before a step, so the step adds to it."""
    model = Net()
    return Case(model, lambda factor: setattr(model.b.weight, "grad", torch.full((3, 6), factor)))


@kind
def number_read_of_a_parameter(run: Run) -> Case:
    """Return a training in which Python reads a frozen parameter, which the change writes."""
    threshold = nn.Parameter(torch.ones(()), requires_grad=False)

    def change(factor: float) -> None:
        threshold.fill_(factor)

    return reads(run, lambda self: self.threshold.item(), change, threshold=threshold)


# --- buffers and other tensors ---------------------------------------------------------------------------------------


def with_buffer(run: Run, change: Callable[[Any, float], object], scale: Callable[[Any], Any]) -> Case:
    """Return a training whose model reads its buffer `factor`."""
    case = reads(run, scale, lambda factor: change(case.model, factor))
    case.model.register_buffer("factor", torch.ones(()))
    return case


@kind_on_mesh
def buffer_written_in_place(run: Run) -> Case:
    return with_buffer(run, lambda model, factor: model.factor.fill_(factor), lambda self: self.factor)


@kind
def buffer_registered_again(run: Run) -> Case:
    return with_buffer(run, lambda model, f: model.register_buffer("factor", torch.tensor(f)), lambda self: self.factor)


@kind
def buffer_read_in_python(run: Run) -> Case:
    return with_buffer(run, lambda model, factor: model.factor.fill_(factor), lambda self: self.factor.item())


@kind
def buffer_that_switches_a_branch(run: Run) -> Case:
    return with_buffer(
        run, lambda model, factor: model.factor.fill_(factor), lambda self: 2.0 if self.factor > 1 else 1.0
    )


@kind
def tensor_attribute_replaced(run: Run) -> Case:
    return replaces(run, lambda self: self.factor, "factor", torch.tensor)


@kind_on_mesh
def tensor_attribute_written_in_place(run: Run) -> Case:
    factor = torch.ones(())
    return reads(run, lambda self: self.factor, factor.fill_, factor=factor)


@kind
def tensor_attribute_written_through_a_view(run: Run) -> Case:
    factors = torch.ones(3)
    return reads(run, lambda self: self.factor, factors[1].fill_, factor=factors[1])


@kind
def tensor_attribute_written_by_numpy(run: Run) -> Case:
    """Return a training in which NumPy writes to the memory of a tensor without raising its version."""
    factors = torch.ones(1)
    return reads(run, lambda self: self.factors[0], item(factors.numpy(), 0), factors=factors)


@kind
def number_of_a_tensor_attribute(run: Run) -> Case:
    factor = torch.ones(())
    return reads(run, lambda self: self.factor.item(), factor.fill_, factor=factor)


@kind
def number_of_a_tensor_written_by_numpy(run: Run) -> Case:
    factors = torch.ones(1)
    return reads(run, lambda self: self.factors.item(), item(factors.numpy(), 0), factors=factors)


@kind
def list_of_a_tensor_attribute(run: Run) -> Case:
    factors = torch.ones(3)
    return reads(run, lambda self: self.factors.tolist()[1], factors[1].fill_, factors=factors)


@kind
def number_of_a_tensor_replaced(run: Run) -> Case:
    return replaces(run, lambda self: float(self.factor), "factor", torch.tensor)


@kind
def tensor_in_a_list_replaced(run: Run) -> Case:
    factors = [torch.ones(())]
    return reads(run, lambda self: self.factors[0], lambda f: item(factors, 0)(torch.tensor(f)), factors=factors)


@kind
def tensor_in_a_list_written_in_place(run: Run) -> Case:
    factors = [torch.ones(())]
    return reads(run, lambda self: self.factors[0], factors[0].fill_, factors=factors)


@kind
def shape_of_a_tensor_attribute(run: Run) -> Case:
    return replaces(run, lambda self: float(self.mask.numel()), "mask", lambda factor: torch.ones(int(factor)))


@kind
def numpy_array_made_a_tensor(run: Run) -> Case:
    factors = np.ones(6, dtype=np.float32)
    return reads(run, lambda self: torch.from_numpy(self.factors), item(factors, 2), factors=factors)


@kind
def list_made_a_tensor(run: Run) -> Case:
    factors = [1.0] * 6
    return reads(run, lambda self: torch.tensor(self.factors), item(factors, 2), factors=factors)


# --- parametrizations ------------------------------------------------------------------------------------------------


class Times(nn.Module):
    """A parametrization that multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@kind
def parametrization_registered(run: Run) -> Case:
    model = Net()

    def change(factor: float) -> None:
        if factor == 1:
            parametrize.remove_parametrizations(model.b, "weight", leave_parametrized=False)
        else:
            parametrize.register_parametrization(model.b, "weight", Times())

    return Case(model, change)


@kind
def attribute_of_a_parametrization(run: Run) -> Case:
    model, times = Net(), Times()
    parametrize.register_parametrization(model.b, "weight", times)
    return Case(model, sets(times, "factor", 2.0, 3.0))


@kind
def weight_norm_removed(run: Run) -> Case:
    model = Net()
    parametrizations.weight_norm(model.b)
    model.b.parametrizations.weight.original0.data.fill_(2.0)
    optimizer = sgd(model)

    def change(factor: float) -> None:
        if factor == 2:
            parametrize.remove_parametrizations(model.b, "weight", leave_parametrized=True)
            optimizer.param_groups[0]["params"][:] = list(model.parameters())

    return Case(model, change, optimizer=optimizer)


@kind
def pruning_mask(run: Run) -> Case:
    model = Net()
    prune.custom_from_mask(model.b, "weight", torch.ones(3, 6))

    def change(factor: float) -> None:
        model.b.weight_mask[0] = 1.0 if factor == 1 else 0.0

    return Case(model, change)


@kind
def functional_call_with_other_parameters(run: Run) -> Case:
    """Return a training whose model computes with tensors of a dict."""
    inner = nn.Linear(6, 6)
    given = {"weight": torch.eye(6), "bias": torch.zeros(6)}

    def between(self: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(inner, given, (x,))

    return calls(between, lambda factor: given.update(weight=torch.eye(6) * factor))


@kind
def loss_that_reads_an_attribute_of_a_layer(run: Run) -> Case:
    model = Net()
    model.a.weight_of_loss = 1.0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * model.a.weight_of_loss

    return Case(model, attribute(model.a, "weight_of_loss"), loss=loss)
