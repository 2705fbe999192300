"""Sharding rules: descriptions of operators from which all their shardings are derived.

In reading order:

    notation     rules as text and as data, and the interface of second forms
    forms        second forms: local functions that run instead of an operator if a factor is sharded
    rules        the rules of ATen operators, and the table that holds them
    derivation   the sharding choices of a call, derived from its rule
"""

from ._errors import RuleError
from .derivation.call import Call, Place, describe, describe_passing
from .derivation.pending_sums import keeps_terms
from .derivation.sharding_choices import (
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
from .notation.equation import parse_rule
from .notation.local_call import LocalCall
from .notation.rule import Alternative, Rule
from .rules.rule_table import Entry, drawn_rule, find_rule, is_computed, on_new_rule, register_rule

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
