"""Local forms for kernels that refuse empty tensors, which ranks without a shard hold."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..notation.equation import parse_rule
from ..notation.local_call import LocalCall
from ..notation.rule import LocalForm
from ..torch_hooks import Operator, schema_of


def zeros_for_empty(x: TorchValue, least: int = 1, sizes: Sequence[int] | None = None) -> TorchValue:
    """Return zeros for an empty local tensor, with every dim of size 0 extended to `least`; differentiable in `x`.

    A dim with global size 0 in `sizes` stays empty, because the product of no elements is 1. The zeros keep the empty
    tensor alive, so it is alive on all ranks on which autograd saves it.
    """
    if isinstance(x, (list, tuple)):
        return [zeros_for_empty(t, least) for t in x]
    if not isinstance(x, Tensor) or x.numel():
        return x
    whole = sizes or [1] * x.dim()
    shape = [n or (least if total else 0) for n, total in zip(x.shape, whole, strict=True)]
    if shape == list(x.shape):
        return x
    out: TorchValue = x.new_zeros(shape) + x.sum(dtype=x.dtype)
    out._stands_for = x
    return out


def trim_to_shape(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the part of `y` with the local shape of the result."""
    return y if tuple(y.shape) == shape else y[tuple(slice(0, n) for n in shape)]


def guard_against_empty(op: Operator, text: str) -> LocalForm:
    """Return a form of `op` with the rule `text`; on a rank without a shard, `op` of zeros, trimmed to be empty."""
    least, numbers = valid_dim_size(text), operand_numbers(op, text)

    def form(call: LocalCall, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        def fill(key: int | str, value: TorchValue) -> TorchValue:
            known = key in numbers and isinstance(value, Tensor)
            sizes = [call.total(numbers[key], d) for d in range(value.dim())] if known else None
            return zeros_for_empty(value, least, sizes)

        out = op(*(fill(i, a) for i, a in enumerate(args)), **{k: fill(k, v) for k, v in kwargs.items()})
        if isinstance(out, Tensor):
            return trim_to_shape(out, call.out_shape(0))
        return tuple(trim_to_shape(y, call.out_shape(i)) for i, y in enumerate(out))

    return form


def operand_numbers(op: Operator, text: str) -> dict[int | str, int]:
    """Return the operand number of each tensor argument, by its position and by its name.

    The result is empty for an operator that takes a list of tensors.
    """
    kinds = [str(a.type) for a in schema_of(op).arguments]
    if any("Tensor" in kind and kind not in _TENSORS for kind in kinds):
        return {}
    named = [(at, a.name) for at, a in enumerate(schema_of(op).arguments) if str(a.type) in _TENSORS]
    count = len(parse_rule(text).operands)
    return {key: number for number, keys in enumerate(named[:count]) for key in keys}


_TENSORS = ("Tensor", "Optional[Tensor]")


def valid_dim_size(text: str) -> int:
    """Return a size that is valid for every dim: the product of all whole factors inside products of factors.

    >>> valid_dim_size("b (g_2! c_4) -> b (c_4 g_2)")
    2
    """
    equation = parse_rule(text)
    inside = {n for o in equation.operands for d in o if len(d.names) > 1 for n in d.names}
    return prod(int(n.rpartition("_")[2]) for n in inside & set(equation.whole))


def empty_result(call: LocalCall, *used: Tensor) -> Tensor:
    """Return the empty result of a rank that holds no part of a product, connected to its factors.

    The gradient of a factor depends on all others, as on the other ranks, and on itself if it is given twice.
    """
    zeros = [torch.nan_to_num(t.sum(), 0, 0, 0) * 0 for t in used]
    return used[0].new_zeros(call.out_shape(0)) + prod(zeros)
