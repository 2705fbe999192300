"""Every rule is right: whole = glue(parts), values and gradients, even and uneven, for all samples."""

from __future__ import annotations

import warnings

import pytest
import torch

from meshwright.spmd.rules.rule_table import RULES

from .samples import GONE, build, overload, samples
from .walker import check

SAMPLES = samples()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("packet", sorted({name.partition(".")[0] for name, _ in SAMPLES}))
def test_a_rule_gives_the_numbers_of_the_whole(packet: str) -> None:
    """On two ranks and on three, where pieces of four and five are uneven or empty."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, arguments in SAMPLES:
            if name.partition(".")[0] == packet:
                sample = build(name, arguments)
                for ranks in (2, 3):
                    check(sample, ranks)


UNSEEN = ("type_as", "batch_norm")
"""Operators with an operand that is not in the rule: one gives only its dtype, one has statistics of the form."""


def test_every_operand_has_a_slot_in_its_rule() -> None:
    """An operand without a slot would reach the operator unchecked."""
    for name, arguments in SAMPLES:
        sample = build(name, arguments)
        call = sample.described()
        assert call is not None
        given = [t for a in (*sample.args, *sample.kwargs.values()) for t in (a if isinstance(a, list) else [a])]
        tensors = sum(isinstance(t, torch.Tensor) for t in given)
        seen = sum(p is not None for p in call.places)
        assert seen == tensors or name.partition(".")[0] in UNSEEN, f"{name}: {arguments} by {call.rule.text!r}"


def test_every_rule_has_a_sample() -> None:
    used = {f"aten.{name.partition('.')[0]}" for name, _ in SAMPLES} | {str(overload(name)) for name, _ in SAMPLES}
    assert sorted(n for n in RULES if n.startswith("aten.") and n not in used and n[5:] not in GONE) == []


def test_every_rule_belongs_to_an_operator_of_torch() -> None:
    names = {n.split(".")[1] for n in RULES if n.startswith("aten.")}
    assert {n for n in names if not hasattr(torch.ops.aten, n)} <= GONE
