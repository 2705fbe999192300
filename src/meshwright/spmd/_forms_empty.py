"""Second forms for kernels that refuse empty tensors, which is what a rank without a piece holds."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from ._forms import LocalCall
from ._notation import parse_rule
from ._rule import Form


def filled(x: Any, least: int = 1) -> Any:
    """`x` with zeros in the place of every dim of size 0, made `least` long; still connected to `x`."""
    if isinstance(x, (list, tuple)):
        return [filled(t, least) for t in x]
    if not isinstance(x, Tensor) or x.numel():
        return x
    return x.new_zeros([n or least for n in x.shape]) + x.sum(dtype=x.dtype)


def trimmed(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What belongs to the local result."""
    return y if tuple(y.shape) == shape else y[tuple(slice(0, n) for n in shape)]


def unless_empty(op: Any, text: str) -> Form:
    """`op`, whose rule is `text`; where this rank has no piece, `op` of zeros, cut down to nothing."""
    least = smallest_piece(text)

    def form(call: LocalCall, *args: Any, **kwargs: Any) -> Any:
        out = op(*(filled(a, least) for a in args), **{k: filled(v, least) for k, v in kwargs.items()})
        if isinstance(out, Tensor):
            return trimmed(out, call.out_shape(0))
        return tuple(trimmed(y, call.out_shape(i)) for i, y in enumerate(out))

    return form


def smallest_piece(text: str) -> int:
    """A size that every dim may have: what is whole in a dim that is a product of factors fits into it.

    >>> smallest_piece("b (g_2! c_4) -> b (c_4 g_2)")
    2
    """
    equation = parse_rule(text)
    inside = {n for o in equation.operands for d in o if len(d.names) > 1 for n in d.names}
    return prod(int(n.rpartition("_")[2]) for n in inside & set(equation.whole))


def nothing(call: LocalCall, *used: Tensor | None) -> Tensor:
    """The empty result of a rank that holds no part of it, still connected to what it comes from."""
    tensors = [t for t in used if t is not None]
    return tensors[0].new_zeros(call.out_shape(0)) + sum(t.sum() for t in tensors) * 0
