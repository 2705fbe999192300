"""Architectures of text alone: decoders, encoders, and both."""

from __future__ import annotations

from benchmarks._matrix_subject import (
    BERT,
    CLASSES,
    LENGTH,
    LLAMA,
    TEXT,
    WORDS,
    Numbers,
    Subject,
    encoder,
    seq2seq,
    text,
    without,
)

LONG = {"input_ids": Numbers(WORDS, (16,)), "labels": Numbers(WORDS, (16,))}
MARKS = {"pad_token_id": 0, "mask_token_id": 3}

MODELS: dict[str, Subject] = {
    "Llama": text("decoder", "LlamaForCausalLM", "LlamaConfig", **LLAMA),
    "Mistral": text("decoder", "MistralForCausalLM", "MistralConfig", **LLAMA, sliding_window=6),
    "Qwen3": text("decoder", "Qwen3ForCausalLM", "Qwen3Config", **LLAMA, head_dim=8),
    "Gemma-2": text("decoder", "Gemma2ForCausalLM", "Gemma2Config", **LLAMA, head_dim=8, sliding_window=6),
    "Phi": text("decoder", "PhiForCausalLM", "PhiConfig", **{**LLAMA, "num_key_value_heads": 4}),
    "GPT-2": text(
        "decoder", "GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    ),
    "GPT-NeoX": text("decoder", "GPTNeoXForCausalLM", "GPTNeoXConfig", **BERT),
    "GPT-J": text(
        "decoder", "GPTJForCausalLM", "GPTJConfig", n_embd=32, n_layer=2, n_head=4, n_positions=32, rotary_dim=4,
        bos_token_id=0, eos_token_id=0,
    ),
    "OPT": text(
        "decoder", "OPTForCausalLM", "OPTConfig", hidden_size=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32, word_embed_proj_dim=32, layerdrop=0.0,
    ),
    "Falcon": text(
        "decoder", "FalconForCausalLM", "FalconConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        ffn_hidden_size=48, bos_token_id=0, eos_token_id=0,
    ),
    "Bloom": text("decoder", "BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=2, n_head=4),
    "MPT": text("decoder", "MptForCausalLM", "MptConfig", d_model=32, n_layers=2, n_heads=4, max_seq_len=32),
    "Gemma-3": text(
        "decoder", "Gemma3ForCausalLM", "Gemma3TextConfig", **LLAMA, head_dim=8, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "OLMo-2": text("decoder", "Olmo2ForCausalLM", "Olmo2Config", **LLAMA),
    "StableLM": text("decoder", "StableLmForCausalLM", "StableLmConfig", **LLAMA, use_qkv_bias=True),
    "BERT": encoder("BertForMaskedLM", "BertConfig", **BERT),
    "RoBERTa": encoder("RobertaForMaskedLM", "RobertaConfig", **BERT),
    "DistilBERT": encoder(
        "DistilBertForMaskedLM", "DistilBertConfig", dim=32, hidden_dim=48, n_layers=2, n_heads=4,
        max_position_embeddings=32,
    ),
    "ModernBERT": encoder(
        "ModernBertForMaskedLM", "ModernBertConfig", **BERT, local_attention=8, global_attn_every_n_layers=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    ),
    "ALBERT": encoder("AlbertForMaskedLM", "AlbertConfig", **BERT, embedding_size=16),
    "DeBERTa-v2": encoder(
        "DebertaV2ForMaskedLM", "DebertaV2Config", **BERT, relative_attention=True, pos_att_type=["p2c", "c2p"],
    ),
    "ELECTRA": encoder("ElectraForMaskedLM", "ElectraConfig", **BERT, embedding_size=16),
    "DeBERTa": encoder(
        "DebertaForMaskedLM", "DebertaConfig", **BERT, relative_attention=True, pos_att_type=["p2c", "c2p"],
    ),
    "ESM": encoder("EsmForMaskedLM", "EsmConfig", **BERT, position_embedding_type="rotary", **MARKS),
    "FNet": encoder("FNetForMaskedLM", "FNetConfig", **without(BERT, "num_attention_heads")),
    "Nyströmformer": encoder(
        "NystromformerForMaskedLM", "NystromformerConfig", **BERT, segment_means_seq_len=LENGTH, num_landmarks=4,
        conv_kernel_size=3,
    ),
    "Longformer": encoder(
        "LongformerForMaskedLM", "LongformerConfig", **BERT, attention_window=4, pad_token_id=0,
    ),
    "BigBird": Subject(
        "encoder", "BigBirdForMaskedLM",
        {"vocab_size": WORDS, **BERT, "attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1},
        LONG, {}, "BigBirdConfig",
    ),
    "Funnel": encoder(
        "FunnelForMaskedLM", "FunnelConfig", block_sizes=[1, 1], num_decoder_layers=1, d_model=32, n_head=4, d_head=8,
        d_inner=48,
    ),
    "XLNet": encoder("XLNetLMHeadModel", "XLNetConfig", d_model=32, n_layer=2, n_head=4, d_inner=48),
    "Reformer": Subject(
        "encoder", "ReformerForMaskedLM",
        {"vocab_size": WORDS, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 8,
         "feed_forward_size": 48, "attn_layers": ["local", "lsh"], "axial_pos_shape": (4, 4),
         "axial_pos_embds_dim": (16, 16), "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2,
         "hash_seed": 0, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
         "local_attention_probs_dropout_prob": 0.0},
        LONG, {}, "ReformerConfig",
    ),
    "CANINE": Subject(
        "encoder", "CanineForTokenClassification",
        {**BERT, "num_labels": CLASSES, "num_hash_functions": 2, "num_hash_buckets": 16, "local_transformer_stride": 8},
        {"input_ids": Numbers(WORDS, (16,)), "labels": Numbers(CLASSES, (16,))}, {}, "CanineConfig",
    ),
    "Perceiver": Subject(
        "encoder", "PerceiverForMaskedLM",
        {"vocab_size": WORDS, "num_latents": 4, "d_latents": 16, "d_model": 32, "num_self_attends_per_block": 2,
         "num_self_attention_heads": 2, "num_cross_attention_heads": 2, "qk_channels": 16, "v_channels": 16,
         "max_position_embeddings": LENGTH},
        TEXT, {}, "PerceiverConfig",
    ),
    "ConvBERT": encoder("ConvBertForMaskedLM", "ConvBertConfig", **BERT, embedding_size=16, conv_kernel_size=3),
    "SqueezeBERT": encoder("SqueezeBertForMaskedLM", "SqueezeBertConfig", **BERT, embedding_size=32),
    "MobileBERT": encoder(
        "MobileBertForMaskedLM", "MobileBertConfig", **BERT, embedding_size=16, intra_bottleneck_size=16,
        num_feedforward_networks=2,
    ),
    "T5": text(
        "encoder-decoder", "T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=48, num_layers=1,
        num_heads=4, decoder_start_token_id=0,
    ),
    "BART": text(
        "encoder-decoder", "BartForConditionalGeneration", "BartConfig", d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_position_embeddings=32,
    ),
    "Marian": seq2seq("MarianMTModel", "MarianConfig", decoder_start_token_id=0),
    "Pegasus": seq2seq("PegasusForConditionalGeneration", "PegasusConfig"),
    "LED": seq2seq(
        "LEDForConditionalGeneration", "LEDConfig", attention_window=4, max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
    ),
    "ProphetNet": text(
        "encoder-decoder", "ProphetNetForConditionalGeneration", "ProphetNetConfig", hidden_size=32,
        num_encoder_layers=2, num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32, num_buckets=8,
        relative_max_distance=16, pad_token_id=0, decoder_start_token_id=1,
    ),
    "LongT5": text(
        "encoder-decoder", "LongT5ForConditionalGeneration", "LongT5Config", d_model=32, d_kv=8, d_ff=48, num_layers=1,
        num_heads=4, decoder_start_token_id=0, local_radius=3, global_block_size=4,
        encoder_attention_type="transient-global",
    ),
    "Switch": text(
        "experts", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", d_model=32, d_kv=8,
        d_ff=48, num_layers=2, num_sparse_encoder_layers=1, num_decoder_layers=2, num_sparse_decoder_layers=1,
        num_heads=4, num_experts=4, expert_capacity=64, decoder_start_token_id=0,
    ),
}  # fmt: skip
