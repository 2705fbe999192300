"""Table of spellings: functions that read a call of one operator as an equivalent call of another operator.

Rules and programs are both read through this table, so that a rule with `x * torch.rsqrt(v)` also matches
`x / torch.sqrt(v)`. The table changes no program. The last spelling of an operator that applies is its normal form.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.layout import TorchValue

from ..program.node import Kind, Value
from ..torch_hooks import Operator
from .node_reader import CAST, Operand, Reader, Spell, VirtualValue, inverse, spelled

aten = torch.ops.aten
Args = tuple[TorchValue, ...] | None


def is_operand(x: TorchValue) -> bool:
    return isinstance(x, (Value, VirtualValue))


def like(
    x: Operand, op: Operator, *args: TorchValue, dtype: Kind | None = None, shape: tuple[Any, ...] | None = None
) -> VirtualValue:
    """Return the result of `op(*args)` as a virtual value, with the shape, dtype and device of `x` as defaults."""
    return VirtualValue(op, args, tuple(x.shape) if shape is None else shape, dtype or x.dtype, x.device)


def promoted(x: TorchValue, out: Operand) -> TorchValue:
    """Return `x` with the cast that type promotion implies for the result `out`."""
    if not is_operand(x) or x.dtype == out.dtype or not isinstance(out.dtype, torch.dtype):
        return x
    return like(x, CAST, x, out.dtype, dtype=out.dtype)


def _is_float(x: TorchValue) -> bool:
    return is_operand(x) and isinstance(x.dtype, torch.dtype) and x.dtype.is_floating_point


def _raised_to(power: float) -> Spell:
    def spell(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
        return (args[0],) if args[1] == power and _is_float(args[0]) else None

    return spell


for _power, _op in ((2, aten.square), (0.5, aten.sqrt), (-0.5, aten.rsqrt), (-1, aten.reciprocal)):
    spelled(aten.pow.Tensor_Scalar, gives=_op.default)(_raised_to(_power))


@spelled(aten.mul.Tensor, gives=aten.mul.Tensor)
@spelled(aten.add.Tensor, gives=aten.add.Tensor)
@spelled(aten.sub.Tensor, gives=aten.sub.Tensor)
def _mixed_dtypes(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    x, y = promoted(args[0], out), promoted(args[1], out)
    return (x, y, *args[2:]) if (x, y) != args[:2] else None


@spelled(aten.mul.Tensor, gives=aten.square.default)
def _by_itself(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    x, y = args
    return (x,) if is_operand(x) and is_operand(y) and read.base(x) is read.base(y) else None


@spelled(aten.mul.Tensor, gives=aten.silu.default)
def _gated_by_itself(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    for x, gate in (args, args[::-1]):
        inner = read.as_call(gate, aten.sigmoid.default)
        if inner is not None and is_operand(x) and read.base(inner[0]) is read.base(x):
            return (x,)
    return None


def _mean(read: Reader, out: Operand, total: TorchValue, per: float) -> Args:
    summed = read.as_call(total, aten.sum.dim_IntList)
    if summed is None or not summed[1] or not isinstance(per, float) or not _is_float(total):
        return None
    size = 1
    for d in summed[1]:
        size *= summed[0].shape[d]
    return (summed[0], summed[1], summed[2], summed[3]) if isinstance(size, int) and per * size == 1 else None


@spelled(aten.mul.Tensor, gives=aten.mean.dim)
def _sum_times(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    return _mean(read, out, args[0], args[1]) if isinstance(args[1], float) else None


@spelled(aten.div.Tensor, gives=aten.mean.dim)
def _sum_over(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    return _mean(read, out, args[0], 1 / args[1]) if isinstance(args[1], (int, float)) and args[1] else None


@spelled(aten.div.Tensor, gives=aten.mul.Tensor)
def _times_inverse(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    if not _is_float(out):
        return None
    x, y = (promoted(a, out) for a in args)
    if is_operand(y):
        return x, like(y, aten.reciprocal.default, y)
    return (x, inverse(y)) if y != 0 else None


def _arguments_of(op: Operator) -> Spell:
    """Return a spelling that takes the arguments of the operand, read as a call of `op`."""
    return lambda read, out, args: read.as_call(args[0], op)


spelled(aten.reciprocal.default, gives=aten.rsqrt.default)(_arguments_of(aten.sqrt.default))
spelled(aten.sqrt.default, gives=aten.rsqrt.default)(_arguments_of(aten.reciprocal.default))
spelled(aten.log.default, gives=aten.log_softmax.int)(_arguments_of(aten.softmax.int))


def _turned(x: Operand) -> Args:
    return (x, -2, -1)


@spelled(aten.t.default, gives=aten.transpose.int)
@spelled(aten.numpy_T.default, gives=aten.transpose.int)
def _matrix_turned(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    return _turned(args[0]) if len(args[0].shape) == 2 else None


@spelled(aten.mT.default, gives=aten.transpose.int)
def _matrices_turned(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    return _turned(args[0])


@spelled(aten.permute.default, gives=aten.transpose.int)
def _last_two_swapped(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    x, order = args[0], [int(d) % len(args[0].shape) for d in args[1]]
    if len(order) < 2:
        return None
    rest = [*order[:-2], order[-1], order[-2]]
    if rest == sorted(rest):
        return _turned(x)
    if rest[-1] != len(rest) - 1:
        return None
    return _turned(like(x, aten.permute.default, x, rest, shape=tuple(x.shape[d] for d in rest)))


@spelled(aten.linear.default, gives=aten.matmul.default)
def _by_a_turned_matrix(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    x, w, b = args
    if b is not None or len(w.shape) != 2:
        return None
    return x, like(w, aten.transpose.int, w, -2, -1, shape=(w.shape[1], w.shape[0]))


@spelled(aten.addmm.default, gives=aten.add.Tensor)
def _product_and_sum(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    b, x, y, beta, alpha = args
    return (like(out, aten.matmul.default, x, y), b, 1) if beta == alpha == 1 else None


def _with_cast(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    x, dim, dtype = args
    return None if dtype is None else (like(x, CAST, x, dtype, dtype=dtype), dim, None)


spelled(aten.softmax.int, gives=aten.softmax.int)(_with_cast)
spelled(aten.log_softmax.int, gives=aten.log_softmax.int)(_with_cast)


@spelled(aten._softmax.default, gives=aten.softmax.int)
@spelled(aten._log_softmax.default, gives=aten.log_softmax.int)
def _below_autograd(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    return (args[0], args[1], None) if not args[2] else None


@spelled(aten.where.ScalarOther, gives=aten.masked_fill.Scalar)
def _filled_elsewhere(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    mask, x, fill = args
    return x, like(mask, aten.bitwise_not.default, mask), fill


@spelled(aten.where.ScalarSelf, gives=aten.masked_fill.Scalar)
def _filled_there(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    return args[2], args[0], args[1]


@spelled(aten.eq.Scalar, gives=aten.bitwise_not.default)
def _is_false(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    return (args[0],) if args[0].dtype == torch.bool and args[1] == 0 else None


@spelled(aten.var.dim, gives=aten.mean.dim)
@spelled(aten.var.correction, gives=aten.mean.dim)
def _biased_variance(read: Reader, out: Operand, args: tuple[TorchValue, ...]) -> Args:
    x, dims, correction, keep = args  # `unbiased=False` equals a correction of 0
    if correction != 0 or not dims:
        return None
    shape = tuple(1 if d - len(x.shape) in dims or d in dims else n for d, n in enumerate(x.shape))
    mean = like(x, aten.mean.dim, x, dims, True, None, shape=shape)
    centred = like(x, aten.sub.Tensor, x, mean, 1)
    return like(x, aten.square.default, centred), dims, keep, None
