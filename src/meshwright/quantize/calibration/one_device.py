"""Run the code of a distributed model as on one device: whole weights, plain tensors, marks left out.

Numbers on a mesh differ in their last bits from those of one device, because sums have another order. Calibration needs
the very same numbers, so each rank runs modules with whole weights on its own batches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.layout import TorchValue
from meshwright.tensor import STAGE_SPLIT, ReshardMark, capturing, full_tensor, map_tensors, tensors_in

from .._errors import QuantizeError
from ..layers.linear_layers import call_layers

Call = tuple[tuple[TorchValue, ...], dict[str, TorchValue]]
"""Positional and keyword arguments of a module."""


def whole(x: Tensor) -> Tensor:
    """Return the whole value of a tensor as a plain, contiguous tensor; every rank makes the call.

    The last bits of a product may depend on the strides of its operands.
    """
    return full_tensor(x.detach()).detach().contiguous()


def whole_state(module: nn.Module, without: Sequence[nn.Module] = ()) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name, whole; those below the modules `without` are left out."""
    left_out = {id(x) for inner in without for x in (*inner.parameters(), *inner.buffers())}
    found = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    values: dict[int, Tensor] = {}
    for _, x in found:
        if id(x) not in left_out and id(x) not in values:
            values[id(x)] = whole(x)
    return {name: values[id(x)] for name, x in found if id(x) in values}


def run_whole(module: nn.Module, state: Mapping[str, Tensor], call: Call) -> TorchValue:
    """Return the result of a module with these parameters and buffers; no rank communicates."""
    args, kwargs = call
    with capturing(_without_mark):
        return torch.func.functional_call(module, dict(state), args, kwargs)


def _without_mark(op: Any, args: tuple[Any, ...], shown: Callable[[], TorchValue]) -> TorchValue:
    """Return the result of a mark for whole tensors: the tensors themselves, or the experts of one device."""
    if isinstance(op, ReshardMark) or op is STAGE_SPLIT or hasattr(op, "otherwise"):
        return shown()
    raise QuantizeError(
        f"calibrate a model with {op!r}",
        "a function of a rank's parts",
        "calibration runs the model as on one device, which has no parts",
        "leave local_map out of the model, or use a scheme without calibration",
    )


def squared(exact: TorchValue, found: TorchValue) -> float:
    """Return the squared norm of a result, or that of its difference from another one."""
    ones = [x for x in tensors_in(exact) if x.is_floating_point()]
    others = [0.0] * len(ones) if found is None else [x for x in tensors_in(found) if x.is_floating_point()]
    return sum(float((x.double() - y).square().sum()) for x, y in zip(ones, others, strict=True))


def whole_call(call: Call) -> Call:
    """Return a call with whole tensors."""
    return map_tensors(whole, call)


@contextmanager
def in_evaluation(model: nn.Module) -> Generator[None]:
    """Run the block with all modules in evaluation mode, and without caches of keys and values.

    A block runs several times with the same arguments, and each run would add to its cache. Modules of one model have
    several configurations, such as that of the decoder of T5. Simulated ranks may share one, so modules get copies.
    """
    training = {module: module.training for module in model.modules()}
    configs = {module: vars(module)["config"] for module in training if _has_cache(vars(module).get("config"))}
    copies = {id(config): _without_cache(config) for config in configs.values()}
    encoder_layers = call_layers(model)
    model.eval()
    for module, config in configs.items():
        vars(module)["config"] = copies[id(config)]
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was
        for module, config in configs.items():
            vars(module)["config"] = config
        for layer, was in encoder_layers.items():
            layer.activation_relu_or_gelu = was


def _has_cache(config: Any) -> bool:
    """True for the configuration of a model that makes a cache if a call does not decide."""
    return getattr(config, "use_cache", None) is True


def _without_cache(config: Any) -> Any:
    found = copy(config)
    found.use_cache = False
    return found
