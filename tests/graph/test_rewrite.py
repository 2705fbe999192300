"""Rewrite rules: the patterns that they find or ignore, their replacements, and their termination."""

# ruff: noqa: B002, PLW0108 - both sides of a rule name their arguments; signs are the simplest operators
from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.graph import (
    Conversion,
    Draft,
    Edit,
    Input,
    Node,
    Origin,
    OwnRules,
    Pass,
    Program,
    Rewrite,
    RewriteError,
    Rewriter,
    Spot,
    Value,
    apply_passes,
    capture,
    check_rule,
    count_ops,
    register_pass,
    register_rewrite,
    registered_passes,
    rewrite,
    runner,
    verify,
)
from meshwright.layout import ProcessMesh, parse_spec
from meshwright.reshard import AllGather, AllReduce, ConversionStep, ReduceScatter

aten = torch.ops.aten
X, Y = torch.randn(4, 6), torch.randn(4, 6)


def program(fn: Callable[..., Any], *given: Tensor) -> Program:
    return capture(torch.nn.Identity(), fn, given or (X, Y)).program


def ops(p: Program) -> str:
    """Return the operators of a program by their short names, in order."""
    return " ".join(str(n.op).removeprefix("aten.").split(".")[0] for n in p.nodes)


def rewritten(fn: Callable[..., Any], *rules: Rewrite | Rewriter, given: tuple[Tensor, ...] = (X, Y)) -> str:
    """Return the operators after the rules; check that the numbers are unchanged."""
    before = program(fn, *given)
    after = verify(rewrite(before, rules), deep=True)
    torch.testing.assert_close(runner(after)(*given)[0], runner(before)(*given)[0])
    return ops(after)


FMA = Rewrite("addcmul", lambda a, x, y: a + x * y, lambda a, x, y: torch.addcmul(a, x, y))
SILU = Rewrite("silu", lambda x: x * torch.sigmoid(x), lambda x: F.silu(x))
SCALED = Rewrite("scaled", lambda x, s=2.0: torch.relu(x) * s, lambda x, s=2.0: torch.relu(x * s) if s > 0 else -x)


# patterns


def test_operands_of_sums_and_products_come_in_any_order() -> None:
    for fn in (lambda x, y: x + x * y, lambda x, y: y * x + x, lambda x, y: (y * x).add(x)):
        assert rewritten(fn, FMA) == "addcmul"
    assert rewritten(lambda x, y: x - x * y, FMA) == "mul sub"


def test_a_name_in_a_pattern_matches_one_value() -> None:
    rule = Rewrite("gate", lambda x: torch.tanh(x) * torch.sigmoid(x), lambda x: x)
    assert ops(rewrite(program(lambda x, y: torch.tanh(x) * torch.sigmoid(x)), [rule])) == ""
    assert ops(rewrite(program(lambda x, y: torch.tanh(x) * torch.sigmoid(y)), [rule])) == "tanh sigmoid mul"
    # ... or for two with the same computation
    same = program(lambda x, y: torch.tanh(x + y) * torch.sigmoid(x + y))
    assert ops(rewrite(same, [rule])) == "add"


def test_constants_with_a_name_are_found() -> None:
    rule = Rewrite("clamp", lambda x, low=0.0: torch.relu(x - low), lambda x, low=0.0: x.clamp(min=low) - low)
    after = rewrite(program(lambda x, y: torch.relu(x - 3.5)), [rule])
    assert after.nodes[0].args[1] == 3.5
    whole = Rewrite("by dim", lambda x, dim=-1: x.exp() / x.exp().sum(dim, True), lambda x, dim=-1: x.softmax(dim))
    assert rewritten(lambda x, y: x.exp() / x.exp().sum(0, True), whole) == "softmax"
    assert rewritten(lambda x, y: x.exp() / y.exp().sum(0, True), whole) == "exp exp sum div"


def test_constants_without_a_name_are_those_of_the_rule() -> None:
    rule = Rewrite("double", lambda x: x * 2.0, lambda x: x + x)
    assert rewritten(lambda x, y: x * 2, rule) == "add"
    assert rewritten(lambda x, y: x * 2.5, rule) == "mul"
    assert rewritten(lambda x, y: x / 0.5, rule) == "add"


