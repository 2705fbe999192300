"""Models of transformers: their own `generate()` and the sampler on marked models, with counted collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

transformers = pytest.importorskip("transformers")

LAYERS, NEW = 2, 5
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [14, 15]]
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16], [17, 18, 19, 20]])
PLAN = {
    **{f"*.{name}_proj": mw.ColwiseParallel() for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj": mw.RowwiseParallel() for name in ("o", "down")},
}
MESHES: dict[str, tuple[Any, list[str]]] = {
    "dp": ([0, 1], ["dp"]),
    "tp": ([0, 1], ["tp"]),
    "dp x tp": ([[0, 1], [2, 3]], ["dp", "tp"]),
}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=47, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=48, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def bart() -> Any:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=48, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32,
        forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


def mamba() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "use_cache": True}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, initializer_range=0.5)).eval()


MODELS = {"Llama": llama, "T5": t5, "BART": bart}


def on_mesh(mesh: str, make: Any, call: Any) -> tuple[Any, Counter[str]]:
    """Return the result of `call(model)` on rank 0, and its collectives."""
    ids, axes = MESHES[mesh]

    def go() -> tuple[Any, Counter[str]]:
        model: nn.Module = make()
        plan = PLAN if make is llama else {}
        mw.parallelize(model, None, mw.ProcessMesh(ids, axes), mw.Parallelism(plan))
        with mw.trace_comm() as trace:
            found = call(model)
        return found, Counter(call.step for call in trace.calls if call.axes)

    return mw.simulate(go, len(torch.tensor(ids).flatten()))[0]


def generate(model: Any, new: int = NEW, **options: Any) -> Tensor:
    torch.manual_seed(1)
    return mw.unshard_dtensor(model.generate(IDS, max_new_tokens=new, **options))


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}, {"num_beams": 2}])
@pytest.mark.parametrize(("name", "mesh"), [("Llama", "dp x tp"), ("T5", "dp"), ("BART", "dp")])
def test_their_own_loop_gives_the_tokens_of_one_device(name: str, mesh: str, options: dict[str, Any]) -> None:
    found, _ = on_mesh(mesh, MODELS[name], lambda model: generate(model, **options))
    assert torch.equal(found, generate(MODELS[name](), **options))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_the_sampler_gives_the_tokens_of_one_device(name: str, mesh: str) -> None:
    def sample(model: Any) -> list[Tensor]:
        sampler = mw.sampler(model)
        first = sampler.generate(PROMPTS, NEW, temperature=0)
        return [first.tokens, sampler.generate(PROMPTS, NEW, seed=2, n=2, top_k=9).tokens]

    found, _ = on_mesh(mesh, MODELS[name], sample)
    for tokens, wanted in zip(found, sample(MODELS[name]()), strict=True):
        assert torch.equal(tokens, wanted)


@pytest.mark.parametrize("make", [llama, t5, bart, mamba])
def test_other_prompts_change_no_log_probability(make: Any) -> None:
    """Padding changed those of state-space models."""
    sampler = mw.sampler(make())
    together = sampler.generate(PROMPTS, NEW, temperature=0)
    for row, prompt in enumerate(PROMPTS):
        alone = sampler.generate([prompt], NEW, temperature=0)
        torch.testing.assert_close(together.log_probs[row], alone.log_probs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("make", "prompts", "longest"), [(llama, PROMPTS, 3), (mamba, IDS, 4)])
def test_long_prompts_are_read_in_chunks(make: Any, prompts: Any, longest: int) -> None:
    """A model with a state of constant size reads its prompts whole."""
    wanted = mw.sampler(make()).generate(prompts, NEW, seed=3)

    def call(model: nn.Module) -> tuple[Tensor, int]:
        lengths: list[int] = []
        model.register_forward_pre_hook(
            lambda _, args, given: lengths.append([*args, *given.values()][0].shape[1]), with_kwargs=True
        )
        options: dict[str, Any] = {"seed": 3, "prefill_chunk_size": 3, "batch_size": 2}
        return mw.sampler(model).generate(prompts, NEW, **options).tokens, max(lengths)

    for tokens, found in (call(make()), on_mesh("dp", make, call)[0]):
        assert torch.equal(tokens, wanted.tokens)
        assert found == longest


def each_token(mesh: str, call: Any) -> dict[str, float]:
    """Return the collectives of one more token."""
    few, many = (on_mesh(mesh, llama, lambda model, n=n: call(model, n))[1] for n in (2, 6))
    return {step: (count - few[step]) / 4 for step, count in many.items() if count != few[step]}


def test_each_token_takes_one_reduction_for_each_half_of_a_layer() -> None:
    """A norm that is written out reads its input twice, and reduces it once."""
    wanted = {"AllReduce(tp)": 2 * LAYERS}
    assert each_token("tp", lambda model, n: generate(model, n, do_sample=False)) == wanted
    assert each_token("tp", lambda model, n: mw.sampler(model).generate(PROMPTS, n, temperature=0)) == wanted


def test_rows_on_several_ranks_are_asked_for_their_end_at_most_once_for_each_token() -> None:
    assert each_token("dp", lambda model, n: generate(model, n, do_sample=False)) == {"AllGather(dp, dim 0)": 1}
    assert each_token("dp", lambda model, n: mw.sampler(model).generate(PROMPTS, n, temperature=0, stop=47)) == {}


def test_the_cache_is_written_in_place() -> None:
    def call(model: Any) -> list[Any]:
        with torch.no_grad():
            cache = mw.sampler(model).cache(16)
            first = generate(model, 3, do_sample=False, past_key_values=cache)
            memory, length = cache.layers[0].memory[0].memory, cache.get_seq_length()
            keys = cache.layers[0].keys
            return [first, length, memory.shape[-2], keys.to_local().data_ptr() == memory.to_local().data_ptr()]

    found, _ = on_mesh("dp x tp", llama, call)
    assert torch.equal(found[0], generate(llama(), 3, do_sample=False))
    assert found[1:] == [IDS.shape[1] + 2, 16, True]


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 2}])
@pytest.mark.parametrize(
    ("name", "capacity", "mesh"), [("Llama", 3, "tp"), ("Llama", 6, "dp x tp"), ("Llama", 64, "tp"), ("T5", 64, "dp")]
)
def test_a_cache_of_the_sampler_gives_the_same_tokens(
    name: str, capacity: int, mesh: str, options: dict[str, Any]
) -> None:
    """The prompts have 4 tokens: more than 3, and 6 are less than all."""

    def call(model: Any) -> Tensor:
        return generate(model, past_key_values=mw.sampler(model).cache(capacity), **options)

    assert torch.equal(on_mesh(mesh, MODELS[name], call)[0], generate(MODELS[name](), **options))


def test_a_cache_takes_keys_of_another_dtype() -> None:
    cache, parts = mw.sampler(llama()).cache(16), []
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.bfloat16, torch.float32):
            parts.append(torch.randn(1, 2, 3, 4, dtype=dtype))
            keys, _ = cache.update(parts[-1], parts[-1], 0)
            assert torch.equal(keys, torch.cat(parts, -2))


def test_a_cache_needs_a_model_of_transformers_and_a_capacity() -> None:
    with pytest.raises(mw.GenerationError, match="no cache"):
        mw.sampler(nn.Linear(1, 1)).cache(3)
    with pytest.raises(mw.GenerationError, match="capacity must be"):
        mw.sampler(llama()).cache(0)


def test_a_cache_needs_a_model_that_takes_keys_and_values() -> None:
    with pytest.raises(mw.GenerationError, match="without past_key_values"):
        mw.sampler(mamba()).cache(8)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of transformers, when PEFT calls it
def test_a_model_with_adapters_is_called_with_its_cache() -> None:
    """A forward of PEFT names no cache, and passes it on."""
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        torch.manual_seed(1)
        return peft.get_peft_model(llama(), config)

    def call(model: Any) -> tuple[Tensor, list[int]]:
        lengths: list[int] = []
        words = model.get_base_model().model.embed_tokens
        words.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
        return mw.sampler(model, static_after=None).generate(IDS, NEW, temperature=0).tokens, lengths

    wanted = generate(adapted().eval(), do_sample=False, eos_token_id=None)[:, IDS.shape[1] :]
    for tokens, lengths in (call(adapted()), on_mesh("dp", adapted, call)[0]):
        assert torch.equal(tokens, wanted)
        assert lengths[-NEW + 1 :] == [1] * (NEW - 1)


def test_a_prompt_takes_positions_of_the_encoder_alone() -> None:
    sampler = mw.sampler(bart())
    assert sampler.generate([[5] * 32], 31, temperature=0, stop=range(48)).tokens.shape == (1, 1)
    with pytest.raises(mw.GenerationError, match="max_new_tokens=31"):
        sampler.generate([[5] * 32], 32)
    with pytest.raises(mw.GenerationError, match="shorten"):
        sampler.generate([[5] * 33], 1)


def test_an_encoder_may_have_more_tokens_than_its_decoder() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    parts = (transformers.BertConfig(vocab_size=words, **sizes) for words in (48, 20))
    model = transformers.EncoderDecoderModel(transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts))
    with pytest.raises(mw.GenerationError, match="decoder_start_token_id"):
        mw.sampler(model).generate([[47, 5]], 2)
    model.generation_config.decoder_start_token_id = 0
    assert mw.sampler(model).generate([[47, 5]], 2).tokens.max() < 20
    with pytest.raises(mw.GenerationError, match="the tokens 0 to 19"):
        mw.sampler(model).generate([[47, 5]], 2, stop=47)


@pytest.mark.parametrize("name", ["LlamaModel", "T5Model"])
def test_a_model_without_a_head_is_refused(name: str) -> None:
    whole = {"LlamaModel": llama, "T5Model": t5}[name]()
    with pytest.raises(mw.GenerationError, match="without logits"):
        mw.sampler(getattr(transformers, name)(whole.config)).generate(PROMPTS, 2)
