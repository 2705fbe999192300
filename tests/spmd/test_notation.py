"""The notation of rules: its meaning, the texts that it refuses, and its text form, which parses back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spmd import Rule, RuleError, bind, describe, factor_choices, parse_rule, register_rule
from meshwright.spmd.rules.rule_table import RULES

NAMES = st.sampled_from(["a", "b", "c", "k0", "f1_4"])
DIMS = st.one_of(
    NAMES,
    NAMES.map(lambda n: f"{n}!"),
    st.just("1"),
    st.lists(NAMES, min_size=2, max_size=3, unique=True).map(lambda ns: f"({' '.join(ns)})"),
)
OPERANDS = st.tuples(st.booleans(), st.lists(DIMS, min_size=1, max_size=3)).map(
    lambda t: " ".join([*(["..."] if t[0] else []), *t[1]])
)
PRODUCTS = st.lists(OPERANDS, min_size=1, max_size=3)


@st.composite
def rules(draw: st.DrawFn) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """Draw a rule's text, and the operands of each of its products."""
    sides = draw(st.lists(PRODUCTS, min_size=1, max_size=3))
    count, products = 0, []
    for side in sides:
        products.append(tuple(range(count, count + len(side))))
        count += len(side)
    left = " + ".join(" * ".join(side) for side in sides)
    known = [n.strip("()!") for n in left.replace("+", " ").replace("*", " ").split() if n.strip("()!").isidentifier()]
    right = " ".join(draw(st.lists(st.sampled_from(known), max_size=2))) if known else ""
    comma = draw(st.booleans())
    return f"{left}{',' if comma else ''} -> {right}", () if comma else tuple(products)


@given(rules())
def test_a_rule_prints_and_parses_back(rule: tuple[str, tuple[tuple[int, ...], ...]]) -> None:
    text, products = rule
    equation = parse_rule(text)
    assert equation.products == products
    again = parse_rule(repr(equation))
    assert (again.operands, again.results) == (equation.operands, equation.results)


@pytest.mark.parametrize("text", ["a b", "a -> b", "a -> a -> a", "(a -> a", "a-b -> a", "a + -> a"])
def test_invalid_rules_are_refused(text: str) -> None:
    with pytest.raises(RuleError):
        parse_rule(text)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuleError, match="factor k is 3 in one operand and 4 in another"):
        bind(Rule("m k * k n -> m n"), [(2, 3), (4, 5)])
    with pytest.raises(RuleError, match="number of dims"):
        bind(Rule("m k * k n -> m n"), [(2, 3, 4), (4, 5)])


def test_a_bias_is_pending_if_the_contraction_is_sharded() -> None:
    bound = bind(Rule("... k * n k + n -> ... n"), [(4, 8), (6, 8), (6,)])
    (choice,) = factor_choices(bound, bound.names.index("k"))
    assert (choice.ins[2], choice.outs) == ("sum", ("sum",))


def test_an_added_number_makes_the_rule_nonlinear() -> None:
    call = describe(torch.ops.aten.add.Tensor, [torch.empty(4, 5, device="meta"), 1], {})
    assert call is not None
    assert call.bound.products == ()


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("mm", [(4, 5), (5, 6)], 2 * 4 * 5 * 6),
        ("bmm", [(3, 4, 5), (3, 5, 6)], 2 * 3 * 4 * 5 * 6),
        ("linear", [(2, 4, 5), (6, 5)], 2 * 2 * 4 * 5 * 6),
        ("matmul", [(2, 4, 5), (5, 6)], 2 * 2 * 4 * 5 * 6),
        ("relu", [(4, 5)], 20),
        ("add", [(4, 5), (5,)], 20),
        ("sum", [(4, 5)], 20),
    ],
)
def test_flops_follow_from_the_rule(name: str, shapes: list[tuple[int, ...]], flops: int) -> None:
    packet = getattr(torch.ops.aten, name)
    op = packet.default if "default" in packet.overloads() else packet.Tensor
    call = describe(op, [torch.empty(s, device="meta") for s in shapes], {})
    assert call is not None
    assert call.bound.flops == flops


def test_a_user_defined_operator_has_a_rule_in_one_line() -> None:
    with torch.library._scoped_library("meshwright_test", "DEF") as library:
        library.define("swiglu(Tensor x, Tensor y) -> Tensor")
        register_rule("meshwright_test.swiglu", "..., ... -> ...")
        x = torch.empty(4, 5, device="meta")
        call = describe(torch.ops.meshwright_test.swiglu.default, [x, x], {})
        assert call is not None
        assert call.rule.text == "..., ... -> ..."
        del RULES["meshwright_test.swiglu"]
