"""`stream`: names, parts and layouts in one order on every rank, and whole tensors within a memory cap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.weights import WeightError

from .models import SQUARE, Decoder, marked


def test_parts_share_the_memory_and_have_one_order() -> None:
    def go() -> list[tuple[str, str]]:
        model = marked(SQUARE)
        found = list(mw.weights.stream(model))
        for name, part, layout in found:
            assert part.data_ptr() == model.state_dict()[name].to_local().data_ptr()
            assert tuple(part.shape) == layout.local_shape(mw.get_rank())
        return [(name, repr(layout)) for name, _, layout in found]

    ranks = mw.simulate(go, 4)
    assert all(found == ranks[0] for found in ranks)
    assert ranks[0][1:3] == [("words.weight", "f32[12, 16]"), ("up.weight", "f32[30@tp, 16]")]


def test_whole_tensors_come_in_buckets_within_the_cap() -> None:
    plain = Decoder().state_dict()

    def go() -> tuple[int, int]:
        model, counts = marked(SQUARE), []
        for cap in (None, 6000):
            before = current_communicator().seen.total_calls
            found = {name: x for name, x, _ in mw.weights.stream(mw.sampler(model), whole=True, memory_cap=cap)}
            counts.append(current_communicator().seen.total_calls - before)
            assert found.keys() == plain.keys()
            assert all(torch.equal(x, plain[name]) for name, x in found.items())
        return counts[0], counts[1]

    assert mw.simulate(go, 4)[0] == (1, 3)


def test_a_tensor_above_the_cap_and_an_unknown_format_are_refused() -> None:
    def go() -> None:
        with pytest.raises(WeightError, match=r"up\.weight has 1920 bytes(.|\n)*pass memory_cap=2880 or more"):
            list(mw.weights.stream(marked(SQUARE), whole=True, memory_cap=2000))

    mw.simulate(go, 4)
    with pytest.raises(WeightError, match='format="hf"'):
        mw.weights.stream(Decoder(), format="gguf")  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_models_of_transformers_have_the_names_of_their_checkpoints(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file

    sizes = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "intermediate_size": 8, "tie_word_embeddings": True}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more))
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **more | experts))
    for model in (llama, mixtral):
        model.save_pretrained(tmp_path / type(model).__name__)
        saved = load_file(tmp_path / type(model).__name__ / "model.safetensors")
        found = {name: x for name, x, _ in mw.weights.stream(model, whole=True)}
        assert found.keys() == saved.keys()
        assert all(torch.equal(x, saved[name]) for name, x in found.items())
    with pytest.raises(WeightError, match=r"experts\.0\.(.|\n)*pass whole=True"):
        list(mw.weights.stream(mixtral))
    wanted = [name for name, *_ in mw.weights.stream(llama)]
    adapted = peft.get_peft_model(llama, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    names = [name for name, *_ in mw.weights.stream(adapted)]
    adapters = [name for name in names if "lora" in name]
    assert [name for name in names if name not in adapters] == wanted
    assert adapters == [*peft.get_peft_model_state_dict(adapted)]


def test_a_compiled_module_adds_nothing_to_the_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    compiled: Any = torch.compile(model)
    assert [name for name, *_ in mw.weights.stream(compiled)] == ["0.weight", "0.bias"]
    assert next(name for name, *_ in mw.weights.stream(compiled, "meshwright")) == "_orig_mod.0.weight"
