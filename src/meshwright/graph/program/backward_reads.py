"""Operands, results and internal tensors that an operator's backward pass reads, found by autograd on meta tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.layout import TorchValue, hint
from meshwright.tensor import leaves_in

from ..torch_hooks import Operator, memory_of
from .node import Node, Value, values_in

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
        key = node.op, *_call_text(node), trained
        if key not in known:
            known[key] = _reads_of(node, trains)
        found[node] = known[key]
    return found


def _call_text(node: Node) -> tuple[str, str]:
    """Return a call's arguments as text, with tensors replaced by their order, shape and dtype."""
    place = {v: n for n, v in enumerate(dict.fromkeys(node.ins))}
    args, kwargs = node.mapped_arguments(lambda v: (place[v], v.sizes, v.dtype))
    return repr(args), repr(kwargs)


def _reads_of(node: Node, trains: Collection[Value]) -> BackwardReads:
    """Return what autograd saves of a call on meta tensors; all operands and results if the call fails."""
    if not any(v in trains for v in node.outs):
        return NOTHING_READ
    if isinstance(node.op, Operator) and node.op.name().partition(".")[0] not in FUSED:
        with suppress(*REFUSES):
            return _reads_by_autograd(node.op, node, trains)
    operands, results = distinct_tensors(node.ins), distinct_tensors(node.outs)
    return BackwardReads(frozenset(range(len(operands))), frozenset(range(len(results))))


def _reads_by_autograd(op: Operator, node: Node, trains: Collection[Value]) -> BackwardReads:
    """Return what autograd saves of a call on meta tensors. Raises one of REFUSES if the operator fails on them.

    A result in the memory of an operand counts as the operand.
    """
    tensors, saved = {v: _meta_operand(v, v in trains) for v in node.ins}, list[Tensor]()
    args, kwargs = node.mapped_arguments(tensors.__getitem__)
    with torch.enable_grad(), saved_tensors_hooks(partial(_note_saved, saved), _leave_saved):
        out = op(*args, **kwargs)
    tensors.update(zip(values_in(node.out), leaves_in(out), strict=True))
    ins = _numbers_by_memory(tensors[v] for v in distinct_tensors(node.ins))
    outs = _numbers_by_memory(tensors[v] for v in distinct_tensors(node.outs))
    read = {memory_of(x): x.untyped_storage().nbytes() for x in saved}
    return BackwardReads(
        frozenset(ins[memory] for memory in read.keys() & ins.keys()),
        frozenset(outs[memory] for memory in (read.keys() & outs.keys()) - ins.keys()),
        sum(read[memory] for memory in read.keys() - ins.keys() - outs.keys()),
    )


def _numbers_by_memory(tensors: Iterable[object]) -> dict[int, int]:
    """Return the number of each tensor in the order of `tensors`, by the memory that it is in."""
    return {memory_of(x): n for n, x in enumerate(tensors) if isinstance(x, Tensor)}


def _meta_operand(v: Value, trains: bool) -> TorchValue:
    """Return a meta tensor of the value's shape, or a number."""
    if not isinstance(v.dtype, torch.dtype):
        return v.dtype(2)
    return torch.empty([hint(n) for n in v.shape], dtype=v.dtype, device="meta", requires_grad=trains)


def distinct_tensors(values: Sequence[Value]) -> tuple[Value, ...]:
    """Return the tensors among the values, each once; positions in `BackwardReads` are positions among these."""
    return tuple(dict.fromkeys(v for v in values if v.is_tensor))


def _note_saved(saved: list[Tensor], x: Tensor) -> Tensor:
    saved.append(x)
    return x


def _leave_saved(x: Tensor) -> Tensor:
    return x
