"""Keys and values in pages: the tokens of one device, counted pages, and prefixes that samples share."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm import DisagreementError
from meshwright.generate import GenerationError
from meshwright.generate._decode_step import local
from meshwright.generate._paged_slots import PagedSlots
from meshwright.generate._pages import PagePool, Pages, page_count
from meshwright.generate._read_pages import read_pages
from tests.generate.test_decode_step import (
    PLAN,
    PROMPTS,
    SIZES,
    WithoutLargeMasks,
    llama,
    mistral,
    on_mesh,
    programs,
    transformers,
)
from tests.generate.test_sampler import Decoder
from tests.generate.test_slots import MANY, NEW, WAYS, check_equal, wanted
from tests.generate.test_transformers import mamba
from tests.spmd.walker import Sample, check

FEW = {"page_size": 2, "cache_positions": 40}
"""Pages for three rows of the largest length, with 7 pages each."""


def generate(model: Any, static_after: int | None = None, **options: Any) -> list[Tensor]:
    sampler = mw.sampler(model, ask_every=2, static_after=static_after)
    found = sampler.generate(MANY, NEW, **options)
    assert programs(sampler) == [0 if static_after is None else 1]
    return [found.tokens, found.lengths, found.log_probs]


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"page_size": 1}, "greedy"),
        ({"page_size": 3, "batch_size": 3}, "stopped"),
        (FEW, "samples"),
        ({"cache_positions": 64, "prefill_chunk_size": 2}, "samples"),
        ({"page_size": 10**12}, "stopped"),
    ],
)
def test_pages_change_no_token(options: dict[str, Any], way: str) -> None:
    check_equal(generate(llama(), **options, **WAYS[way]), wanted(way))


@pytest.mark.parametrize(
    ("axes", "way", "static_after"),
    [("tp", "samples", 3), ("dp", "stopped", None), ("dp x tp", "greedy", None)],
)
def test_pages_change_no_token_on_a_mesh(axes: str, way: str, static_after: int | None) -> None:
    options = {**FEW, "batch_size": 4, **WAYS[way]}
    check_equal(on_mesh(axes, lambda model: generate(model, static_after, **options)), wanted(way))


def uneven() -> Any:
    """Return a model with three heads, which two ranks hold unevenly."""
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


@pytest.mark.parametrize(
    ("make", "axis", "plan", "zero"), [(uneven, "tp", PLAN, 0), (llama, "dp", {}, 3)], ids=["uneven heads", "ZeRO-3"]
)
def test_pages_change_no_token_where_heads_or_weights_are_sharded(
    make: Callable[[], Any], axis: str, plan: dict[str, Any], zero: int
) -> None:
    def go() -> list[Tensor]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0) if zero else None
        mw.parallelize(model, optimizer, mw.ProcessMesh([0, 1], [axis]), mw.Parallelism(plan, zero=zero))
        return generate(model, **FEW, **WAYS["stopped"])

    check_equal(mw.simulate(go, 2)[1], generate_alone(make()))


def generate_alone(model: Any) -> list[Tensor]:
    found = mw.sampler(model).generate(MANY, NEW, **WAYS["stopped"])
    return [found.tokens, found.lengths, found.log_probs]


def counted(model: Any, **options: Any) -> tuple[list[tuple[int, int]], int]:
    """Return the pages in use and their number by the lengths of rows for each step, and the most rows at a time."""
    found: list[tuple[int, int]] = []
    most = 0
    step = PagedSlots.step

    def count(slots: PagedSlots, tokens_r: Tensor, places: Any) -> Tensor | None:
        nonlocal most
        result = step(slots, tokens_r, places)
        rows = [(slot, row.prompt) for pages in slots.pages for slot, row in pages.rows.items()]
        size, held = slots.pages[0].pool.size, slots.rows.held
        own = sum(page_count(places[slot] + 1, size) - len(prompt) // size for slot, prompt in rows)
        shared = sum(len(prompt) // size for _, prompt in {(slot // held, prompt) for slot, prompt in rows})
        found.append((sum(pages.in_use for pages in slots.pages), own + shared))
        most = max(most, len(rows))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedSlots, "step", count)
        generate(model, **options)
    return found, most


def test_pages_in_use_are_those_of_the_lengths_with_each_prefix_once() -> None:
    many, rows = counted(llama(), page_size=2, **WAYS["samples"])
    assert all(used == lengths for used, lengths in many)
    assert rows == 3 * len(MANY)
    few, rows = counted(llama(), **FEW, **WAYS["samples"])
    assert all(used == lengths <= 20 for used, lengths in few)
    assert 3 <= rows < 3 * len(MANY)


def test_a_mesh_of_one_rank_has_pages() -> None:
    def go() -> list[Tensor]:
        model = llama()
        mw.parallelize(model, None, mw.ProcessMesh([0], ["dp"]), mw.Parallelism({}))
        return generate(model, **FEW, **WAYS["stopped"])

    check_equal(mw.simulate(go, 1)[0], wanted("stopped"))


def test_the_memory_is_that_of_the_pages_and_samples_take_less_than_slots() -> None:
    def sizes(model: Any, **options: Any) -> list[int]:
        sampler = mw.sampler(model)
        sampler.generate([[5] * 60], 5, n=8, temperature=0, **options)
        step: Any = sampler._runs.known[-1].step
        return [local(step.keys_0).numel(), local(step.values_0).numel()]

    heads = 2 * SIZES["hidden_size"] // SIZES["num_attention_heads"]
    assert sizes(llama()) == [8 * 64 * heads] * 2
    # 15 pages of the prompt, one of each sample, and the spare page
    assert sizes(llama(), page_size=4, cache_positions=4 * 23) == [4 * 24 * heads] * 2
    assert on_mesh("tp", lambda model: sizes(model, page_size=4, cache_positions=4 * 23)) == [4 * 24 * heads // 2] * 2


def test_a_page_of_several_rows_is_not_written_again() -> None:
    """Samples that enter later find the pages of their prompt."""
    filled: list[int] = []
    kept: dict[int, Tensor] = {}
    step = PagedSlots.step

    def look(slots: PagedSlots, tokens_r: Tensor, places: Any) -> Tensor | None:
        result = step(slots, tokens_r, places)
        pages, memory = slots.pages[0], cast(Tensor, slots._step.keys_0)
        filled.extend(row.filled for row in pages.rows.values())
        shared = [page for page, rows in pages.holders.items() if rows > 1]
        for page in set(kept) - set(shared):
            del kept[page]
        for page in shared:
            now = memory[0, :, 2 * page : 2 * page + 2]
            assert torch.equal(kept.setdefault(page, now.clone()), now)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedSlots, "step", look)
        sampler = mw.sampler(llama(), ask_every=1)
        sampler.generate([[5, 6, 7, 8, 9], [7, 7, 7]], NEW, n=5, stop=range(0, 48, 6), batch_size=3, page_size=2)
    assert max(filled) == 2


def test_random_rows_take_the_pages_of_their_lengths() -> None:
    """Rows enter, grow and leave at random. A row that entered always finds a page, and only own pages grow."""
    random = Random(0)
    prompts = [tuple(range(length)) for length in (1, 2, 3, 4, 7, 9)]
    for _ in range(30):
        size, new = random.choice((1, 2, 3)), random.randint(1, 6)
        pages, lengths = Pages(PagePool(page_count(8 + new, size) + random.randint(0, 12), size)), dict[int, int]()
        for row in range(80):
            prompt = random.choice(prompts)
            if pages.enter(row, prompt, len(prompt) + new - 1):
                lengths[row] = len(prompt)
            else:
                assert lengths, "a row that is alone fits"
            for other in random.sample(list(lengths), len(lengths) // 2):
                if lengths[other] == len(pages.rows[other].prompt) + new - 1:
                    pages.leave(other)
                    del lengths[other]
                    continue
                pages.grow(other, lengths[other])
                lengths[other] += 1
                assert pages.holders[pages.rows[other].pages[(lengths[other] - 1) // size]] == 1
            check_pages(pages, lengths)


def check_pages(pages: Pages, lengths: dict[int, int]) -> None:
    held = {page for row in pages.rows.values() for page in row.pages}
    assert sorted([*held, *pages.free]) == list(range(1, pages.pool.count + 1))
    size = pages.pool.size
    shared = sum(len(prompt) // size for prompt in {row.prompt for row in pages.rows.values()})
    own = sum(page_count(n, size) - len(pages.rows[row].prompt) // size for row, n in lengths.items())
    assert pages.in_use == len(held) == own + shared
    assert len(pages.free) >= sum(row.most - len(row.pages) for row in pages.rows.values())


def test_pages_are_read_by_the_rank_of_their_rows() -> None:
    table_rp = torch.randint(0, 5, (8, 3), generator=torch.Generator().manual_seed(0))
    memory_bhnd = torch.randn(4, 3, 10, 2)
    found = read_pages(memory_bhnd, table_rp, 2)
    pages = memory_bhnd.unflatten(2, (5, 2))
    for row, numbers in enumerate(table_rp):
        assert torch.equal(found[row], pages[row // 2][:, numbers].flatten(1, 2))
    assert check(Sample(torch.ops.meshwright.read_pages.default, (memory_bhnd, table_rp, 2), {}, None), 2) >= 3


@pytest.mark.parametrize("name", ["page_size", "cache_positions"])
@pytest.mark.parametrize("bad", [0, -2, 1.5, "all", True])
def test_a_number_of_positions_that_is_none_is_refused(name: str, bad: Any) -> None:
    with pytest.raises(GenerationError, match=f"{name} must be a whole number of at least 1"):
        mw.sampler(llama()).generate(PROMPTS, 2, **{name: bad})


def test_too_few_pages_for_one_row_are_refused_with_the_number_that_does() -> None:
    def call(model: Any, positions: int) -> Tensor:
        return mw.sampler(model).generate(PROMPTS, 9, temperature=0, page_size=2, cache_positions=positions).tokens

    whole = mw.sampler(llama()).generate(PROMPTS, 9, temperature=0).tokens
    for axes, few, least in (("tp", 10, 12), ("dp", 20, 24)):
        with pytest.raises(GenerationError, match=f"a prompt of 4 tokens .* 6 pages(.|\n)*cache_positions={least} or"):
            on_mesh(axes, lambda model, few=few: call(model, few))
        assert torch.equal(on_mesh(axes, lambda model, least=least: call(model, least)), whole)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (mistral, "keeps the last 4 positions only"),
        (mamba, "no decoder of transformers"),
        (Decoder, "no decoder of transformers"),
        (lambda: llama(WithoutLargeMasks), "a mask of four dims gives other logits"),
    ],
)
def test_models_without_pages_are_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(GenerationError, match=f"{why}(.|\n)*leave page_size and cache_positions out"):
        mw.sampler(make()).generate(PROMPTS, NEW, page_size=2)


def test_pages_are_refused_where_steps_are() -> None:
    sampler = mw.sampler(llama())
    with mw.same_numbers(), pytest.raises(GenerationError, match="same_numbers"):
        sampler.generate(PROMPTS, 2, page_size=2)
    with pytest.raises(GenerationError, match="keeps the last 4 positions only"):
        on_mesh("dp", lambda model: mw.sampler(model).generate(PROMPTS, NEW, cache_positions=64), mistral)
    with pytest.raises(DisagreementError, match="page_size is 2 on rank 0 and 3 on rank 1"):
        on_mesh("tp", lambda model: mw.sampler(model).generate(PROMPTS, 2, page_size=2 + mw.get_rank()))