def test_constants_that_follow_from_shapes_are_computed_again() -> None:
    rule = Rewrite("scale", lambda x: x * x.shape[-1] ** -0.5, lambda x: x / math.sqrt(x.shape[-1]), "... d")
    assert rewritten(lambda x, y: x * 6**-0.5, rule) == "div"
    assert rewritten(lambda x, y: x * 8**-0.5, rule) == "mul"
    flat = Rewrite("flat", lambda x: x.reshape(x.shape[0], -1).relu(), lambda x: x.relu().flatten(1), "n a b")
    cube = torch.randn(2, 3, 4)
    assert rewritten(lambda x: x.reshape(2, -1).relu(), flat, given=(cube,)) == "relu flatten"
    assert rewritten(lambda x: x.reshape(3, -1).relu(), flat, given=(cube,)) == "reshape relu"


def test_dims_count_from_both_ends() -> None:
    rule = Rewrite("sum", lambda x: x.square().sum(-1, keepdim=True), lambda x: x.norm(dim=-1, keepdim=True).square())
    assert "norm" in rewritten(lambda x, y: x.pow(2).sum(1, keepdim=True), rule)
    assert "norm" not in rewritten(lambda x, y: x.pow(2).sum(0, keepdim=True), rule)


def test_a_tensor_may_be_left_out() -> None:
    def find(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = x @ w.t()
        return torch.relu(y if b is None else y + b)

    rule = Rewrite("layer", find, lambda x, w, b=None: torch.relu(F.linear(x, w, b)), "... k, n k, n")
    w, b = torch.randn(5, 6), torch.randn(5)
    assert rewritten(lambda x, w: torch.relu(x @ w.t()), rule, given=(X, w)) == "linear relu"
    assert rewritten(lambda x, w, b: torch.relu(b + x @ w.t()), rule, given=(X, w, b)) == "linear relu"
    assert rewritten(lambda x, w, b: torch.relu(x @ w.t() + b), rule, given=(X, w, torch.randn(4, 5))) == (
        "t matmul add relu"
    )


Kind = Literal["relu", "tanh"]


def test_all_alternatives_of_a_choice_are_tried() -> None:
    def find(x: Tensor, kind: Kind, twice: bool) -> Tensor:
        y = getattr(torch, kind)(x)
        return y + y if twice else y.neg()

    rule = Rewrite("choice", find, lambda x, kind, twice: getattr(torch, kind)(x) * (2 if twice else -1))
    assert len(rule.patterns) == 4
    assert rewritten(lambda x, y: -torch.tanh(x), rule) == "tanh mul"
    assert rewritten(lambda x, y: torch.relu(x) + torch.relu(x), rule) == "relu mul"
    assert check_rule(rule) == 24


def test_dtypes_may_have_a_name() -> None:
    rule = Rewrite(
        "there and back",
        lambda x, dtype: x.to(dtype).to(x.dtype),
        lambda x, dtype: x,
        samples={"dtype": (torch.float64, torch.float16)},
        where=lambda x, dtype: dtype.itemsize > x.dtype.itemsize,
    )
    assert rewritten(lambda x, y: x.double().float() + y, rule) == "add"
    assert rewritten(lambda x, y: x.half().float() + y, rule) == "to to add"


def test_casts_keep_their_meaning() -> None:
    norm = Rewrite("unit", lambda x: (x.float() / x.float().sum()).to(x.dtype), lambda x: x / x.sum(), where=_is_float)

    def written(x: Tensor, y: Tensor) -> Tensor:
        z = x - y
        return z.float() / z.float().sum()

    assert rewritten(written, norm) == "sub sum div"
    half = X.to(torch.bfloat16)
    again = rewrite(program(lambda x: (x / x.sum()).to(x.dtype), half), [norm])
    assert ops(again) == "sum div", "a cast to the same dtype is no operator, and a rule that casts is not for that"


def _is_float(x: Any) -> bool:
    return x.dtype == torch.float32


SPELLINGS: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (lambda x: x.square(), lambda x: x * x),
    (lambda x: x.square(), lambda x: x**2),
    (lambda x: torch.rsqrt(x), lambda x: 1 / torch.sqrt(x)),
    (lambda x: torch.rsqrt(x), lambda x: torch.sqrt(1 / x)),
    (lambda x: torch.rsqrt(x), lambda x: x**-0.5),
    (lambda x: x * torch.rsqrt(x + 1), lambda x: x / torch.sqrt(x + 1)),
    (lambda x: x / 4, lambda x: 0.25 * x),
    (lambda x: x.mean(-1), lambda x: x.sum(-1) / 6),
    (lambda x: x.mean((0, 1)), lambda x: x.sum((1, 0)) * (1 / 24)),
    (lambda x: x.mT, lambda x: x.transpose(0, 1)),
    (lambda x: x.mT, lambda x: x.permute(1, 0)),
    (lambda x: x.mT, lambda x: x.swapaxes(-1, -2)),
    (lambda x: x.mT, lambda x: x.T),
    (lambda x: x @ x.mT, lambda x: F.linear(x, x)),
    (lambda x: x @ x.mT, lambda x: torch.mm(x, x.t())),
    (lambda x: F.silu(x), lambda x: x * x.sigmoid()),
    (lambda x: F.log_softmax(x, -1), lambda x: torch.log(torch.softmax(x, 1))),
    (lambda x: (x - x.mean(-1, True)).square().mean(-1), lambda x: x.var(-1, unbiased=False)),
    (lambda x: (x - x.mean(-1, True)).square().mean(-1), lambda x: torch.var(x, 1, correction=0)),
    (lambda x: x.masked_fill(~(x > 0), 0.0), lambda x: torch.where(x > 0, x, 0.0)),
    (lambda x: x.softmax(-1), lambda x: x.softmax(-1, dtype=torch.float32)),
    (lambda x: x + 1, lambda x: F.dropout(x, 0.5, training=False) + 1),
    (lambda x: x + 1, lambda x: (x.float().view(4, 6) * 1).contiguous() + 1),
]


