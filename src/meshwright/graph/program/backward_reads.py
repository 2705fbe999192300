"""Operands, results and internal tensors that an operator's backward pass reads, found by autograd on meta tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.layout import hint
from meshwright.tensor import leaves_in

from ..torch_hooks import Operator, memory_of
from .node import Node, Value, map_values, values_in

FUSED = frozenset({"aten::scaled_dot_product_attention"})
"""Operators that run as one fused kernel, whose backward pass reads operands and result."""

REFUSES = (RuntimeError, TypeError, ValueError, NotImplementedError)
"""Errors that operators raise if they cannot run on meta tensors."""


@dataclass(frozen=True, slots=True)
class BackwardReads:
    """Positions among the distinct tensor operands (`ins`) and results (`outs`) of a node that its backward pass reads.

    `inside` are the bytes of saved tensors that are neither.
    """

    ins: frozenset[int] = frozenset()
    outs: frozenset[int] = frozenset()
    inside: int = 0


NOTHING_READ = BackwardReads()


def backward_reads_of(nodes: Sequence[Node], trains: Collection[Value]) -> Mapping[Node, BackwardReads]:
    """Return what each operator's backward pass reads. `trains` are the values that receive a gradient.

    Operators without such a result read nothing.
    """
    known, found = dict[Any, BackwardReads](), dict[Node, BackwardReads]()
    for node in nodes:
        trained = tuple(v in trains for v in (*node.ins, *node.outs))
        key = node.op, *_written(node), trained
        if key not in known:
            known[key] = _of(node, trains)
        found[node] = known[key]
    return found


def _written(node: Node) -> tuple[str, str]:
    """Return a call's arguments as text, with tensors replaced by their order, shape and dtype."""
    place = {v: n for n, v in enumerate(dict.fromkeys(node.ins))}
    args, kwargs = map_values(lambda v: (place[v], v.sizes, v.dtype), (node.args, dict(node.kwargs)))
    return repr(args), repr(kwargs)


def _of(node: Node, trains: Collection[Value]) -> BackwardReads:
    """Return what autograd saves of a call on meta tensors; all operands and results if the call fails."""
    if not any(v in trains for v in node.outs):
        return NOTHING_READ
    operands, made = _tensors(node.ins), _tensors(node.outs)
    if isinstance(node.op, Operator) and node.op.name().partition(".")[0] not in FUSED:
        with suppress(*REFUSES):
            return _asked(node.op, node, operands, made, trains)
    return BackwardReads(frozenset(range(len(operands))), frozenset(range(len(made))))


def _asked(
    op: Operator, node: Node, operands: Sequence[Value], made: Sequence[Value], trains: Collection[Value]
) -> BackwardReads:
    """Return what autograd saves of a call on meta tensors. Raises one of REFUSES if the operator fails on them."""
    kept, given = list[Tensor](), {v: _leaf(v, v in trains) for v in dict.fromkeys(node.ins)}
    args, kwargs = map_values(given.__getitem__, (node.args, dict(node.kwargs)))
    with torch.enable_grad(), saved_tensors_hooks(partial(_noted, kept), _unread):
        out = op(*args, **kwargs)
    results = dict(zip(values_in(node.out), leaves_in(out), strict=True))
    memory = {memory_of(x): (1, n) for n, v in enumerate(made) if isinstance(x := results[v], Tensor)}
    memory |= {memory_of(given[v]): (0, n) for n, v in enumerate(operands)}
    inside = {memory_of(x): x.untyped_storage().nbytes() for x in kept if memory_of(x) not in memory}
    read = [memory[memory_of(x)] for x in kept if memory_of(x) in memory]
    ins, outs = (frozenset(n for side, n in read if side == here) for here in (0, 1))
    return BackwardReads(ins, outs, sum(inside.values()))


def _leaf(v: Value, trains: bool) -> Any:
    """Return a meta tensor of the value's shape, or a number."""
    if not isinstance(v.dtype, torch.dtype):
        return v.dtype(2)
    return torch.empty([hint(n) for n in v.shape], dtype=v.dtype, device="meta", requires_grad=trains)


def _tensors(values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(v for v in values if v.is_tensor))


def _noted(kept: list[Tensor], x: Tensor) -> Tensor:
    kept.append(x)
    return x


def _unread(x: Tensor) -> Tensor:
    return x
