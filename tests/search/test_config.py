"""Transformers from published configurations: their parameters are those of the models."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from meshwright.search import SearchError, transformer_of
from meshwright.search.transformer_plans.families import GATED, PLAIN, TIED

ELSEWHERE = frozenset({"kimi_k2"})
"""Families whose code is published with their weights."""
GIVEN = {"nemotron": {"num_key_value_heads": 8}}
"""Sizes that a family's default configuration lacks."""


CONFIGS: dict[str, tuple[dict[str, Any], float]] = {
    "Llama-3-8B": ({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                    "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu"}, 8.03),
    "GPT-2": ({"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "activation_function": "gelu_new",
               "tie_word_embeddings": True}, 0.1236),
    "Mixtral-8x7B": ({"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
                      "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8,
                      "num_experts_per_tok": 2}, 46.7),
    "DeepSeek-V3": ({"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280,
                     "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
                     "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536,
                     "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}, 671.0),
    "DeepSeek-V2-Lite": ({"hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "vocab_size": 102400,
                          "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
                          "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
                          "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                          "v_head_dim": 128, "model_type": "deepseek_v2"}, 15.7),
    "Falcon-7B": ({"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024,
                   "multi_query": True, "new_decoder_architecture": False, "model_type": "falcon"}, 6.92),
    "BLOOM": ({"n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880,
               "model_type": "bloom"}, 176.2),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configurations_have_their_parameters(name: str) -> None:
    config, billions = CONFIGS[name]
    assert transformer_of(config).parameters / 1e9 == pytest.approx(billions, rel=4e-3)


def test_a_configuration_without_sizes_is_refused() -> None:
    with pytest.raises(SearchError, match="num_hidden_layers"):
        transformer_of({"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100})


@pytest.mark.parametrize("family", sorted((GATED | PLAIN) - ELSEWHERE))
def test_sizes_define_a_model_of_a_known_family(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    configs = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if family not in configs:
        pytest.skip(f"no {family} in this release")
    door = transformers.AutoModelForCausalLM if family in names else transformers.AutoModelForMaskedLM
    own = configs[family](**GIVEN.get(family, {}))
    with torch.device("meta"):
        held = sum(p.numel() for p in door.from_config(own).parameters())
    told = transformer_of(json.loads(own.to_json_string()))
    assert told.parameters == pytest.approx(held, rel=0.015)  # without norms, biases, and learned positions
    assert told.tied == (family in TIED)


@pytest.mark.parametrize("family", ["doge", "mamba2", "whisper", "t5", "jamba", "longcat_flash", "qwen3_next", "mine"])
def test_a_family_that_sizes_do_not_define_is_refused(family: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    with pytest.raises(SearchError, match=family) as refused:
        transformer_of({**sizes, "model_type": family})
    assert "meshwright parallelize" in str(refused.value)
    assert transformer_of(sizes).gated


SMALL = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 100}


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"layer_types": [*["sliding_attention"] * 5, "full_attention"], "sliding_window": 1024}, 5 / 6),
        ({"model_type": "gemma3_text", "sliding_window": 1024, "sliding_window_pattern": 6}, 5 / 6),
        ({"model_type": "gemma2", "sliding_window": 4096}, 1 / 2),
        ({"model_type": "qwen2", "sliding_window": 4096, "layer_types": ["full_attention"] * 6}, 0.0),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, 0.0),
        ({"model_type": "mistral", "sliding_window": 4096}, 1.0),
        ({"model_type": "modernbert", "local_attention": 128, "global_attn_every_n_layers": 3}, 2 / 3),
    ],
)
def test_the_share_of_layers_with_windows_is_that_of_the_file(config: dict[str, Any], windows: float) -> None:
    model = transformer_of({**SMALL, **config})
    assert (1 / model.window.every if model.window else 0.0) == pytest.approx(windows)
    length = 1 << 20
    whole, size = length * (0.5 if model.causal else 1.0), model.window.size if model.window else 0
    assert model.seen(length) == pytest.approx(whole * (1 - windows) + size * windows)


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        ({"model_type": "bert"}, False),
        ({"model_type": "bert", "is_decoder": True}, True),
        ({"model_type": "opt"}, True),
    ],
)
def test_tokens_of_an_encoder_attend_to_all_tokens(config: dict[str, Any], causal: bool) -> None:
    assert transformer_of({**SMALL, **config}).seen(512) == (256 if causal else 512)


@pytest.mark.parametrize(
    "config", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [3]}, {"moe_layer_freq": 2}, {"mlp_only_layers": [0, 2]}]
)
def test_layers_with_and_without_experts_must_not_alternate(config: dict[str, Any]) -> None:
    experts = {"num_experts": 8, "moe_intermediate_size": 32}
    with pytest.raises(SearchError, match="must come before"):
        transformer_of({**SMALL, **experts, **config})
    first = transformer_of({**SMALL, **experts, "mlp_only_layers": [0, 1]}).experts
    assert first is not None
    assert first.dense == 2


def test_a_model_of_text_and_images_is_refused_with_the_part_to_pass() -> None:
    with pytest.raises(SearchError, match="text_config") as refused:
        transformer_of({"model_type": "gemma3", "text_config": {**SMALL, "model_type": "gemma3_text"}})
    assert "save the object text_config" in refused.value.write
