"""Table of rules: ATen operator → rule, or a function of the call's arguments that returns a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..forms.empty_tensors import guard_against_empty
from ..notation.rule import Entry, Rule
from ..torch_hooks import Operator, overload_of, schema_of
from .convolutions import CONV
from .indexing import INDEX
from .joins import JOIN
from .layers import LAYERS, RANDOM_RULES
from .linalg import FOURIER, LINALG
from .losses import LOSSES
from .new_tensors import FRESH
from .pointwise import POINTWISE
from .products import PRODUCT
from .quantized import QUANTIZED
from .recurrent import RECURRENT
from .reductions import REDUCE
from .registration_check import check_registration
from .shapes import SHAPE

_TABLES = (
    POINTWISE,
    PRODUCT,
    SHAPE,
    JOIN,
    REDUCE,
    LAYERS,
    RECURRENT,
    LOSSES,
    FRESH,
    INDEX,
    LINALG,
    FOURIER,
    CONV,
    QUANTIZED,
)

RULES: dict[str, Entry] = {name: entry for table in _TABLES for name, entry in table.items()}
"""Operator name without overload ("aten.add") or with it ("aten.max.dim", looked up first) → entry."""

GUARDED = frozenset(n for table in (PRODUCT, REDUCE, LAYERS, RECURRENT, FOURIER, CONV, QUANTIZED) for n in table) - {
    "aten.all",
    "aten._is_all_true",
    "aten.histc",
    "aten.rms_norm",
} | {"aten.linalg_householder_product"}
"""Operators whose kernels refuse empty tensors, or have other derivatives for them; they run on zeros instead.

RMS norm is not included, since it is not finite for zeros if its epsilon is negative."""

RESHAPED_IN_PLACE = {f"aten::{name}_" for name in ("squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims")}
"""In-place operators that change the shape of their operand. They have no rule, since the old shape is lost."""


def find_rule(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule | None:
    """Return the rule of `op` for these arguments; an in-place operator `add_` has the rule of `add`.

    An overload with `out=` has none: a rule says nothing about the tensors that only receive results.
    """
    name, entry = ("", None) if _has_targets(op) else _entry(op, RULES)
    rule = _for(entry, args, kwargs)
    if rule is None or rule.guard is not None or name not in GUARDED or _aliases(op):
        return rule
    return replace(rule, guard=guard_against_empty(op, rule.text))


def random_operator_rule(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule | None:
    """Return the rule for layout propagation of a random operator, which does not run by a rule of its own; or None."""
    return _for(_entry(op, RANDOM_RULES)[1], args, kwargs)


def _for(entry: Entry | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule | None:
    found = entry(*args, **kwargs) if callable(entry) else entry
    return Rule(found) if isinstance(found, str) else found


def _aliases(op: Operator) -> bool:
    """True if the operator writes to an operand, or returns views of it."""
    return any(a.alias_info is not None for a in schema_of(op).arguments)


def _has_targets(op: Operator) -> bool:
    """True for an operator with keyword arguments that it only writes to."""
    return any(a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in schema_of(op).arguments)


def _entry(op: Operator, table: Mapping[str, Entry]) -> tuple[str, Entry | None]:
    """Return the name of the operator's entry and the entry; "" and None if there is none."""
    if schema_of(op).name in RESHAPED_IN_PLACE:
        return "", None
    name, overload = schema_of(op).name.replace("::", "."), overload_of(op)
    for candidate in (name, name.removesuffix("_") if not name.endswith("__") else name):
        for known in (f"{candidate}.{overload}", candidate):
            if known in table:
                return known, table[known]
    return "", None


def register_rule(name: str, entry: Entry) -> None:
    """Set the rule of the operator `name` ("mylib.swiglu"), such as `"..., ... -> ..."`.

    Raises:
        RuleError: the text is no rule, there is no such operator, or the rule does not fit it.
    """
    check_registration(name, entry)
    RULES[name] = entry
    for forget in registration_callbacks:
        forget()


registration_callbacks: list[Callable[[], None]] = []
"""Callbacks for the registration of a rule; they clear caches of plans that were made by the old rules."""


def depends_on_arguments(op: Operator) -> bool:
    """True if the rule of `op` is a function of the call's arguments, so that it may depend on their values."""
    name, entry = _entry(op, RULES)
    return callable(entry) and name not in INDEPENDENT_OF_FLOATS


INDEPENDENT_OF_FLOATS = {
    *("aten.layer_norm", "aten.rms_norm", "aten.group_norm", "aten.batch_norm"),
    *("aten.div", "aten.divide", "aten.true_divide", "aten.clamp", "aten.clamp_min", "aten.clamp_max", "aten.clip"),
}
"""Operators whose rules are functions of arguments, but not of floats such as epsilons, bounds and divisors."""
