"""A rule: an equation, and the few things an equation cannot say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ._forms import LocalCall
from ._notation import Equation, parse_rule

Form = Callable[..., Any]
"""A named second form: a local function `form(call, *args, **kwargs)` in differentiable torch ops.

`call` is a LocalCall (see `_forms.py`): which part of the operands this rank holds, and how to reach the others.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """How an operator lies on a mesh: what one device computes, said so that every cut can be derived.

    `text`     the equation.
    `over`     what joins the terms when a factor missing in the result is cut ("sum" where the rule is linear);
               None: such a factor must be whole.
    `sizes`    positions (or names) of arguments that are sizes of result 0 and become local ones.
    `forms`    factor name → local function to run when that factor is cut, with what joins its terms (or None).
    `parts`    the same computation in smaller torch ops, taken when the equation alone would have to communicate.
    `guard`    local function to run in the operator's place where some rank is left without a piece.
    `alternatives`  other rules for the same call, by the names they are asked for.
    `stays`    factors that stay cut where an operand comes cut along them: to repeat that operand would cost work and
               memory beside bytes.
    """

    text: str
    over: str | None = None
    sizes: tuple[int | str, ...] = ()
    forms: Mapping[str, Form] = field(default_factory=dict[str, Form])
    parts: Callable[..., Any] | None = None
    guard: Form | None = None
    alternatives: Mapping[str, Alternative] = field(default_factory=dict[str, "Alternative"])
    stays: frozenset[str] = frozenset()

    @property
    def equation(self) -> Equation:
        return parse_rule(self.text)

    def joins(self) -> str | None:
        """What joins the terms of a contraction: `over`, or a sum where the rule is linear."""
        if self.over is not None:
            return self.over
        return "sum" if self.equation.products else None


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another rule for a call; `fits` tells whether its second form can do with how the operands are cut."""

    rule: Rule
    fits: Callable[[LocalCall], bool]


Entry = Rule | str | Callable[..., Rule | str | None]
"""A rule, its text, or a function that takes the call's arguments and returns one of them, or None for "no rule"."""
