"""Sharding rules: descriptions of operators from which all their shardings are derived."""

from ._call import Call, Place, describe, describe_passing
from ._derive import (
    ELSEWHERE,
    REPEATED,
    Bound,
    Choice,
    Held,
    bind,
    choices,
    cut_choices,
    dim_of,
    factor_axes,
    factors_split,
    lets_terms_pass,
    refined,
    term_choices,
)
from ._errors import RuleError
from ._forms import LocalCall
from ._notation import parse_rule
from ._rule import Alternative, Rule
from ._table import Entry, drawn_rule, find_rule, is_computed, on_new_rule, register_rule
from ._terms import keeps_terms

__all__ = [
    "ELSEWHERE",
    "REPEATED",
    "Alternative",
    "Bound",
    "Call",
    "Choice",
    "Entry",
    "Held",
    "LocalCall",
    "Place",
    "Rule",
    "RuleError",
    "bind",
    "choices",
    "cut_choices",
    "describe",
    "describe_passing",
    "dim_of",
    "drawn_rule",
    "factor_axes",
    "factors_split",
    "find_rule",
    "is_computed",
    "keeps_terms",
    "lets_terms_pass",
    "on_new_rule",
    "parse_rule",
    "refined",
    "register_rule",
    "term_choices",
]
