"""Each sample gets the rule in `rules.txt`, and may shard the factors listed there.

A rule that needlessly replicates operands still gives the right numbers, so the tests of the samples pass. It costs
communication instead. After an intended change, write the table again, and read the difference:

    python -m tests.spmd.test_rule_table
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshwright.spmd import OperatorCall, describe_for_propagation, random_operator_rule
from meshwright.spmd.rules.layers import RANDOM_RULES
from meshwright.spmd.rules.rule_table import RULES

from .samples import build, samples
from .walker import Sample, every_choice

KEPT = Path(__file__).with_name("rules.txt")
DRAWING = {
    "aten.dropout": "x(4, 5), 0.5, True",
    "aten.feature_dropout": "x(4, 5), 0.5, True",
    "aten.native_dropout": "x(4, 5), 0.5, True",
    "aten.rrelu_with_noise": "x(4, 5), x(4, 5), 0.1, 0.3, True",
    "aten.bernoulli": "p(4, 5)",
    "aten.bernoulli.Tensor": "p(4, 5), p(4, 5)",
    "aten.normal": "x(4, 5), p(4, 5)",
    "aten.poisson": "p(4, 5)",
    "aten._standard_gamma": "p(4, 5)",
    "aten.multinomial": "p(4, 5), 3",
    "aten.scaled_dot_product_attention": "x(2, 4, 5, 3), x(2, 4, 6, 3), x(2, 4, 6, 5), None, 0.5",
}
OVERLOADS = {"aten.normal": "normal.Tensor_Tensor", "aten.bernoulli": "bernoulli.default"}


def written(call: OperatorCall, operands: list[torch.Tensor | None]) -> str:
    """Return a call's rule as text, with the factors that may be sharded and the number of choices for terms."""
    rule, bound = call.rule, call.bound
    choices = list(dict.fromkeys(every_choice(bound, operands)))
    cut = dict.fromkeys(bound.names[c.factor] for c in choices if c.factor is not None)
    shown = " ".join(f"{name}*" if name in rule.forms else name for name in cut) or "nothing"
    parts = [rule.text, f"cut {shown}", f"{sum(c.factor is None for c in choices)} for terms"]
    parts += [f"over {rule.over}"] if rule.over else []
    parts += [f"sizes {rule.sizes}"] if rule.sizes else []
    parts += [f"invariant {' '.join(sorted(rule.invariant))}"] if rule.invariant else []
    parts += [f"stays {' '.join(sorted(rule.stays))}"] if rule.stays else []
    parts += [f"or {name}: {other.rule.text}" for name, other in rule.alternatives.items()]
    return "; ".join(parts + ["in parts"] * (rule.parts is not None) + ["guarded"] * (rule.guard is not None))


def drawing(name: str) -> Sample:
    return build(OVERLOADS.get(name, name.removeprefix("aten.")), DRAWING[name])


def table() -> Iterator[str]:
    for name, arguments in samples():
        sample = build(name, arguments)
        call = sample.described()
        assert call is not None
        yield f"{name}: {arguments}  =>  {written(call, sample.operands(call))}"
    for name, arguments in DRAWING.items():
        sample = drawing(name)
        call = describe_for_propagation(sample.op, sample.args, sample.kwargs)
        assert call is not None
        yield f"drawn {name}: {arguments}  =>  {written(call, sample.operands(call))}"


def test_rules_shard_as_much_as_in_the_table() -> None:
    kept, found = KEPT.read_text().splitlines(), list(table())
    lines = list(difflib.unified_diff(kept, found, "rules.txt", "now", n=0, lineterm=""))
    assert not lines, "\n".join(lines[:40])


def test_all_random_operators_are_in_the_table() -> None:
    assert set(RANDOM_RULES) == set(DRAWING)
    for name in RANDOM_RULES:
        sample = drawing(name)
        assert random_operator_rule(sample.op, sample.args, sample.kwargs) is not None


def test_every_name_in_the_table_is_an_operator() -> None:
    ours = {name.partition(".")[0] for name in RULES} - {"aten"}
    assert all(hasattr(getattr(torch.ops, space), "_dir") for space in ours)
    assert not {name for name in {*RULES, *RANDOM_RULES} if name.count(".") not in (1, 2)}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("pixel_shuffle", "x(2, 4, 1, 1), 1"),
        ("pixel_shuffle", "x(0, 4, 1, 1), 2"),
        ("repeat_interleave.self_int", "x(4, 5), 2"),
        ("repeat_interleave.self_int", "x(4), 0"),
        ("repeat_interleave.self_Tensor", "x(4), i(3, 4)"),
    ],
)
def test_some_calls_have_no_rule(name: str, arguments: str) -> None:
    assert build(name, arguments).described() is None


if __name__ == "__main__":
    KEPT.write_text("".join(f"{line}\n" for line in table()))
