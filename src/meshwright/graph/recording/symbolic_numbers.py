"""Symbolic numbers of a recording (sizes, learning rates, results of `.item()`) as values of the program."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol

import torch

from meshwright.layout import TorchValue

from .._errors import CaptureError
from ..program.node import Value, values_in


class Emits(Protocol):
    """Protocol of objects that add nodes on numbers."""

    def emit_number(self, op: Callable[..., Any], args: tuple[Any, ...], kind: type) -> Value: ...


def floor_div(a: int, b: int) -> int:
    return a // b


def minimum(*numbers: TorchValue) -> TorchValue:
    """Return the minimum of numbers, which may be symbolic."""
    return reduce(torch.sym_min, numbers)


def maximum(*numbers: TorchValue) -> TorchValue:
    """Return the maximum of numbers, which may be symbolic."""
    return reduce(torch.sym_max, numbers)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloatPow": operator.pow,
    "FloorDiv": floor_div,
    "CleanDiv": floor_div,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloatTrueDiv": operator.truediv,
    "IntTrueDiv": operator.truediv,
    "ToFloat": float,
    "TruncToInt": math.trunc,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "Max": maximum,
    "Min": minimum,
    "OpaqueUnaryFn_sqrt": math.sqrt,
    "OpaqueUnaryFn_exp": math.exp,
    "OpaqueUnaryFn_log": math.log,
    "OpaqueUnaryFn_cos": math.cos,
    "OpaqueUnaryFn_sin": math.sin,
    "OpaqueUnaryFn_tanh": math.tanh,
    "Abs": abs,
}
"""Function of a symbolic expression → Python function. Add and Mul of more than two arguments are folded."""

_FOLDED = {"Add", "Mul"}


@dataclass(slots=True)
class Numbers:
    """Table of symbolic expressions and their values in the program."""

    known: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def bind(self, number: TorchValue, value: Value) -> None:
        """Set the value of the symbolic number `number`."""
        self.known[number.node.expr] = value

    def see(self, out: TorchValue, shown: TorchValue) -> None:
        """Set the value of `out`, the result of a node, if it is a symbolic number."""
        if isinstance(out, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            (value,) = values_in(shown)
            self.known[out.node.expr] = value

    def value_of(self, number: TorchValue, to: Emits) -> Value | float:
        """Return the value of a symbolic number in the program, or a plain number.

        Nodes are added through `to` as needed. Raises CaptureError for an unknown function.
        """
        return self._value_of(number.node.expr, to)

    def _value_of(self, expr: TorchValue, to: Emits) -> Value | float:
        if expr in self.known:
            return self.known[expr]
        if expr.is_number:
            return int(expr) if expr.is_integer else float(expr)
        name = type(expr).__name__
        if name not in FUNCTIONS:
            raise CaptureError(
                f"the number {expr}",
                f"a {name}",
                "this function of tensors' numbers cannot be recorded",
                "compute numbers from sizes with + - * / ** min max, or use tensor operations instead of Python ones",
            )

        def emit(*args: Value | float) -> Value:
            return to.emit_number(FUNCTIONS[name], args, int if expr.is_integer else float)

        args = [self._value_of(a, to) for a in expr.args]
        self.known[expr] = reduce(emit, args) if name in _FOLDED else emit(*args)
        return self.known[expr]
