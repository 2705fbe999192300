"""Registered rules: the project's own table passes the checks, and a rule that cannot fit its operator is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from meshwright.spmd import Rule, RuleError, register_rule
from meshwright.spmd.rules.registration_check import check_registration
from meshwright.spmd.rules.rule_table import RULES


@contextmanager
def registered(name: str, entry: Any) -> Iterator[None]:
    """Register a rule, and take it back at the end."""
    before = RULES.get(name)
    register_rule(name, entry)
    yield
    if before is None:
        del RULES[name]
    else:
        RULES[name] = before


def exists(name: str) -> bool:
    """True if torch has the operator, which depends on its version."""
    namespace, operator, *_ = name.split(".")
    return hasattr(getattr(torch.ops, namespace), operator)


def test_every_rule_of_the_table_fits_its_operator() -> None:
    known = [name for name in RULES if exists(name)]
    for name in known:
        check_registration(name, RULES[name])
    assert len(known) > 570


@pytest.mark.parametrize(
    ("name", "entry", "said"),
    [
        ("aten.nothing", "a -> a", "no operator torch.ops.aten.nothing"),
        ("mylib.nothing", "a -> a", "no operator torch.ops.mylib.nothing"),
        ("aten.max.nothing", "a -> a", "no operator torch.ops.aten.max.nothing"),
        ("relu", "a -> a", 'as in "mylib.swiglu"'),
        ("aten::relu", "a -> a", 'as in "mylib.swiglu"'),
        (5, "a -> a", 'as in "mylib.swiglu"'),
        ("aten.relu", 3, "found: a int"),
        ("aten.relu", "a, a -> a", "2 operands and 1 results"),
        ("aten.relu", "a -> a; a", "1 operands and 2 results"),
        ("aten.max.dim", "a b -> a", "1 operands and 1 results"),
        ("aten.relu", Rule("a -> a", forms={"b": lambda call, x: x}), "a form for 'b'"),
        ("aten.relu", Rule("a -> a", stays=frozenset("c")), "the factors of the rule are a"),
        ("aten.relu", "a ( b -> a", r"(a b)"),
    ],
)
def test_a_rule_that_cannot_fit_is_refused_and_changes_nothing(name: Any, entry: Any, said: str) -> None:
    before = dict(RULES)
    with pytest.raises(RuleError) as error:
        register_rule(name, entry)
    assert said in str(error.value)
    assert before == RULES


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("aten.relu", "... -> ..."),
        ("aten.cat", "a, a, a -> a"),
        ("aten.max.dim", "... n! -> ...; ..."),
        ("aten.mul.Scalar", "... * ... -> ..."),
        ("aten.relu", Rule("... -> ...", forms={"...1": lambda call, x: x})),
    ],
)
def test_a_rule_that_can_fit_is_accepted(name: str, entry: Any) -> None:
    with registered(name, entry):
        assert RULES[name] == entry


def test_an_operator_that_returns_nothing_has_a_rule() -> None:
    with torch.library._scoped_library("meshwright_test", "DEF") as library:
        library.define("scale_(Tensor(a!) x, float s) -> ()")
        with registered("meshwright_test.scale_", "... -> ..."):
            assert RULES["meshwright_test.scale_"] == "... -> ..."
