"""Sharding rules: descriptions of operators from which all their shardings are derived.

In reading order:

    notation     rules as text and as data, and the interface of local forms
    forms        local forms: local functions that run instead of an operator if a factor is sharded
    rules        the rules of ATen operators, and the table that holds them
    derivation   the sharding choices of a call, derived from its rule
"""

from ._errors import RuleError
from .derivation.call import ArgumentPosition, OperatorCall, describe, describe_for_propagation
from .derivation.pending_sums import is_exact_factor
from .derivation.sharding_choices import (
    OTHER_SHARDING,
    REPLICATED,
    AxisState,
    BoundRule,
    Choice,
    allows_pending_sums,
    bind,
    choices,
    factor_axes,
    factor_choices,
    layout_dim,
    pending_sum_choices,
    split_sharded_products,
)
from .forms.document_attention import document_attention_of_one_device
from .notation.equation import parse_rule
from .notation.local_call import LocalCall
from .notation.rule import Alternative, Rule
from .rules.rule_table import (
    Entry,
    depends_on_arguments,
    find_rule,
    random_operator_rule,
    register_rule,
    registration_callbacks,
)

__all__ = [
    "OTHER_SHARDING",
    "REPLICATED",
    "Alternative",
    "ArgumentPosition",
    "AxisState",
    "BoundRule",
    "Choice",
    "Entry",
    "LocalCall",
    "OperatorCall",
    "Rule",
    "RuleError",
    "allows_pending_sums",
    "bind",
    "choices",
    "depends_on_arguments",
    "describe",
    "describe_for_propagation",
    "document_attention_of_one_device",
    "factor_axes",
    "factor_choices",
    "find_rule",
    "is_exact_factor",
    "layout_dim",
    "parse_rule",
    "pending_sum_choices",
    "random_operator_rule",
    "register_rule",
    "registration_callbacks",
    "split_sharded_products",
]
