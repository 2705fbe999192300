"""Architectures with experts, and with recurrent states in place of attention."""

from __future__ import annotations

from benchmarks._matrix_subject import LLAMA, Subject, text, without

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

MODELS: dict[str, Subject] = {
    "Mixtral": text("experts", "MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=4),
    "Qwen3-MoE": text("experts", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **LLAMA, **MOE, head_dim=8),
    "DeepSeek-V3": text(
        "experts", "DeepseekV3ForCausalLM", "DeepseekV3Config",
        **{**LLAMA, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        n_group=2, topk_group=1, kv_lora_rank=8, q_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1,
    ),
    "Granite-MoE": text(
        "experts", "GraniteMoeForCausalLM", "GraniteMoeConfig", **LLAMA, num_local_experts=4, num_experts_per_tok=2,
    ),
    "OLMoE": text("experts", "OlmoeForCausalLM", "OlmoeConfig", **LLAMA, num_experts=4, num_experts_per_tok=2),
    "DBRX": text(
        "experts", "DbrxForCausalLM", "DbrxConfig", d_model=32, n_heads=4, n_layers=2, max_seq_len=32,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    ),
    "JetMoE": text(
        "experts", "JetMoeForCausalLM", "JetMoeConfig", hidden_size=32, num_hidden_layers=2, num_key_value_heads=2,
        kv_channels=8, intermediate_size=48, max_position_embeddings=32, num_local_experts=4, num_experts_per_tok=2,
    ),
    "Phi-MoE": text(
        "experts", "PhimoeForCausalLM", "PhimoeConfig", **LLAMA, num_local_experts=4, num_experts_per_tok=2,
    ),
    "Ernie-4.5-MoE": text(
        "experts", "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", **LLAMA, moe_num_experts=4, moe_k=2,
        moe_intermediate_size=24, moe_layer_start_index=1, moe_num_shared_experts=1,
    ),
    "Mamba": text("state space", "MambaForCausalLM", "MambaConfig", hidden_size=16, state_size=4, num_hidden_layers=2),
    "Mamba-2": text(
        "state space", "Mamba2ForCausalLM", "Mamba2Config", hidden_size=16, state_size=8, num_hidden_layers=2,
        num_heads=4, head_dim=8, n_groups=2, chunk_size=4,
    ),
    "RWKV": text(
        "state space", "RwkvForCausalLM", "RwkvConfig", hidden_size=16, num_hidden_layers=2, context_length=32,
        attention_hidden_size=16, intermediate_size=32,
    ),
    "Jamba": text(
        "state space", "JambaForCausalLM", "JambaConfig", **LLAMA, num_experts=4, num_experts_per_tok=2,
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4,
        mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "Falcon-Mamba": text(
        "state space", "FalconMambaForCausalLM", "FalconMambaConfig", hidden_size=16, state_size=4,
        num_hidden_layers=2,
    ),
    "Zamba2": text(
        "state space", "Zamba2ForCausalLM", "Zamba2Config", **LLAMA, layers_block_type=["mamba", "hybrid"],
        mamba_d_state=8, mamba_ngroups=1, n_mamba_heads=4, chunk_size=4, use_mamba_kernels=False, adapter_rank=4,
        num_mem_blocks=1,
    ),
    "Bamba": text(
        "state space", "BambaForCausalLM", "BambaConfig", **LLAMA, attn_layer_indices=[1], mamba_n_heads=4,
        mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=4,
    ),
    "RecurrentGemma": text(
        "state space", "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig",
        **without(LLAMA, "max_position_embeddings"), lru_width=32, attention_window_size=6,
        block_types=("recurrent", "attention"),
    ),
    "Qwen3-Next": text(
        "state space", "Qwen3NextForCausalLM", "Qwen3NextConfig", **LLAMA, **MOE, head_dim=8,
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        shared_expert_intermediate_size=24, layer_types=["linear_attention", "full_attention"],
    ),
    "xLSTM": text(
        "state space", "xLSTMForCausalLM", "xLSTMConfig", hidden_size=32, num_hidden_layers=2, num_heads=2,
        chunk_size=4, ffn_round_up_to_multiple_of=8, mode="train", autocast_kernel_dtype="float32",
    ),
    "MiniMax": text(
        "state space", "MiniMaxForCausalLM", "MiniMaxConfig", **LLAMA, num_local_experts=4, num_experts_per_tok=2,
        head_dim=8, block_size=4, layer_types=["linear_attention", "full_attention"],
    ),
    "LFM2": text(
        "state space", "Lfm2ForCausalLM", "Lfm2Config", **LLAMA, layer_types=["conv", "full_attention"],
        block_multiple_of=8,
    ),
    "Falcon-H1": text(
        "state space", "FalconH1ForCausalLM", "FalconH1Config", **LLAMA, mamba_d_ssm=32, mamba_n_heads=4,
        mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=4,
    ),
}  # fmt: skip
