"""Rules of operators: an equation, and properties that an equation cannot express."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .equation import Equation, parse_rule
from .local_call import LocalCall

LocalForm = Callable[..., Any]
"""Local form of an operator: a local function `form(call, *args, **kwargs)` of differentiable torch operators.

`call` is a LocalCall (see `local_call.py`): it describes this rank's local tensors, and communicates with other ranks.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """Sharding rule of an operator: a description of its computation from which all shardings are derived.

    `text`     the equation.
    `over`     operation that joins the terms if a factor missing in the result is sharded ("sum" if the rule is
               linear); None: such a factor must be whole.
    `sizes`    positions (or names) of arguments that are sizes of result 0; they are replaced by local sizes.
    `forms`    factor name → local function to run if that factor is sharded.
    `parts`    the same computation in smaller torch operators, used if the equation alone would have to communicate.
    `guard`    local function that replaces the operator if some rank has no shard.
    `alternatives`  other rules for the same call, by name.
    `invariant`  factors whose form returns whole results, computed in the same way on every rank. `over` does not hold
               for them, and the form gets whole gradients.
    `stays`    factors that stay sharded if an operand is sharded along them: replicating that operand would cost work
               and memory besides communication.
    """

    text: str
    over: str | None = None
    sizes: tuple[int | str, ...] = ()
    forms: Mapping[str, LocalForm] = field(default_factory=dict[str, LocalForm])
    parts: Callable[..., Any] | None = None
    guard: LocalForm | None = None
    alternatives: Mapping[str, Alternative] = field(default_factory=dict[str, "Alternative"])
    invariant: frozenset[str] = frozenset()
    stays: frozenset[str] = frozenset()

    @property
    def equation(self) -> Equation:
        return parse_rule(self.text)

    def joins(self) -> str | None:
        """Return the operation that joins the terms of a contraction: `over`, or "sum" for a linear rule, or None."""
        if self.over is not None:
            return self.over
        return "sum" if self.equation.products else None


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another rule for a call. `fits(call)` is True if its local form supports the sharding of the operands."""

    rule: Rule
    fits: Callable[[LocalCall], bool]


Entry = Rule | str | Callable[..., Rule | str | None]
"""A rule, its text, or a function of the call's arguments that returns a rule, a text, or None for "no rule"."""
