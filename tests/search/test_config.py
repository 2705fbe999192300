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
    own = configs[family]()
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
