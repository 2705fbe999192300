"""Describe a setting in text for other processes: tensors by name and layout, hooks, torch's state."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.graph import class_text, described, model_tensors
from meshwright.layout import Spec, autocast_modes
from meshwright.tensor import DistTensor, attention_algorithm, current_random_source, local_parts


def spec_text(spec: Spec) -> str:
    """Return a spec and its mesh as text."""
    return f"{spec!r} on {spec.mesh!r}"


def layout_text(x: object) -> str:
    """Return the dtype and shape of a tensor as text, with its layout and mesh if it is distributed."""
    if isinstance(x, DistTensor):
        return spec_text(x._spec)
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def code_of(network: nn.Module, loss: object, optimizer: Optimizer | None) -> dict[str, str]:
    """Return the code of a model's programs as text: the classes of its modules, the loss, the optimizer."""
    found = {f"module {path or '.'}": class_text(type(part)) for path, part in network.named_modules()}
    return {**found, "loss": described(loss), "optimizer": "none" if optimizer is None else class_text(type(optimizer))}


def facts_text(network: nn.Module, optimizer: Optimizer | None) -> str:
    """Return a checksum of torch's state, of the layouts of tensors, and of the hooks of tensors and of the optimizer.

    The optimizer's states are compared with the inputs of a program (`states_fit`).
    """
    with local_parts():
        lines = [*_modes(), *_network(network), *([] if optimizer is None else _optimizer(network, optimizer))]
    return sha256("\n".join(lines).encode()).hexdigest()


def _modes() -> Iterator[str]:
    yield f"draws by {current_random_source()}, attends by {attention_algorithm()}"
    yield f"{torch.get_default_dtype()}, {torch.is_grad_enabled()}"
    for device, dtype in autocast_modes():
        yield f"autocast {device} {dtype}"


def _network(network: nn.Module) -> Iterator[str]:
    for slot in model_tensors(network):
        grad = slot.is_parameter and slot.tensor.requires_grad
        yield f"{slot.name}: {layout_text(slot.tensor)} {grad} {_hooks(slot.tensor)}"
    for path, part in network.named_modules():
        hooks = len(part._forward_hooks), len(part._forward_pre_hooks)
        yield f"{path}: {part.training} {hooks} {sorted(k for k, v in part._parameters.items() if v is None)}"


def _hooks(x: Tensor) -> str:
    return "".join(described(hook) for hook in (x._backward_hooks or {}).values())


def _optimizer(network: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    names = {id(s.tensor): s.name for s in model_tensors(network)}
    yield f"hooks {len(optimizer._optimizer_step_pre_hooks)} {len(optimizer._optimizer_step_post_hooks)}"
    for group in optimizer.param_groups:
        yield f"group {[names.get(id(p)) for p in group['params']]}"
        yield f"tensors {[(key, described(x)) for key, x in group.items() if isinstance(x, Tensor)]}"
