"""A program run on tensors that hold nothing: how every value lies in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.reshard import View

from ._infer import carried_shape, stand_in, world_of
from ._node import Carry, Node, Value, map_values
from ._program import Program
from .torch_hooks import FakeMode, imagining, no_modes


def strides_of(program: Program) -> dict[Value, tuple[Any, ...]]:
    """The strides of every tensor of a program whose inputs are contiguous."""
    known: dict[Value, Any] = {}
    with no_modes(), imagining(FakeMode(shape_env=world_of([i.value for i in program.inputs]))), torch.no_grad():
        for given in program.inputs:
            known[given.value] = stand_in(given.value)
        for node in program.nodes:
            out = _run(node, known, program.rank)
            _bind(node.out, out, known)
    return {v: x.stride() for v, x in known.items() if isinstance(x, Tensor)}


def _run(node: Node, known: dict[Value, Any], rank: int) -> Any:
    args, kwargs = map_values(lambda v: known[v], (node.args, dict(node.kwargs)))
    if not isinstance(node.op, Carry):
        return node.op(*args, **kwargs)
    shape = carried_shape(node.op, node.ins[0], rank)
    return args[0].reshape(shape) if isinstance(node.op.step, View) else args[0].new_empty(shape)


def _bind(out: Any, found: Any, known: dict[Value, Any]) -> None:
    if isinstance(out, Value):
        known[out] = found
    elif isinstance(out, (tuple, list)):
        for item, x in zip(out, found, strict=True):
            _bind(item, x, known)