@pytest.mark.parametrize(("rule", "written"), SPELLINGS, ids=range(len(SPELLINGS)))
def test_a_rule_finds_other_spellings(rule: Callable[[Tensor], Tensor], written: Callable[[Tensor], Tensor]) -> None:
    marker = Rewrite("marked", lambda x: torch.cos(rule(x)), lambda x: torch.sin(rule(x)))
    x = torch.rand(4, 6) + 1
    torch.testing.assert_close(rule(x), written(x))
    for fn in (written, rule):
        assert "sin" in ops(rewrite(program(lambda x, fn=fn: torch.cos(fn(x)), x), [marker])), fn


NOT_THE_SAME: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (lambda x: x.square(), lambda x: x * (x + 1)),
    (lambda x: x.mean(-1), lambda x: x.sum(-1) / 5),
    (lambda x: x.mean(-1), lambda x: x.sum(0) / 6),
    (lambda x: x.unsqueeze(0), lambda x: x.unsqueeze(1)),
    (lambda x: x.permute(1, 0), lambda x: x.permute(0, 1)),
    (lambda x: (x - x.mean(-1, True)).square().mean(-1), lambda x: x.var(-1)),
    (lambda x: x.exp() + x, lambda x: F.dropout(x, 0.5).exp() + x),
    (lambda x: x.double(), lambda x: x.half()),
    (lambda x: x.double().float(), lambda x: x.half().float()),
    (lambda x: x.sum(-1, keepdim=True), lambda x: x.sum(-1)),
]


@pytest.mark.parametrize(("rule", "written"), NOT_THE_SAME, ids=range(len(NOT_THE_SAME)))
def test_a_rule_ignores_other_patterns(rule: Callable[[Tensor], Tensor], written: Callable[[Tensor], Tensor]) -> None:
    marker = Rewrite("marked", lambda x: torch.cos(rule(x)), lambda x: torch.sin(rule(x)))
    assert "sin" not in ops(rewrite(program(lambda x: torch.cos(written(x)), X), [marker]))


