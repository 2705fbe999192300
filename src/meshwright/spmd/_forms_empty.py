"""Second forms for kernels that refuse empty tensors, which is what a rank without a piece holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._forms import LocalCall
from ._rule import Entry, Form, Rule


def filled(x: Any) -> Any:
    """`x` with zeros in the place of every dim of size 0, made one long; still connected to `x`."""
    if isinstance(x, (list, tuple)):
        return [filled(t) for t in x]
    if not isinstance(x, Tensor) or x.numel():
        return x
    return x.new_zeros([max(n, 1) for n in x.shape]) + x.sum(dtype=x.dtype)


def trimmed(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What belongs to the local result."""
    return y if tuple(y.shape) == shape else y[tuple(slice(0, n) for n in shape)]


def unless_empty(op: Any) -> Form:
    """`op`; where this rank has no piece, `op` of zeros, cut down to nothing."""

    def form(call: LocalCall, *args: Any, **kwargs: Any) -> Any:
        out = op(*map(filled, args), **{k: filled(v) for k, v in kwargs.items()})
        if isinstance(out, Tensor):
            return trimmed(out, call.out_shape(0))
        return tuple(trimmed(y, call.out_shape(i)) for i, y in enumerate(out))

    return form


def nothing(call: LocalCall, *used: Tensor | None) -> Tensor:
    """The empty result of a rank that holds no part of it, still connected to what it comes from."""
    tensors = [t for t in used if t is not None]
    return tensors[0].new_zeros(call.out_shape(0)) + sum(t.sum() for t in tensors) * 0


def guarded(op: Any, entry: Any, form: Form | None = None) -> Entry:
    """The rule of `entry`; a rank without a piece gives an empty result instead of running `op`."""

    def or_nothing(call: LocalCall, *args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        return op(*args, **kwargs) if all(t.numel() for t in tensors) else nothing(call, *tensors)

    def rule(*args: Any, **kwargs: Any) -> Rule | None:
        text = entry(*args, **kwargs)
        return None if text is None else Rule(text, forms=dict.fromkeys(free_factors(text), form or or_nothing))

    return rule


def free_factors(text: str) -> list[str]:
    """The factors of the operands that may be cut."""
    equation = Rule(text).equation
    names = dict.fromkeys(n for o in equation.operands for d in o for n in d.names)
    return [n for n in names if n not in equation.whole]
