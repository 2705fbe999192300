"""A call of an ATen operator, described by its rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from meshwright.layout import TorchValue

from ..notation.rule import Rule
from ..rules.rule_table import find_rule, random_operator_rule
from ..torch_hooks import Operator, schema_of
from .pending_sums import Number, Operand, is_finite, pending_operands
from .sharding_choices import BoundRule, bind

ArgumentPosition = tuple[int | str, int | None]
"""Place of an operand: position or name of the argument, and the index in the argument if it is a list."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator call with a rule: the rule bound to the shapes, and the places of the operands.

    `places[i]` is the place of operand i of the rule; None for an absent operand or a plain number. `mutated` lists the
    operands that are written to.
    """

    rule: Rule
    bound: BoundRule
    places: tuple[ArgumentPosition | None, ...]
    mutated: tuple[int, ...]

    def operands(self, args: Sequence[TorchValue], kwargs: Mapping[str, TorchValue]) -> list[TorchValue]:
        """Return the operands among the arguments of such a call; None for an absent operand or a plain number."""
        return [None if place is None else _argument_at(place, args, kwargs) for place in self.places]


def describe(
    op: Operator,
    args: Sequence[TorchValue],
    kwargs: Mapping[str, TorchValue],
    alternative: Rule | None = None,
    ones: bool = False,
) -> OperatorCall | None:
    """Return the call `op(*args, **kwargs)` bound to its rule or to `alternative`; None if there is no rule.

    Arguments are global tensors. They may be on the meta device, since only their shapes and dtypes are read. With
    `ones`, dims of size one have factors as well, unless they are broadcast.

    Raises:
        RuleError: the shapes do not fit the rule; the operator would not accept them either.
    """
    rule = alternative or find_rule(op, args, kwargs)
    if rule is None:
        return None
    slots = list(_operand_slots(op, args, kwargs, len(rule.equation.operands)))
    scales = _other_numbers(op, args, kwargs, [place for place, _ in slots])
    bound = _bound_to_values(rule, [value for _, value in slots], scales, ones)
    places = tuple(place if isinstance(value, Tensor) else None for place, value in slots)
    mutated = _mutated_operands(op, places)
    bound = _written_in_place(bound) if mutated else bound
    return OperatorCall(bound.rule, bound, places, mutated)


def _bound_to_values(rule: Rule, values: Sequence[Operand], scales: Sequence[complex], ones: bool) -> BoundRule:
    """Return the rule bound to operands, for a call with the other numbers `scales`."""
    shapes = [tuple(v.shape) if isinstance(v, Tensor) else None for v in values]
    numbers = [i for i, v in enumerate(values) if isinstance(v, Number) and v != 0]
    bound = bind(rule, shapes, numbers, pending_operands(rule.equation, values, scales), ones)
    return bound if all(map(is_finite, scales)) else replace(bound, products=())


def _mutated_operands(op: Operator, places: Sequence[ArgumentPosition | None]) -> tuple[int, ...]:
    """Return the indices of the operands that the call writes to."""
    written: set[int | str] = set()
    for at, argument in enumerate(schema_of(op).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {at, argument.name}
    return tuple(i for i, place in enumerate(places) if place is not None and place[0] in written)


def describe_for_propagation(
    op: Operator, args: Sequence[TorchValue], kwargs: Mapping[str, TorchValue]
) -> OperatorCall | None:
    """Return the call for layout propagation; an operator that draws random numbers uses the rule of its replacement.

    Raises RuleError as `describe` does.
    """
    return describe(op, args, kwargs) or describe(op, args, kwargs, random_operator_rule(op, args, kwargs))


def _argument_at(place: ArgumentPosition, args: Sequence[TorchValue], kwargs: Mapping[str, TorchValue]) -> TorchValue:
    key, index = place
    value = args[key] if isinstance(key, int) else kwargs[key]
    return value if index is None else value[index]


def _written_in_place(bound: BoundRule) -> BoundRule:
    """Return `bound` without local forms, which make new tensors. Factors that need a local form are whole."""
    if not bound.rule.forms:
        return bound
    formed = frozenset(at for at, name in enumerate(bound.names) if name in bound.rule.forms)
    return replace(bound, rule=replace(bound.rule, forms={}), whole=bound.whole | formed)


def _arguments(
    op: Operator, args: Sequence[TorchValue], kwargs: Mapping[str, TorchValue]
) -> Iterator[tuple[int | str, str, TorchValue]]:
    """Yield the position or name, the type in the schema, and the value of each argument; None if it is not given."""
    for at, argument in enumerate(schema_of(op).arguments):
        kind = str(argument.type)
        if at < len(args):
            yield at, kind, args[at]
        else:
            yield argument.name, kind, kwargs.get(argument.name)


def _operand_slots(
    op: Operator, args: Sequence[TorchValue], kwargs: Mapping[str, TorchValue], count: int
) -> Iterator[tuple[ArgumentPosition | None, TorchValue]]:
    """Yield the first `count` operands of the call: tensor arguments in schema order, else plain numbers."""
    found: list[tuple[ArgumentPosition | None, TorchValue]] = []
    scalars: list[tuple[ArgumentPosition | None, TorchValue]] = []
    for key, kind, value in _arguments(op, args, kwargs):
        if isinstance(value, (list, tuple)) and "Tensor" in kind:
            found += [((key, j), v) for j, v in enumerate(value)]
        elif "Tensor" in kind:
            found.append(((key, None), value))
        elif kind in _NUMBERS and value is not None:
            scalars.append(((key, None), value))
    missing = count - len(found)
    merged = found + scalars[: max(missing, 0)]
    if (
        missing > 0
        and scalars
        and found
        and isinstance(scalars[0][0], tuple)
        and _comes_before(scalars[0][0], found[0][0])
    ):
        merged = scalars[:missing] + found
    merged += [(None, None)] * (count - len(merged))
    return iter(merged[:count])


_NUMBERS = ("number", "Scalar", "Optional[number]", "Optional[Scalar]")


def _other_numbers(
    op: Operator,
    args: Sequence[TorchValue],
    kwargs: Mapping[str, TorchValue],
    operands: Sequence[ArgumentPosition | None],
) -> list[complex]:
    """Return the numbers of the call that are not operands of its rule: `alpha`, `beta`, `value`."""
    return [
        value
        for key, kind, value in _arguments(op, args, kwargs)
        if isinstance(value, Number) and kind in (*_NUMBERS, "float") and (key, None) not in operands
    ]


def _comes_before(a: ArgumentPosition | None, b: ArgumentPosition | None) -> bool:
    return a is not None and b is not None and isinstance(a[0], int) and isinstance(b[0], int) and a[0] < b[0]
