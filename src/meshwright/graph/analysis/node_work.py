"""Work of a node, computed from shapes: operations, and bytes that are read and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from meshwright.layout import TorchValue, hint

from ..program.effects import is_view
from ..program.node import Node, Overwrite, Value, WriteToCopies
from ..torch_hooks import Operator
from .live_memory import SECRET_VIEWS

Arguments = Sequence[TorchValue]


@dataclass(frozen=True, slots=True)
class NodeWork:
    """Number of operations, bytes read and written, and dtype of the operations."""

    flops: float
    nbytes: float
    dtype: torch.dtype


def work_of(node: Node) -> NodeWork:
    """Return the work of a node on the local tensors of this rank.

    Views, conversion steps and functions of numbers count zero. A matrix product, convolution or attention counts two
    operations per multiplication; other operators count one operation per element of the results.
    """
    op = node.op.op if isinstance(node.op, (WriteToCopies, Overwrite)) else node.op
    made = [v for v in node.outs if v.is_tensor]
    dtype = _float_dtype((*node.ins, *made))
    if not isinstance(op, Operator) or not made or _is_free(op):
        return NodeWork(0, 0, dtype)
    nbytes = sum(v.nbytes for v in {*node.ins, *made})
    name = op._schema.name.split("::")[1]
    count = _COUNTS.get(name)
    return NodeWork(count(node.args, node.out) if count else sum(map(_numel, made)), nbytes, dtype)


def _is_free(op: Operator) -> bool:
    return op._schema.name in SECRET_VIEWS or (is_view(op) and not any(a.is_write for a in _alias_infos(op)))


def _alias_infos(op: Operator) -> list[Any]:
    return [a.alias_info for a in op._schema.arguments if a.alias_info is not None]


def _float_dtype(values: Sequence[Value]) -> torch.dtype:
    found = (v.dtype for v in values if isinstance(v.dtype, torch.dtype) and v.dtype.is_floating_point)
    return next(found, torch.float32)


def _numel(v: Value) -> int:
    return prod(hint(n) for n in v.shape)


def _mm(args: Arguments, out: TorchValue) -> float:
    return 2 * _numel(out) * hint(args[0].shape[-1])


def _addmm(args: Arguments, out: TorchValue) -> float:
    return _mm(args[1:], out)


def _convolution(args: Arguments, out: TorchValue) -> float:
    weight: Value = args[1]
    return 2 * _numel(out) * _numel(weight) / hint(weight.shape[0])


def _convolution_backward(args: Arguments, out: TorchValue) -> float:
    return _convolution(args[1:], args[0]) * sum(v is not None for v in out[:2])


def _attention(args: Arguments, out: TorchValue) -> float:
    q, k, v = args[:3]
    pairs = _numel(q) / hint(q.shape[-1]) * hint(k.shape[-2])
    return 2 * pairs * (hint(q.shape[-1]) + hint(v.shape[-1]))


def _attention_backward(args: Arguments, out: TorchValue) -> float:
    """Return 2.5 times the forward pass: the scores are recomputed, and each product has two gradients."""
    return 2.5 * _attention(args[1:], out)


def _is_backward(name: str) -> Callable[[Arguments, TorchValue], float]:
    return _attention_backward if name.endswith("_backward") else _attention


_COUNTS: dict[str, Callable[[Arguments, TorchValue], float]] = {
    "mm": _mm,
    "linear": _mm,
    "matmul": _mm,
    "scaled_dot_product_attention": _attention,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "bmm": _mm,
    "mv": _mm,
    "dot": _mm,
    "addmm": _addmm,
    "addmm_": _addmm,
    "addmv": _addmm,
    "baddbmm": _addmm,
    "baddbmm_": _addmm,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
} | {
    f"_scaled_dot_product_{kind}{end}": _is_backward(end)
    for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    for end in ("", "_backward")
}
"""Operators that are sums of products → function of arguments and results that returns the number of operations."""