# reasons against a match


def test_values_read_elsewhere_stay() -> None:
    def twice(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + x * y, x * y

    assert rewritten(twice, FMA) == "addcmul mul"

    def shared(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x * y
        return x + z, z.exp()

    assert rewritten(shared, FMA) == "mul add exp"

    def result(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x * y
        return x + z, z

    assert rewritten(result, FMA) == "mul add"


def test_views_and_casts_may_be_read_elsewhere() -> None:
    rule = Rewrite("product", lambda x, w: x @ w.t(), lambda x, w: F.linear(x, w))

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        turned = y.t()
        return x @ turned, turned.exp()

    assert rewritten(fn, rule) == "t linear exp"


def test_several_results_are_replaced_together() -> None:
    rule = Rewrite(
        "two products",
        lambda x, v, w: (x @ v, x @ w),
        lambda x, v, w: (x @ torch.cat((v, w), -1)).split((v.shape[-1], w.shape[-1]), -1),
        "m k, k n, k o",
    )
    given = (X, torch.randn(6, 3), torch.randn(6, 5))
    assert rewritten(lambda x, v, w: (x @ v).relu().sum() + (x @ w).sum(), rule, given=given) == (
        "cat matmul split_with_sizes relu sum sum add"
    )

    def late(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        first = x @ v
        return first.sum() * (x @ (w * first.sum()))

    # the second needs the first: no position is after the inputs of both and before all their readers
    assert "cat" not in rewritten(late, rule, given=given)


def test_constraints_get_values_and_constants() -> None:
    rule = Rewrite(
        "wide", lambda x, s=2.0: x * s, lambda x, s=2.0: x + x, where=lambda x, s: x.shape[-1] > 5 and s == 2
    )
    assert rewritten(lambda x, y: x * 2, rule) == "add"
    assert rewritten(lambda x, y: x * 3, rule) == "mul"
    assert rewritten(lambda x, y: x[:, :5] * 2, rule) == "slice mul"


def test_nodes_of_different_modes_are_not_combined() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            z = x * y
        return x + z

    assert [n.origin.grad for n in program(fn).nodes] == [False, True]
    assert rewritten(fn, FMA) == "mul add"


def test_autocast_chooses_dtypes() -> None:
    linear = Rewrite("linear", lambda x, w, b: x @ w.mT + b, lambda x, w, b: F.linear(x, w, b), "m k, n k, n")

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ w.mT + b

    given = (X, torch.randn(5, 6), torch.randn(5))
    p = program(fn, *given)
    assert p.nodes[-1].origin.autocast == ("cpu", torch.bfloat16)
    assert ops(rewrite(p, [linear])) == "mT matmul add", "the sum is float32, a linear layer would give bfloat16"


# replacements


def test_new_nodes_have_the_origin_of_the_old_ones() -> None:
    p = program(lambda x, y: x * x.sigmoid())
    there = Origin("forward", "blocks.3.mlp", "model.py:7")
    p = Program(p.inputs, tuple(Node(n.op, n.args, n.kwargs, n.out, there) for n in p.nodes), p.outputs)
    after = rewrite(p, [SILU], by="mine")
    assert [n.origin for n in after.nodes] == [there]
    first, last = after.changes
    assert str(first) == ("mine: silu: 2 operators become aten.silu.default at blocks.3.mlp model.py:7 (1 operators)")
    assert str(last) == "mine: 1 × silu; no rule applies any more"


def test_an_unchanged_program_is_the_same_object() -> None:
    p = program(lambda x, y: x - y)
    assert rewrite(p, [FMA, SILU]) is p


def test_a_replacement_may_be_a_result_or_an_input() -> None:
    rule = Rewrite("there and back", lambda x: -(-x), lambda x: x)
    assert rewritten(lambda x, y: -(-x), rule) == ""
    assert rewritten(lambda x, y: -(-(-x)), rule) == "neg"


def test_an_operand_implied_by_a_pattern_is_computed() -> None:
    rule = Rewrite("hidden", lambda x, m: x.masked_fill(m, 0.0).relu(), lambda x, m: x.relu() * ~m, "..., bool ...")
    assert rewritten(lambda x, y: torch.where(x > 0, y, 0.0).relu(), rule) == "gt bitwise_not relu bitwise_not mul"


# termination


def test_a_rule_may_make_the_program_longer() -> None:
    more = Rewrite("more", lambda x: torch.tanh(x), lambda x: 2 * torch.sigmoid(2 * x) - 1)
    assert rewritten(lambda x, y: torch.tanh(x), more) == "mul sigmoid mul sub"


THERE = Rewrite("there", lambda x: torch.log1p(x), lambda x: torch.log(x + 1))
BACK = Rewrite("back", lambda x: torch.log(x + 1), lambda x: torch.log1p(x))


def test_rules_that_undo_each_other_raise() -> None:
    with pytest.raises(RewriteError, match=r"(there|back) \(\d+ times\).*\n.*undo each other"):
        rewrite(program(lambda x, y: torch.log1p(x)), [THERE, BACK], limit=20)


def test_a_reached_bound_is_reported() -> None:
    swap = Rewrite(
        "equally long", lambda x: torch.log1p(x), lambda x: torch.log(x + 1), where=lambda x: x.shape == (4, 6)
    )
    other = Rewrite("other", lambda x: torch.log(x + 1), lambda x: torch.log1p(x), where=lambda x: x.shape == (1,))
    after = rewrite(program(lambda x, y: torch.log1p(x)), [swap, other])
    assert str(after.changes[-1]).endswith("1 of at most 104 steps did not make the program shorter")


def test_a_rule_whose_replacement_equals_its_pattern_does_nothing() -> None:
    same = Rewrite("same", lambda x, y: x + y, lambda x, y: y + x)
    assert rewritten(lambda x, y: x + y, same) == "add"


def test_rules_of_more_benefit_go_first() -> None:
    small = Rewrite("small", lambda x: torch.sigmoid(x), lambda x: 1 / (1 + torch.exp(-x)))

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    assert "exp" in ops(rewrite(program(fn), [small, SILU]))
    first = Rewrite("silu", SILU.find, SILU.put, benefit=1)
    assert rewritten(fn, small, first) == "silu"


# rewriters


def test_a_rewriter_expresses_more_than_a_rule() -> None:
    def merge(edit: Edit, spot: Spot) -> str | None:
        inner = edit.operands(spot.args[0], aten.pow.Tensor_Scalar)
        if inner is None or edit.producer(spot.args[0]) is None:
            return None
        edit.replace(edit.add(spot.op, inner[0], inner[1] * spot.args[1]))
        return f"a power of {inner[1] * spot.args[1]}"

    powers = Rewriter("powers", merge, on=(aten.pow.Tensor_Scalar,))
    p = program(lambda x, y: ((x**3) ** 3) ** 5)
    after = verify(rewrite(p, [powers]), deep=True)
    assert count_ops(after.nodes) == {"aten.pow.Tensor_Scalar": 1}
    assert after.nodes[0].args[1] == 45
    assert "powers: a power of 9" in str(after.changes[0])
    assert after.changes[-1].what == "2 × powers; no rule applies any more"


def test_a_rewriter_may_use_a_rule_to_match() -> None:
    def note(edit: Edit, spot: Spot) -> str | None:
        match = edit.match(FMA)
        if match is None:
            return None
        edit.replace(edit.add(aten.addcmul.default, match.arguments["a"], match.arguments["x"], match.arguments["y"]))
        return "seen"

    assert rewritten(lambda x, y: x + x * y, Rewriter("looks", note)) == "addcmul"


def test_a_rewriter_knows_constants() -> None:
    seen: list[Any] = []

    def look(edit: Edit, spot: Spot) -> str | None:
        seen.append([edit.known(v) for v in spot.ins])
        return None

    rewrite(program(lambda x, y: x + torch.ones(6, 6).tril()[:4]), [Rewriter("looks", look, on=(aten.add.Tensor,))])
    unknown, known = seen[-1]
    assert unknown is None
    assert torch.equal(known, torch.ones(6, 6).tril()[:4])


TERMS = parse_spec("f32[8, 4] +tp", ProcessMesh([0, 1], ["tp"]))


def with_steps(*steps: ConversionStep) -> Program:
    """Return a program of conversion steps on terms."""
    x = v = Value("x", (8, 4), torch.float32)
    spec, nodes = TERMS, list[Node]()
    for at, step in enumerate(steps):
        out = Value(f"v{at}", step.apply(spec).local_shape(0), torch.float32)
        nodes.append(Node(Conversion(step, spec), (v,), {}, out))
        spec, v = step.apply(spec), out
    return Program((Input(x, "batch", "x", TERMS),), tuple(nodes), v)


def test_a_rewriter_replaces_steps_of_conversions() -> None:
    def reduce(edit: Edit, spot: Spot) -> str | None:
        inner = edit.producer(spot.ins[0])
        if inner is None or not isinstance(inner.op, Conversion) or not isinstance(inner.op.step, ReduceScatter):
            return None
        step = inner.op.step
        edit.replace(edit.add(Conversion(AllReduce(step.axes, step.op), inner.op.src), inner.ins[0]))
        return "one all-reduce"

    rule = Rewriter("gather after scatter", reduce, on=(AllGather,))
    scatter, gather = ReduceScatter(("tp",), (("tp", 0),)), AllGather((("tp", 0),))
    after = verify(rewrite(with_steps(scatter, gather), [rule]), deep=True)
    assert [repr(n.op) for n in after.nodes] == ["AllReduce(tp)"]
    assert [repr(n.op) for n in rewrite(with_steps(scatter), [rule]).nodes] == ["ReduceScatter(tp, dim 0)"]


# the numerical test of a rule


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (Rewrite("values", lambda x: x.exp(), lambda x: x.exp() * 1.01), "result 0"),
        (Rewrite("gradient", lambda x: x * x, lambda x: x * x.detach() * 1), "the gradient of x"),
        (Rewrite("no gradient", lambda x: x + 1, lambda x: x.detach() + 1), "only one side"),
        (Rewrite("dtype", lambda x: x.float(), lambda x: x), "float32"),
        (Rewrite("digits", lambda x: (x + x).exp(), lambda x: (x.half() * 2).to(x.dtype).exp()), "explains only"),
        (Rewrite("never", lambda x: -x, lambda x: -x, where=lambda x: False), "refuses every sample"),
        (Rewrite("one", lambda x: x * 1.0, lambda x: x), r"no match in a program of find's own calls: aten.mul.Tensor"),
        (Rewrite("inner one", lambda x: (x / 1.0).exp(), lambda x: x.exp()), "change nothing"),
        (Rewrite("unused", lambda x, y: -x, lambda x, y: -x), "find does not use y"),
    ],
    ids=lambda v: v.name if isinstance(v, Rewrite) else "",
)
def test_a_wrong_rule_is_found(rule: Rewrite, found: str) -> None:
    with pytest.raises(RewriteError, match=found):
        check_rule(rule)


@pytest.mark.parametrize("rule", [FMA, SILU, THERE, BACK], ids=lambda rule: rule.name)
def test_a_right_rule_passes(rule: Rewrite) -> None:
    assert check_rule(rule) == 6


@pytest.mark.parametrize(
    "rule",
    [
        Rewrite("factor", lambda x, s=1.0: (x * s).exp(), lambda x, s=1.0: torch.exp(s * x)),
        Rewrite("shape", lambda x: x.reshape(-1, 4).exp(), lambda x: x.exp().reshape(-1, 4)),
        Rewrite(
            "known", lambda x, m: x + m, lambda x, m: x - -m, where=lambda m, match: match is None or match.known(m)
        ),
    ],
    ids=lambda rule: rule.name,
)
def test_a_rule_that_matches_only_some_samples_passes(rule: Rewrite) -> None:
    assert check_rule(rule)


# mistakes in rules

MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: Rewrite("r", lambda x: x, lambda y: y), r"def put\(x\)"),
    (lambda: Rewrite("r", lambda x, y: -x, lambda x, y: x).patterns, "find does not use y"),
    (lambda: Rewrite("r", lambda x: x, lambda x: x).patterns, "an operator must make"),
    (lambda: Rewrite("r", lambda x, s="a": x, lambda x, s="a": x).patterns, "samples="),
    (lambda: Rewrite("r", lambda x: -x, lambda x: x, "n, n").patterns, "one entry per tensor"),
    (lambda: Rewrite("r", lambda x: x.relu_(), lambda x: x).patterns, "aten.relu.default"),
    (lambda: Rewrite("r", lambda x, s=1.0: -x if s == 1 else x.exp() * s, lambda x, s=1.0: x).patterns, "Literal"),
    (lambda: Rewrite("r", lambda x: x + torch.tensor([1.0]), lambda x: x).patterns, "no operator computed"),
    (lambda: rewrite(program(lambda x, y: -x), [Rewrite("r", lambda x: -x, lambda x: x.double())]), "f64"),
    (lambda: rewrite(program(lambda x, y: -x), [Rewrite("r", lambda x: -x, lambda x: (x, x))]), "find returns 1"),
    (lambda: rewrite(program(lambda x, y: -x), [Rewrite("r", lambda x: -x, lambda x: x @ x)]), "put raises"),
]


