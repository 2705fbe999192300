"""The decode step as a program: the tokens of one device, counted collectives, and the eager step where it is none."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import DisagreementError
from meshwright.generate import EagerStepWarning, GenerationError, _step_runs
from meshwright.graph import canonical_text

transformers = pytest.importorskip("transformers")

LAYERS, NEW = 1, 7
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [14, 15]]
PLAN = {
    **{f"*.{name}_proj": mw.ColwiseParallel() for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj": mw.RowwiseParallel() for name in ("o", "down")},
    "lm_head": mw.ColwiseParallel(),
}
SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 47, "pad_token_id": 0,
}  # fmt: skip


def llama(kind: Any = transformers.LlamaForCausalLM) -> Any:
    torch.manual_seed(0)
    return kind(transformers.LlamaConfig(**SIZES)).eval()


def mistral() -> Any:
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=4)).eval()


def on_mesh(axes: str, call: Any, make: Any = llama) -> Any:
    """Return the result of `call(model)` on the last rank of a mesh with two ranks along each axis."""
    names = axes.split(" x ")
    ids = torch.arange(2 ** len(names)).view([2] * len(names))

    def go() -> Any:
        model: nn.Module = make()
        mw.parallelize(model, None, mw.ProcessMesh(ids.tolist(), names), mw.Parallelism(PLAN))
        return call(model)

    return mw.simulate(go, ids.numel())[-1]


def tokens(model: Any, static_after: int | None = 0, **options: Any) -> Tensor:
    return mw.sampler(model, static_after=static_after).generate(PROMPTS, NEW, **{"seed": 2, **options}).tokens


def programs(sampler: mw.Sampler) -> list[int]:
    """Return the number of recordings of each step of a sampler; 0 for an eager one."""
    return [run.program.recordings if run.program is not None else 0 for run in sampler._runs.known]


@pytest.mark.parametrize("axes", ["tp", "dp x tp"])
def test_a_program_gives_the_tokens_of_one_device_in_all_calls(axes: str) -> None:
    """The second call has prompts of other lengths; both use one program."""
    calls: list[dict[str, Any]] = [{"prompts": PROMPTS, "n": 2, "seed": 3}, {"prompts": [[3]] * 8, "temperature": 0}]

    def generate(model: Any) -> tuple[list[Tensor], list[int]]:
        sampler = mw.sampler(model, static_after=2)
        return [sampler.generate(max_new_tokens=NEW, **call).tokens for call in calls], programs(sampler)

    found, recorded = on_mesh(axes, generate)
    wanted, eager = generate(llama())
    assert all(map(torch.equal, found, wanted))
    assert (recorded, eager) == ([1], [0])


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize(
    ("axes", "wanted"), [("tp", {"AllReduce(tp)": 2 * LAYERS, "AllGather(tp, dim 1)": 1}), ("dp", {})]
)
def test_a_token_takes_two_reductions_for_each_layer_and_a_gather_of_its_logits(
    axes: str, wanted: dict[str, int], page_size: int | None
) -> None:
    def call(model: Any) -> list[Counter[str]]:
        sampler, found = mw.sampler(model, static_after=0), []
        with mw.trace_comm() as trace:
            for new in (2, 3, 5):
                before = len(trace.calls)
                sampler.generate(PROMPTS, new, temperature=0, page_size=page_size)
                found.append(Counter(call.step for call in trace.calls[before:] if call.axes))
        assert programs(sampler) == [1]
        return found

    _, few, many = on_mesh(axes, call)
    assert {step: (many[step] - few[step]) / 2 for step in many if many[step] != few[step]} == wanted


@pytest.mark.parametrize("page_size", [None, 4])
def test_a_program_writes_the_memory_in_place(page_size: int | None) -> None:
    def addresses(run: Any) -> list[int]:
        return [x.to_local().data_ptr() for x in run.step.buffers(recurse=False)]

    def call(model: Any) -> tuple[bool, int]:
        sampler = mw.sampler(model, static_after=0)
        sampler.generate(PROMPTS, NEW, page_size=page_size)
        (run,) = sampler._runs.known
        before = addresses(run)
        sampler.generate(PROMPTS, NEW, page_size=page_size)
        return addresses(run) == before, str(run.program.program).count("= scatter_.src(") if run.program else 0

    assert on_mesh("tp", call) == (True, 2 * LAYERS)


class Reading(transformers.LlamaForCausalLM):
    """A model whose step reads a number of a tensor, so that it cannot be one program."""

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        if input_ids.sum().item() < 0:
            raise ValueError
        return super().forward(input_ids, **options)


class WithoutLargeMasks(transformers.LlamaForCausalLM):
    """A model that takes masks of two dims only."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        is_table = attention_mask is not None and attention_mask.dim() == 2
        return super().forward(input_ids, attention_mask=attention_mask if is_table else None, **options)


for kind in (Reading, WithoutLargeMasks):
    setattr(kind.forward, "__signature__", inspect.signature(transformers.LlamaForCausalLM.forward))  # noqa: B010 - a function has no such attribute


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: llama(Reading), "cannot be recorded"),
        (lambda: llama(WithoutLargeMasks), "a mask of four dims gives other logits"),
        (mistral, "keeps the last 4 positions only"),
    ],
)
def test_a_step_that_is_no_program_runs_eagerly_and_says_why_once(make: Any, why: str) -> None:
    def call(model: Any) -> list[Tensor]:
        sampler = mw.sampler(model, static_after=1)
        return [sampler.generate(PROMPTS, NEW, seed=seed).tokens for seed in (1, 2)]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = on_mesh("tp", call, make)
    assert [why in str(warning.message) for warning in told if warning.category is EagerStepWarning] == [True]
    assert all(map(torch.equal, found, call(make())))


def test_a_short_generation_records_nothing_and_says_nothing() -> None:
    def call(model: Any) -> list[int]:
        sampler = mw.sampler(model)
        sampler.generate(PROMPTS, NEW)
        return programs(sampler)

    assert on_mesh("tp", call) == [0]
    assert on_mesh("tp", call, mistral) == []


@pytest.mark.parametrize("bad", [-1, 1.5, "never", True])
def test_a_number_of_steps_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(GenerationError, match="static_after must be a whole number of at least 0"):
        mw.sampler(llama(), static_after=bad)


def test_ranks_that_record_after_other_tokens_are_refused() -> None:
    with pytest.raises(DisagreementError, match="static_after is 0 on rank 0 and 1 on rank 1"):
        on_mesh("tp", lambda model: tokens(model, mw.get_rank()))


@pytest.mark.parametrize("scheme", ["int8", "int8-dynamic"])
def test_the_program_of_a_quantized_model_multiplies_with_codes(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_step_runs, "has_fast_products", lambda: True)  # earlier tests may have turned kernels off

    def call(model: Any) -> tuple[list[int], set[str], Tensor]:
        sampler = mw.sampler(mw.quantize(model, scheme), static_after=0)
        found = sampler.generate(PROMPTS, NEW, seed=2).tokens
        (run,) = sampler._runs.known
        assert run.program is not None
        return programs(sampler), set(re.findall(r"meshwright\.\w+_linear", canonical_text(run.program.program))), found

    made, used, found = on_mesh("tp", call)
    assert made
    assert used == {"meshwright.integer_linear" if scheme == "int8-dynamic" else "meshwright.packed_linear"}
    assert torch.equal(found, tokens(mw.quantize(llama(), scheme), None))
