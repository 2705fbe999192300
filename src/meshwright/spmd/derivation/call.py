"""A call of an ATen operator, described by its rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from torch import Tensor

from ..notation.rule import Rule
from ..rules.rule_table import find_rule, random_operator_rule
from ..torch_hooks import Operator, schema_of
from .pending_sums import pending_operands
from .sharding_choices import BoundRule, bind

ArgumentPosition = tuple[int | str, int | None]
"""Place of an operand: position or name of the argument, and the index in the argument if it is a list."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operator call with a rule: the rule bound to the shapes, and the places of the operands.

    `places[i]` is the place of operand i of the rule; None for an absent operand or a plain number. `mutated` lists the
    operands that are written to.
    """

    rule: Rule
    bound: BoundRule
    places: tuple[ArgumentPosition | None, ...]
    mutated: tuple[int, ...]

    def operands(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the operands among the arguments of such a call; None for an absent operand or a plain number."""
        return [None if place is None else _at(place, args, kwargs) for place in self.places]


def describe(
    op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], alternative: Rule | None = None, ones: bool = False
) -> Call | None:
    """Return the call `op(*args, **kwargs)` bound to its rule or to `alternative`; None if there is no rule.

    Arguments are global tensors. They may be on the meta device, since only their shapes and dtypes are read. With
    `ones`, dims of size one have factors as well, unless they are broadcast.

    Raises:
        RuleError: the shapes do not fit the rule; the operator would not accept them either.
    """
    rule = alternative or find_rule(op, args, kwargs)
    if rule is None:
        return None
    slots = list(_slots(op, args, kwargs, len(rule.equation.operands)))
    shapes = [tuple(v.shape) if isinstance(v, Tensor) else None for _, v in slots]
    numbers = [i for i, (_, v) in enumerate(slots) if isinstance(v, (int, float, complex)) and v != 0]
    scales = _scales(op, args, kwargs, [p for p, v in slots if isinstance(v, (int, float, complex))])
    terms = pending_operands(rule.equation, [v for _, v in slots], scales)
    places = tuple(p if isinstance(v, Tensor) else None for p, v in slots)
    written = {a.name for a in schema_of(op).arguments if a.alias_info is not None and a.alias_info.is_write}
    names = [a.name for a in schema_of(op).arguments]
    mutated = tuple(i for i, p in enumerate(places) if p is not None and _argument_name(p[0], names) in written)
    bound = bind(rule, shapes, numbers, terms, ones)
    bound = _written_in_place(bound) if mutated else bound
    bound = bound if all(isfinite(abs(c)) for c in scales) else replace(bound, products=())
    return Call(bound.rule, bound, places, mutated)


def describe_for_propagation(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """Return the call for layout propagation; an operator that draws random numbers uses the rule of its replacement.

    Raises RuleError as `describe` does.
    """
    return describe(op, args, kwargs) or describe(op, args, kwargs, random_operator_rule(op, args, kwargs))


def _at(place: ArgumentPosition, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    key, index = place
    value = args[key] if isinstance(key, int) else kwargs[key]
    return value if index is None else value[index]


def _written_in_place(bound: BoundRule) -> BoundRule:
    """Return `bound` without local forms, which make new tensors. Factors that need a local form are whole."""
    if not bound.rule.forms:
        return bound
    formed = frozenset(at for at, name in enumerate(bound.names) if name in bound.rule.forms)
    return replace(bound, rule=replace(bound.rule, forms={}), whole=bound.whole | formed)


def _argument_name(key: int | str, names: Sequence[str]) -> str:
    return names[key] if isinstance(key, int) else key


def _slots(
    op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], count: int
) -> Iterator[tuple[ArgumentPosition | None, Any]]:
    """Yield the first `count` operands of the call: tensor arguments in schema order, else plain numbers."""
    found: list[tuple[ArgumentPosition | None, Any]] = []
    scalars: list[tuple[ArgumentPosition | None, Any]] = []
    for at, argument in enumerate(schema_of(op).arguments):
        key: int | str = at if at < len(args) else argument.name
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        kind = str(argument.type)
        if isinstance(value, (list, tuple)) and "Tensor" in kind:
            found += [((key, j), v) for j, v in enumerate(value)]
        elif "Tensor" in kind:
            found.append(((key, None), value))
        elif kind in _NUMBERS and value is not None:
            scalars.append(((key, None), value))
    missing = count - len(found)
    merged = found + scalars[: max(missing, 0)]
    if missing > 0 and scalars and found and isinstance(scalars[0][0], tuple) and _before(scalars[0][0], found[0][0]):
        merged = scalars[:missing] + found
    merged += [(None, None)] * (count - len(merged))
    return iter(merged[:count])


_NUMBERS = ("number", "Scalar", "Optional[number]", "Optional[Scalar]")


def _scales(
    op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Sequence[ArgumentPosition | None]
) -> list[Any]:
    """Return the numbers of the call that are not operands of its rule: `alpha`, `beta`, `value`."""
    found: list[Any] = []
    for at, argument in enumerate(schema_of(op).arguments):
        key: int | str = at if at < len(args) else argument.name
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        is_number = isinstance(value, (int, float, complex)) and str(argument.type) in (*_NUMBERS, "float")
        if is_number and (key, None) not in operands:
            found.append(value)
    return found


def _before(a: ArgumentPosition | None, b: ArgumentPosition | None) -> bool:
    return a is not None and b is not None and isinstance(a[0], int) and isinstance(b[0], int) and a[0] < b[0]
