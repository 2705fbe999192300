"""Options that rules allow for an operator along one axis of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from meshwright.graph import Node, Operator, Value, map_values
from meshwright.layout import hint
from meshwright.spmd import (
    REPLICATED,
    AxisState,
    BoundRule,
    Choice,
    OperatorCall,
    RuleError,
    allows_pending_sums,
    describe_for_propagation,
    factor_choices,
    layout_dim,
    pending_sum_choices,
)

from .forms import AXIS, PENDING, VARYING, WHOLE, AxisForm
from .variable_elimination import Costs


@dataclass(frozen=True)
class Option:
    """An option of an operator: the forms that its operands need and its results have, and its seconds.

    Operands and results are those of `tensors_of`, each once, in order.
    """

    needs: tuple[AxisForm, ...]
    gives: tuple[AxisForm, ...]
    seconds: float


Column = tuple[AxisForm, ...]
"""The forms of one operand or result by option, or the possible forms of a value."""


@dataclass(frozen=True, eq=False)
class OptionColumns:
    """The options of an operator, and by column their seconds and the forms of each operand and of each result."""

    options: tuple[Option, ...]
    needs: tuple[Column, ...]
    gives: tuple[Column, ...]
    seconds: Costs

    @classmethod
    def of(cls, options: Iterable[Option], interned: Callable[[Column], Column]) -> OptionColumns:
        """Return the columns of the options; `interned` returns the same object for equal columns."""
        every = tuple(options)
        needs, gives = zip(*((option.needs, option.gives) for option in every), strict=True)
        seconds = np.array([option.seconds for option in every])
        needs, gives = (tuple(map(interned, zip(*side, strict=True))) for side in (needs, gives))
        return cls(every, needs, gives, seconds)


Options = Mapping[Node, Option]
"""The option of each operator."""
Forms = Mapping[Value, AxisForm]
"""The form of each value."""
PossibleForms = Mapping[Value, Column]


def tensors_of(values: Sequence[Value]) -> tuple[Value, ...]:
    """Return the tensors among values, each once."""
    return tuple(dict.fromkeys(v for v in values if v.is_tensor))


def call_of(node: Node) -> OperatorCall | None:
    """Return the call of an operator that has a rule and writes to nothing, or None."""
    if not isinstance(node.op, Operator):
        return None
    args, kwargs = map_values(_rule_operand, (node.args, dict(node.kwargs)))
    try:
        call = describe_for_propagation(node.op, args, kwargs)
    except RuleError:
        return None
    return None if call is None or call.mutated else call


def _rule_operand(v: Value) -> torch.Tensor | complex:
    """Return what a rule reads in place of a value: a tensor of its shape without data, or a number."""
    if not isinstance(v.dtype, torch.dtype):
        return v.dtype(2)
    return torch.empty([hint(n) for n in v.shape], dtype=v.dtype, device="meta")


def choices(bound: BoundRule, ranks: int) -> Iterator[Choice]:
    """Yield all options that a rule allows on so many ranks, with even parts."""
    for factor, size in enumerate(bound.sizes):
        if hint(size) % ranks == 0 and hint(size) > 1:
            yield from (c for c in factor_choices(bound, factor) if allows_pending_sums(bound, c, c.ins))
    yield from (
        c for c in pending_sum_choices(bound, (REPLICATED,) * len(bound.ins)) if allows_pending_sums(bound, c, c.ins)
    )


def needs_of(node: Node, call: OperatorCall, choice: Choice, ranks: int) -> dict[Value, AxisForm] | None:
    """Return the form that a choice needs of each operand; None if it needs one operand in two forms."""
    needs: dict[Value, AxisForm] = {}
    bound, varies = call.bound, any(need != REPLICATED for need in choice.ins)
    operands: list[Value | None] = call.operands(node.args, node.kwargs)
    for v, held, dims in zip(operands, choice.ins, bound.ins, strict=True):
        if v is None:
            continue
        form = _form_of(bound, held, dims, ranks)
        form = VARYING if form == WHOLE and varies else form
        if needs.setdefault(v, form) != form:
            return None
    return needs


def gives_of(bound: BoundRule, choice: Choice, ranks: int) -> tuple[AxisForm, ...]:
    """Return the forms of the results under a choice."""
    return tuple(_form_of(bound, held, dims, ranks) for held, dims in zip(choice.outs, bound.outs, strict=True))


def _form_of(bound: BoundRule, held: AxisState, dims: tuple[tuple[int, ...], ...], ranks: int) -> AxisForm:
    if isinstance(held, str):
        return PENDING if held == "sum" else AxisForm(held)
    at = next((d for d, factors in enumerate(dims) if held in factors), None)
    if at is None:
        return WHOLE
    return AxisForm("cut", at, layout_dim(dims[at], {held: (AXIS,)}, bound, {AXIS: ranks}))
