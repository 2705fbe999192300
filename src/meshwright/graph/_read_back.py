"""What an operator's backward pass reads: operands, results, what lies inside. Autograd is asked, without numbers."""

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

from ._node import Node, Value, map_values, values_in
from .torch_hooks import Operator, memory_of

FUSED = frozenset({"aten::scaled_dot_product_attention"})
"""Operators that devices carry out in one kernel, which reads operands and result again."""

REFUSES = (RuntimeError, TypeError, ValueError, NotImplementedError)
"""What operators raise that do not run without numbers."""


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Places among the operands of a node and among its results, tensors, each counted once; and bytes of neither."""

    ins: frozenset[int] = frozenset()
    outs: frozenset[int] = frozenset()
    inside: int = 0


NOTHING_READ = ReadBack()


def reads_back(nodes: Sequence[Node], trains: Collection[Value]) -> Mapping[Node, ReadBack]:
    """What each operator's backward pass reads, where a gradient comes to values of `trains`; others read nothing."""
    known, found = dict[Any, ReadBack](), dict[Node, ReadBack]()
    for node in nodes:
        trained = tuple(v in trains for v in (*node.ins, *node.outs))
        key = node.op, *_written(node), trained
        if key not in known:
            known[key] = _of(node, trains)
        found[node] = known[key]
    return found


def _written(node: Node) -> tuple[str, str]:
    """A call's arguments, the tensors among them by their order and shape."""
    place = {v: n for n, v in enumerate(dict.fromkeys(node.ins))}
    args, kwargs = map_values(lambda v: (place[v], v.sizes, v.dtype), (node.args, dict(node.kwargs)))
    return repr(args), repr(kwargs)


def _of(node: Node, trains: Collection[Value]) -> ReadBack:
    """What autograd keeps of a call on tensors without numbers; everything, where it cannot be called so."""
    if not any(v in trains for v in node.outs):
        return NOTHING_READ
    operands, made = _tensors(node.ins), _tensors(node.outs)
    if isinstance(node.op, Operator) and node.op.name().partition(".")[0] not in FUSED:
        with suppress(*REFUSES):
            return _asked(node.op, node, operands, made, trains)
    return ReadBack(frozenset(range(len(operands))), frozenset(range(len(made))))


def _asked(
    op: Operator, node: Node, operands: Sequence[Value], made: Sequence[Value], trains: Collection[Value]
) -> ReadBack:
    """Raises one of `REFUSES` for what does not run so."""
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
    return ReadBack(ins, outs, sum(inside.values()))


def _leaf(v: Value, trains: bool) -> Any:
    """A tensor of its shape that holds nothing, or a number."""
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
