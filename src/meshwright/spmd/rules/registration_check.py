"""`check_registration`: the checks of a rule that a user registers, against the operator's schema."""

from __future__ import annotations

import re

import torch

from .._errors import RuleError
from ..notation.equation import Equation, parse_rule
from ..notation.rule import Entry, Rule
from ..torch_hooks import Operator, schema_of

_ONE_OF_MANY = re.compile(r"^\.\.\.\d+$")
"""A factor of one of the dims that `...` stands for, such as `...1`."""
_NAME = re.compile(r"(\w+)\.(\w+)(?:\.(\w+))?")


def check_registration(name: str, entry: Entry) -> None:
    """Check the name of an operator and its rule; a function of the call's arguments is checked by its calls.

    Raises:
        RuleError: no such operator, a rule of another type, or a rule with more operands, with other results, or with
            other factors than the operator can have.
    """
    operators = _operators_named(name)
    if isinstance(entry, str | Rule):
        _check_rule(name, operators, Rule(entry) if isinstance(entry, str) else entry)
    elif not callable(entry):
        raise RuleError(
            f"a rule for {name}",
            f"a {type(entry).__name__}",
            "a rule is a text, a Rule, or a function of the call's arguments that returns one of these or None",
            'write it as in "m k * k n -> m n"',
        )


def _operators_named(name: object) -> list[Operator]:
    """Return the overloads that the name means: one if it names an overload, else all."""
    parts = _NAME.fullmatch(name) if isinstance(name, str) else None
    if parts is None:
        raise RuleError(
            f"a rule for {name!r}",
            "no name of an operator",
            "an operator is named by its namespace and its name in torch.ops, perhaps with the overload",
            'write it as in "mylib.swiglu" or "aten.max.dim"',
        )
    namespace, operator, overload = parts.groups()
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    overloads = [] if packet is None else [o for o in packet.overloads() if overload in (None, o)]
    if not overloads:
        raise RuleError(
            f"a rule for {name}",
            f"no operator torch.ops.{name}",
            "a rule belongs to an operator, and a misspelt name would never be used",
            "define the operator first, as with torch.library.custom_op, or correct the name",
        )
    return [getattr(packet, o) for o in overloads]


def _check_rule(name: str, operators: list[Operator], rule: Rule) -> None:
    equation = parse_rule(rule.text)
    if not any(_fits_schema(equation, op) for op in operators):
        raise RuleError(
            f"rule {rule.text!r} for {name}",
            f"{len(equation.operands)} operands and {len(equation.results)} results",
            f"the operator is {' or '.join(str(schema_of(op)) for op in operators[:3])}",
            "write one operand for each tensor that it takes, and one result for each tensor that it returns",
        )
    terms = [term for side in (*equation.operands, *equation.results) for term in side]
    factors = {factor for term in terms for factor in term.names}
    named = {_ONE_OF_MANY.sub("...", factor) for factor in (*rule.forms, *rule.stays, *rule.invariant)}
    if unknown := sorted(named - factors):
        raise RuleError(
            f"rule {rule.text!r} for {name}",
            f"a form for {', '.join(map(repr, unknown))}",
            f"the factors of the rule are {', '.join(sorted(factors))}",
            "name a factor of the rule in forms and stays",
        )


def _fits_schema(equation: Equation, op: Operator) -> bool:
    """True if a call of the operator can have as many tensors as the equation has operands and results."""
    schema = schema_of(op)
    takes = [str(argument.type) for argument in schema.arguments if not _is_target(argument)]
    gives = [str(result.type) for result in schema.returns]
    if not gives:  # the operator only writes to its operands
        return _can_hold(takes, len(equation.operands))
    return _can_hold(takes, len(equation.operands)) and _can_hold(gives, len(equation.results))


def _is_target(argument: torch.Argument) -> bool:
    """True for an `out=` argument, which the operator only writes to."""
    return argument.kwarg_only and argument.alias_info is not None and argument.alias_info.is_write


def _can_hold(types: list[str], tensors: int) -> bool:
    """True if values of these types can be so many operands.

    A list can be any number of tensors, an optional tensor or a number one operand or none.
    """
    single = sum(kind == "Tensor" for kind in types)
    optional = sum(kind in ("Optional[Tensor]", "number", "int", "float") for kind in types)
    has_list = any("List[" in kind and "Tensor" in kind for kind in types)
    return single <= tensors and (has_list or tensors <= single + optional)
