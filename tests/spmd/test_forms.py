"""Parts of rules that the walk over the table does not test: writes, half precision, several sharded factors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from meshwright.spmd import Choice, LocalCall, describe

from .walker import OneRank, Ranks, Sample, every_choice


def cut_along(sample: Sample, name: str) -> Choice:
    call = sample.described()
    assert call is not None
    found = every_choice(call.bound, sample.operands(call))
    return next(c for c in found if c.factor is not None and call.bound.names[c.factor] == name)


@pytest.mark.parametrize(("name", "dim"), [("a0", 0), ("a1", 1)], ids=["samples", "channels"])
def test_running_statistics_are_updated_as_on_one_device(name: str, dim: int) -> None:
    """Samples or channels are sharded; every rank ends with the whole statistics."""
    x = torch.randn(6, 4, 3)
    goal_mean, goal_var = torch.zeros(4), torch.ones(4)
    F.batch_norm(x, goal_mean, goal_var, training=True, momentum=0.3)
    args = (x, None, None, torch.zeros(4), torch.ones(4), True, 0.3, 1e-5, False)
    sample = Sample(torch.ops.aten.batch_norm.default, args, {})
    call, choice, group = sample.described(), cut_along(sample, name), Ranks(2)
    assert call is not None
    means, variances = [torch.zeros(4) for _ in range(2)], [torch.ones(4) for _ in range(2)]

    def one(rank: int) -> None:
        here: LocalCall = OneRank(group, rank, call.bound, choice, [tuple(x.shape), None, None], [tuple(x.shape)])
        piece = x.chunk(2, dim)[rank]
        call.rule.forms[name](here, piece, None, None, means[rank], variances[rank], True, 0.3, 1e-5)

    group.run(one)
    for mean, var in zip(means, variances, strict=True):
        torch.testing.assert_close(mean, goal_mean)
        torch.testing.assert_close(var, goal_var)


def test_an_operator_that_writes_has_no_second_form() -> None:
    """`cumsum_` along a sharded dim would have to write a result that a form only returns."""
    x = torch.empty(4, 5, device="meta")
    call = describe(torch.ops.aten.cumsum_.default, [x, 0], {})
    assert call is not None
    assert call.mutated == (0,)
    assert not call.rule.forms
    assert call.bound.names.index("a0") in call.bound.whole


def test_one_form_serves_every_factor_of_a_rule() -> None:
    """Two axes may shard two factors of one call: the form that runs has to work for both."""
    x, target = torch.empty(4, 5, 3, device="meta"), torch.empty(4, 3, dtype=torch.int64, device="meta")
    call = describe(torch.ops.aten.cross_entropy_loss.default, [x, target], {})
    assert call is not None
    assert len({id(form) for form in call.rule.forms.values()}) == 1
