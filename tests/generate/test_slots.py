"""Rows in slots: rows that end make place for others, with the tokens of all rows at once, on every mesh."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm import DisagreementError
from meshwright.generate import GenerationError
from meshwright.generate._calls import CachedCalls
from meshwright.tensor.core.dist_tensor import PLANS
from tests.generate.test_decode_step import PROMPTS, WithoutLargeMasks, llama, mistral, on_mesh, programs
from tests.generate.test_sampler import Decoder
from tests.generate.test_sampler import on_mesh as on_plain_mesh

MANY = [*PROMPTS, [3], [4, 4, 4, 4, 4], [5, 6], [7]]
NEW = 9
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "stopped": {"seed": 1, "stop": range(0, 48, 4)},
    "samples": {"seed": 2, "n": 3, "stop": range(0, 48, 6), "top_k": 20},
}


def generate(model: Any, batch_size: int | None, **options: Any) -> list[Tensor]:
    sampler = mw.sampler(model, ask_every=2, static_after=None)
    found = sampler.generate(MANY, NEW, batch_size=batch_size, **options)
    return [found.tokens, found.lengths, found.log_probs]


def wanted(way: str) -> list[Tensor]:
    """Return the tokens of each prompt alone, on one device, in the order of the rows."""
    return generate(llama(), None, **WAYS[way])


def check_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    torch.testing.assert_close(found[2], wanted[2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_a_limit_of_rows_changes_no_token(batch_size: int, way: str) -> None:
    check_equal(generate(llama(), batch_size, **WAYS[way]), wanted(way))


@pytest.mark.parametrize(("axes", "way"), [("tp", "samples"), ("dp", "samples"), ("dp x tp", "stopped")])
def test_a_limit_of_rows_changes_no_token_on_a_mesh(axes: str, way: str) -> None:
    check_equal(on_mesh(axes, lambda model: generate(model, 3, **WAYS[way])), wanted(way))


def test_one_program_serves_rows_that_come_and_go() -> None:
    def call(model: Any) -> tuple[list[Tensor], list[int]]:
        sampler = mw.sampler(model, ask_every=2, static_after=3)
        found = sampler.generate(MANY, NEW, batch_size=3, **WAYS["stopped"])
        return [found.tokens, found.lengths, found.log_probs], programs(sampler)

    found, recorded = on_mesh("dp", call)
    check_equal(found, wanted("stopped"))
    assert recorded == [1]


def test_rows_that_end_are_replaced_and_samples_share_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight prompts of one new length each, in two slots, take fewer steps than four padded batches."""
    computed: list[tuple[int, ...]] = []
    first = CachedCalls.first

    def count(calls: CachedCalls) -> Tensor:
        computed.append(tuple(calls.ids_rs.shape))
        return first(calls)

    monkeypatch.setattr(CachedCalls, "first", count)
    sampler = mw.sampler(llama(), ask_every=1)
    sampler.generate(PROMPTS[:2], NEW, n=4, seed=1)
    assert computed[1:] == [(2, 3)]  # after the probe: two prompts for eight rows

    ends = sampler.generate(MANY, NEW, seed=1, stop=range(0, 48, 4))
    lengths = ends.lengths.tolist()
    sampler.generate(MANY, NEW, seed=1, stop=range(0, 48, 4), batch_size=2)
    padded = sum(max(pair) - 1 for pair in zip(lengths[::2], lengths[1::2], strict=True))
    assert sampler._runs.known[-1].runs < padded
    # only the first call of a sampler has a pass that finds the distribution of rows; the longest prompts enter first
    widths = [width for _, width in computed[3:]]
    assert computed[3] == (2, 5)
    assert widths == sorted(widths, reverse=True)


def test_prompts_in_chunks_and_rows_of_one_rank_have_slots() -> None:
    def call(model: Any, **options: Any) -> int:
        sampler = mw.sampler(model, ask_every=2)
        found = sampler.generate(MANY, NEW, batch_size=3, **options, **WAYS["stopped"])
        check_equal([found.tokens, found.lengths, found.log_probs], wanted("stopped"))
        return len(sampler._runs.known)

    def on_one_rank() -> int:
        model = llama()
        mw.parallelize(model, None, mw.ProcessMesh([0], ["dp"]), mw.Parallelism({}))
        return call(model)

    assert call(llama(), prefill_chunk_size=2) == 1
    assert mw.simulate(on_one_rank, 1) == [1]


def test_calls_of_later_tokens_and_prompts_are_planned_once_on_several_ranks() -> None:
    """Eager steps have the same sizes for each token, and prompts that enter later are padded to few sizes."""

    def call(model: Any) -> tuple[int, Tensor]:
        sampler = mw.sampler(model, static_after=None)
        sampler.generate(PROMPTS, 3, temperature=0)
        before = len(PLANS)
        tokens = sampler.generate(PROMPTS, 20, temperature=0).tokens
        made = len(PLANS) - before
        sampler.generate(MANY * 2, NEW, stop=range(0, 48, 4), batch_size=4)
        return made, tokens

    with patch.object(CachedCalls, "first", autospec=True, side_effect=CachedCalls.first) as first:
        made, tokens = on_mesh("tp", call)
    lengths = {given.args[0].ids_rs.shape[1] for given in first.call_args_list}
    assert made == 0
    assert max(lengths) == 16  # no prompt has more than 5 tokens
    assert torch.equal(tokens, mw.sampler(llama()).generate(PROMPTS, 20, temperature=0).tokens)


@pytest.mark.parametrize("make", [mistral, lambda: llama(WithoutLargeMasks), Decoder])
def test_models_without_steps_take_one_batch_after_the_other(make: Any) -> None:
    prompts = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [2, 2]]

    def call(model: Any, batch_size: int | None) -> Tensor:
        return mw.sampler(model).generate(prompts, 6, n=2, seed=5, stop=[1, 4], batch_size=batch_size).tokens

    assert torch.equal(call(make(), 3), call(make(), None))
    if make is Decoder:
        found, _ = on_plain_mesh("dp", make, n=2, batch_size=3)
        assert torch.equal(found.tokens, mw.sampler(make()).generate(prompts, 6, n=2).tokens)


@pytest.mark.parametrize("bad", [0, -2, 1.5, "all", True])
def test_a_number_of_rows_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(GenerationError, match="batch_size must be a whole number of at least 1"):
        mw.sampler(llama()).generate(PROMPTS, 2, batch_size=bad)


def test_ranks_with_other_numbers_of_rows_are_refused() -> None:
    with pytest.raises(DisagreementError, match="batch_size is 1 on rank 0 and 2 on rank 1"):
        on_mesh("tp", lambda model: mw.sampler(model).generate(PROMPTS, 2, batch_size=1 + mw.get_rank()))