@pytest.mark.parametrize(("act", "said"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_give_an_error_of_four_parts(act: Callable[[], Any], said: str) -> None:
    with pytest.raises(RewriteError, match=said) as caught:
        act()
    error = copy.copy(caught.value)
    assert all((error.asked, error.found, error.why, error.write))


# passes


@dataclass(frozen=True)
class Doubles(Pass):
    """A rewrite of every sum of a value with itself into a product."""

    name: ClassVar[str] = "doubles"
    factor: float = 2.0

    def run(self, program: Program) -> Program:
        return rewrite(program, [Rewrite("double", lambda x: x + x, lambda x: x * self.factor)], by=self.name)


def test_a_pass_is_a_value() -> None:
    assert Doubles() == Doubles(2.0) != Doubles(3.0)
    assert repr(Doubles()) == "Doubles(factor=2.0)"
    p = program(lambda x, y: (x + x, y + y))
    after = apply_passes(p, [Doubles(), Doubles()], deep=True)
    assert [c.what.split(":")[0] for c in after.changes] == [
        "double",
        "double",
        "2 × double; no rule applies any more; 2 of at most 108 steps did not make the program shorter",
    ]
    assert Doubles()(after) is after


@dataclass(frozen=True)
class Breaks(Pass):
    """A pass that returns another program."""

    name: ClassVar[str] = "breaks"

    def run(self, program: Program) -> Program:
        return Program(program.inputs, program.nodes[:-1], program.nodes[0].out)


def test_a_pass_must_keep_the_results_of_the_program() -> None:
    with pytest.raises(RewriteError, match=r"Breaks\(\)"):
        Breaks()(program(lambda x, y: (x + y).sum()))


def test_rules_and_passes_are_registered_in_a_line() -> None:
    register_rewrite(Rewrite("addcmul of mine", FMA.find, FMA.put), into="test of registration")
    assert ops(OwnRules("test of registration")(program(lambda x, y: x + x * y))) == "addcmul"
    assert register_pass(Doubles) is Doubles
    assert registered_passes()["doubles"] is Doubles
    with pytest.raises(RewriteError, match="choose another name"):
        register_rewrite(Rewrite("addcmul of mine", FMA.find, FMA.put), into="test of registration")
    with pytest.raises(RewriteError, match="dataclass"):
        register_pass(type("Nameless", (Pass,), {}))


def test_a_draft_notices_an_equal_option_of_another_type() -> None:
    draft = Draft(program(lambda x, y: x.add(y, alpha=1) + x.add(y, alpha=2)))
    spot = next(spot for spot in draft if spot.kwargs.get("alpha") == 2)
    draft.set_args(spot, spot.args, {"alpha": 2.0})
    assert [type(node.kwargs["alpha"]) for node in draft.finish().nodes if "alpha" in node.kwargs][-1] is float
