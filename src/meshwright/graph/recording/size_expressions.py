"""Symbolic sizes and conditions on them as rows of plain data; a row is a function of numbers and of earlier rows.

    [["Symbol", "s7"], ["FloorDiv", "e0", 2], ["Equality", "e1", 4]]

Rows are computed with given values for the symbols: numbers, or symbols of another recording. No text is evaluated.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import isfinite
from typing import Any

import torch

from meshwright.layout import TorchValue

from .symbolic_numbers import FUNCTIONS, floor_div

Row = Sequence[Any]
"""Name of a function and its arguments: numbers, or earlier rows named `e0`, `e1` and so on."""

SIZES: Mapping[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": floor_div,
    "CleanDiv": floor_div,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}
"""Functions of size expressions; they accept numbers and symbols."""

_FOLDED = {"Add", "Mul", "Max", "Min", "And", "Or"}
_MOST_PARTS = 4096
_MOST_BITS = 256


class ExpressionError(ValueError):
    """Error for an expression that cannot be written, or for invalid rows."""


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and (not isinstance(exponent, int) or base.bit_length() * abs(exponent) > _MOST_BITS):
        raise ExpressionError("a power is too large")
    return base**exponent


def _not(a: object) -> bool:
    return not a


CONDITIONS: Mapping[str, Callable[..., Any]] = {
    **FUNCTIONS,
    **SIZES,
    "Pow": _power,
    "PowByNatural": _power,
    "FloatPow": _power,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": operator.and_,
    "Or": operator.or_,
    "Not": _not,
}
"""Functions of conditions; they are applied to numbers."""


@dataclass(slots=True)
class Rows:
    """Writer of rows. `name_of` returns the name of a symbol. Equal expressions are written once."""

    name_of: Callable[[Any], str]
    functions: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    rows: list[list[Any]] = field(default_factory=list[list[Any]])
    _known: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def of(self, expr: TorchValue) -> int | float | str:
        """Return a number, or the name of the row of a sympy expression. Raises ExpressionError for other functions."""
        if expr not in self._known:
            self._known[expr] = self._written(expr)
        return self._known[expr]

    def _written(self, expr: TorchValue) -> int | float | str:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Float or expr.is_Rational:
            return float(expr)
        if expr.is_Symbol:
            return self.add("Symbol", self.name_of(expr))
        name = type(expr).__name__
        if name == "Pow" and name not in self.functions and expr.exp.is_Integer and 1 < expr.exp <= 8:
            return self.add("Mul", *[self.of(expr.base)] * int(expr.exp))
        if name not in self.functions:
            raise ExpressionError(f"{expr} is a {name}")
        return self.add(name, *[self.of(a) for a in expr.args])

    def add(self, *row: object) -> str:
        """Add a row and return its name."""
        self.rows.append(list(row))
        return f"e{len(self.rows) - 1}"


def evaluate_rows(
    rows: Sequence[Row], symbols: Mapping[str, Any], functions: Mapping[str, Any] = SIZES
) -> dict[str, Any]:
    """Return the value of every row by name, for the given values of the symbols.

    The work is bounded also for rows of untrusted origin. Raises ExpressionError for invalid rows, and for expressions
    or numbers that are too large.
    """
    values: dict[str, Any] = {}
    parts: dict[str, int] = {}
    for at, (name, *args) in enumerate(rows):
        row = f"e{at}"
        parts[row] = 1 + sum(parts.get(a, 1) for a in args if isinstance(a, str))
        if parts[row] > _MOST_PARTS:
            raise ExpressionError(f"row {at} has more than {_MOST_PARTS} parts")
        if name == "Symbol" and len(args) == 1 and args[0] in symbols:
            values[row] = symbols[args[0]]
        elif name in functions and args:
            values[row] = _limited(_applied(name, functions[name], [_argument(a, values) for a in args]))
        else:
            raise ExpressionError(f"row {at} is invalid: {name!r} of {args}")
    return values


def _applied(name: str, function: Callable[..., Any], args: list[Any]) -> TorchValue:
    return reduce(function, args) if name in _FOLDED else function(*args)


def _argument(a: object, values: Mapping[str, Any]) -> TorchValue:
    if isinstance(a, str) and a in values:
        return values[a]
    if isinstance(a, (int, float)) and isfinite(a):
        return a
    raise ExpressionError(f"{a!r} is neither a number nor an earlier row")


def _limited(value: TorchValue) -> TorchValue:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ExpressionError("a number is too large")
    return value
