"""Kinds of change: hooks of modules, tensors and optimizers that are added, removed, replaced, reordered or changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._stale_case import Case, Change, Net, Run, attribute, item, kind, kind_on_mesh, sgd


def while_on(run: Run, register: Callable[..., Any], hook: Any, **options: Any) -> Change:
    """Return the change that registers a hook if the factor is not 1, and removes it if it is."""
    handles: list[Any] = []

    def change(factor: float) -> None:
        while handles:
            handles.pop().remove()
        if factor != 1:
            handles.append(register(hook, **options))

    run.callback(change, 1.0)
    return change


def doubles_output(module: nn.Module, given: Any, out: Tensor) -> Tensor:
    return out * 2.0


def doubles_input(module: nn.Module, given: Any) -> Any:
    return tuple(x * 2.0 for x in given)


def doubles_gradients(module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(None if x is None else x * 2.0 for x in into)


def doubles_output_gradients(module: nn.Module, out: Any) -> Any:
    return tuple(x * 2.0 for x in out)


# --- modules ---------------------------------------------------------------------------------------------------------


@kind_on_mesh
def forward_hook_added(run: Run) -> Case:
    model = Net()
    return Case(model, while_on(run, model.a.register_forward_hook, doubles_output))


@kind
def forward_hook_of_the_model_added(run: Run) -> Case:
    model = Net()
    return Case(model, while_on(run, model.register_forward_hook, doubles_output))


@kind
def forward_hook_removed(run: Run) -> Case:
    model = Net()
    handle = model.a.register_forward_hook(doubles_output)
    return Case(model, lambda factor: handle.remove())


@kind
def forward_hook_with_keywords_added(run: Run) -> Case:
    model = Net()

    def hook(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        return out * 2.0

    return Case(model, while_on(run, model.a.register_forward_hook, hook, with_kwargs=True))


@kind
def forward_pre_hook_added(run: Run) -> Case:
    model = Net()
    return Case(model, while_on(run, model.a.register_forward_pre_hook, doubles_input))


@kind
def full_backward_hook_added(run: Run) -> Case:
    model = Net()
    return Case(model, while_on(run, model.b.register_full_backward_hook, doubles_gradients))


@kind
def full_backward_pre_hook_added(run: Run) -> Case:
    model = Net()
    return Case(model, while_on(run, model.b.register_full_backward_pre_hook, doubles_output_gradients))


@kind
def forward_hook_replaced_by_another(run: Run) -> Case:
    model = Net()
    handles: list[Any] = []

    def change(factor: float) -> None:
        for handle in handles:
            handle.remove()
        handles[:] = [model.a.register_forward_hook(lambda module, given, out: out * factor)]

    change(1.0)
    return Case(model, change)


@kind
def forward_hooks_reordered(run: Run) -> Case:
    model = Net()
    model.a.register_forward_hook(doubles_output)
    model.a.register_forward_hook(lambda module, given, out: out + 1.0)
    return Case(model, lambda factor: model.a._forward_hooks.move_to_end(next(iter(model.a._forward_hooks))))


@kind
def forward_hook_replaced_under_its_number(run: Run) -> Case:
    model = Net()
    number = model.a.register_forward_hook(lambda module, given, out: out).id

    def change(factor: float) -> None:
        model.a._forward_hooks[number] = lambda module, given, out: out * factor

    return Case(model, change)


class Hook:
    """A hook with a setting."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, *given: Any) -> Any:
        return given[-1] * self.factor

    def scaled(self, *given: Any) -> Any:
        return given[-1] * self.factor


@kind_on_mesh
def state_of_a_forward_hook(run: Run) -> Case:
    model, hook = Net(), Hook()
    model.a.register_forward_hook(hook)
    return Case(model, attribute(hook, "factor"))


@kind
def state_behind_a_hook_that_is_a_method(run: Run) -> Case:
    model, hook = Net(), Hook()
    model.a.register_forward_hook(hook.scaled)
    return Case(model, attribute(hook, "factor"))


