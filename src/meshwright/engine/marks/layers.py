"""Marks for whole modules: distribute a layer's parameters and buffers over a mesh, mark its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.layout import ProcessMesh, TorchValue
from meshwright.tensor import DistTensor, TraceError

from .default_mesh import resolve_mesh
from .module_memory import keep_shared_memory
from .tensors import shard_tensor

ShardFn = Callable[[str, nn.Module, ProcessMesh], None]
Slot = tuple[dict[str, Any], str, Tensor]
"""The slot of a tensor in a module: its table of parameters or buffers, its name, and the tensor."""


def shard_layer(
    layer: nn.Module,
    process_mesh: ProcessMesh | None = None,
    shard_fn: ShardFn | None = None,
    input_fn: Callable[[Any, ProcessMesh], Any] | None = None,
    output_fn: Callable[[Any, ProcessMesh], Any] | None = None,
) -> nn.Module:
    """Distribute the parameters and buffers of `layer` over the mesh; returns the same module.

    `shard_fn(name, submodule, mesh)` marks the parameters of each submodule; parameters that it leaves plain are
    replicated. A tensor that several modules share stays shared, and gets the layout with which it was marked last.
    Different tensors with the very same elements, as after `a.data = b.data`, keep sharing memory if they get the same
    layout. `input_fn(inputs, mesh)` and `output_fn(outputs, mesh)` get the inputs and outputs of `layer`.

    Raises:
        SharedMemoryError: tensors on the same elements get different layouts, or two tensors share only some elements.
        TraceError: a submodule is TorchScript.
    """
    mesh = resolve_mesh(process_mesh)
    _check_python(layer)
    with keep_shared_memory(layer, f"shard_layer of {type(layer).__name__}"):
        _distribute_modules(layer, mesh, shard_fn)
    if input_fn is not None:
        layer.register_forward_pre_hook(partial(_with_marked_inputs, input_fn, mesh))
    if output_fn is not None:
        layer.register_forward_hook(partial(_with_marked_outputs, output_fn, mesh))
    return layer


# Hooks are partial functions and no closures of this package: a capture cannot compare what a closure of ours holds,
# and simulated ranks would not share it.


def _with_marked_inputs(
    input_fn: Callable[[Any, ProcessMesh], Any], mesh: ProcessMesh, _: object, inputs: TorchValue
) -> TorchValue:
    return input_fn(inputs, mesh)


def _with_marked_outputs(
    output_fn: Callable[[Any, ProcessMesh], Any], mesh: ProcessMesh, _: object, inputs: TorchValue, outputs: TorchValue
) -> TorchValue:
    return output_fn(outputs, mesh)


def _distribute_modules(layer: nn.Module, mesh: ProcessMesh, shard_fn: ShardFn | None) -> None:
    """Distribute the parameters and buffers of every module; a tensor that several modules share stays shared."""
    became: dict[int, tuple[Tensor, Tensor]] = {}
    for name, module in layer.named_modules():
        _replace_tensors(module, became)
        before = list(_slots(module))
        if shard_fn is not None:
            shard_fn(name, module, mesh)
        _replicate_rest(module, mesh)
        for table, key, old in before:
            new = table.get(key)
            if isinstance(new, Tensor) and new is not old:
                became[id(old)] = (old, new)
    for module in layer.modules():
        _replace_tensors(module, became)


def _check_python(layer: nn.Module) -> None:
    """Raise TraceError if a submodule is TorchScript: its C++ code would take local parameters for whole ones."""
    for name, module in layer.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                "shard_layer of TorchScript",
                f"{name or 'the model'}: {type(module).__name__}",
                "TorchScript runs in C++, which sees the local part only",
                "shard the Python module, and use torch.compile or mw.to_static in place of TorchScript",
            )


def _slots(module: nn.Module) -> Iterator[Slot]:
    for table in (module._parameters, module._buffers):
        for name, value in list(table.items()):
            if value is not None:
                yield table, name, value


def _replace_tensors(module: nn.Module, became: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Replace tensors by their distributed successors; `became` keeps the old tensors, so that ids stay unique."""
    for table, name, value in _slots(module):
        latest = value
        while id(latest) in became:
            latest = became[id(latest)][1]
        table[name] = latest


def _replicate_rest(module: nn.Module, mesh: ProcessMesh) -> None:
    for table, name, value in _slots(module):
        if not isinstance(value, DistTensor):
            table[name] = shard_tensor(value, mesh, [])