@kind
def cell_of_a_hook(run: Run) -> Case:
    model, factors = Net(), [1.0]
    model.a.register_forward_hook(lambda module, given, out: out * factors[0])
    return Case(model, item(factors, 0))


@kind
def global_forward_hook_added(run: Run) -> Case:
    model = Net()

    def hook(module: nn.Module, given: Any, out: Any) -> Any:
        return out * 2.0 if module is model.a else None

    return Case(model, while_on(run, global_hooks.register_module_forward_hook, hook))


@kind
def global_forward_pre_hook_added(run: Run) -> Case:
    model = Net()

    def hook(module: nn.Module, given: Any) -> Any:
        return given[0] * 2.0 if module is model.a else None

    return Case(model, while_on(run, global_hooks.register_module_forward_pre_hook, hook))


@kind
def global_backward_hook_added(run: Run) -> Case:
    model = Net()

    def hook(module: nn.Module, into: Any, out: Any) -> Any:
        return doubles_gradients(module, into, out) if module is model.b else None

    return Case(model, while_on(run, global_hooks.register_module_full_backward_hook, hook))


@kind
def state_of_a_global_forward_hook(run: Run) -> Case:
    model, factors = Net(), [1.0]

    def hook(module: nn.Module, given: Any, out: Any) -> Any:
        return out * factors[0] if module is model.a else None

    run.callback(global_hooks.register_module_forward_hook(hook).remove)
    return Case(model, item(factors, 0))


# --- tensors ---------------------------------------------------------------------------------------------------------


@kind
def hook_of_a_parameter_added(run: Run) -> Case:
    model = Net()
    return Case(model, while_on(run, model.b.weight.register_hook, lambda grad: grad * 2.0))


@kind
def hook_of_a_parameter_removed(run: Run) -> Case:
    model = Net()
    handle = model.b.weight.register_hook(lambda grad: grad * 2.0)
    return Case(model, lambda factor: handle.remove())


@kind
def state_of_a_hook_of_a_parameter(run: Run) -> Case:
    model, hook = Net(), Hook()
    model.b.weight.register_hook(hook)
    return Case(model, attribute(hook, "factor"))


@kind
def post_accumulate_hook_added(run: Run) -> Case:
    model = Net()

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(2.0)

    return Case(model, while_on(run, model.b.weight.register_post_accumulate_grad_hook, hook))


@kind
def state_of_a_post_accumulate_hook(run: Run) -> Case:
    model, factors = Net(), [1.0]

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(factors[0])

    model.b.weight.register_post_accumulate_grad_hook(hook)
    return Case(model, item(factors, 0))


@kind
def state_of_a_hook_of_an_activation(run: Run) -> Case:
    factors = [1.0]

    class Model(Net):
        def between(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda grad: grad * factors[0])
            return x.tanh()

    return Case(Model(), item(factors, 0))


# --- optimizers ------------------------------------------------------------------------------------------------------


def doubles_all(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Double the gradients of an optimizer."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.mul_(2.0)


def halves_parameters(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Halve the parameters of an optimizer."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.mul_(0.5)


@kind_on_mesh
def step_pre_hook_added(run: Run) -> Case:
    model = Net()
    optimizer = sgd(model)
    return Case(model, while_on(run, optimizer.register_step_pre_hook, doubles_all), optimizer=optimizer)


@kind
def step_post_hook_added(run: Run) -> Case:
    model = Net()
    optimizer = sgd(model)
    return Case(model, while_on(run, optimizer.register_step_post_hook, halves_parameters), optimizer=optimizer)


@kind
def state_of_a_step_pre_hook(run: Run) -> Case:
    model, factors = Net(), [1.0]
    optimizer = sgd(model)

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(factors[0])

    optimizer.register_step_pre_hook(hook)
    return Case(model, item(factors, 0), optimizer=optimizer)


@kind
def global_step_pre_hook_added(run: Run) -> Case:
    model = Net()
    return Case(model, while_on(run, register_optimizer_step_pre_hook, doubles_all))
