"""Architectures of speech, of time series, and of diffusion."""

from __future__ import annotations

import torch

from benchmarks._matrix_subject import CLASSES, LENGTH, NO_CACHE, PATCHES, WORDS, Noise, Numbers, Ones, Subject, without

SPEECH = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "conv_dim": (16, 16),
    "conv_stride": (4, 2), "conv_kernel": (8, 3), "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0, "apply_spec_augment": False,
}  # fmt: skip
WHISPER = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 16,
    "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
S2T = {
    **{k: v for k, v in WHISPER.items() if "max" not in k and k != "num_mel_bins"}, "encoder_layers": 2,
    "decoder_layers": 2,
}  # fmt: skip
UNET = {
    "sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
SERIES = {
    "prediction_length": 4, "context_length": 8, "input_size": 1, "lags_sequence": [1, 2], "d_model": 16,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
PAST = {
    "past_values": Noise((10,)), "past_time_features": Noise((10, 1)), "past_observed_mask": Ones((10,)),
    "future_values": Noise((4,)), "future_time_features": Noise((4, 1)),
}  # fmt: skip
DIFFUSION = {
    "sample": Noise((3, 16, 16)), "timestep": Numbers(1000), "wanted": Noise((3, 16, 16)),
}  # fmt: skip

MODELS: dict[str, Subject] = {
    "Wav2Vec2": Subject(
        "speech", "Wav2Vec2ForCTC", {"vocab_size": 16, **SPEECH, "num_feat_extract_layers": 2},
        {"input_values": Noise((160,)), "labels": Numbers(15, (4,))}, {}, "Wav2Vec2Config",
    ),
    "Whisper": Subject(
        "speech", "WhisperForConditionalGeneration", {"vocab_size": WORDS, **WHISPER},
        {"input_features": Noise((8, 32)), "labels": Numbers(WORDS, (LENGTH,))}, NO_CACHE, "WhisperConfig",
    ),
    "HuBERT": Subject(
        "speech", "HubertForCTC", {"vocab_size": 16, **SPEECH, "num_feat_extract_layers": 2},
        {"input_values": Noise((160,)), "labels": Numbers(15, (4,))}, {}, "HubertConfig",
    ),
    "Wav2Vec2-Conformer": Subject(
        "speech", "Wav2Vec2ConformerForCTC",
        {"vocab_size": 16, **SPEECH, "num_feat_extract_layers": 2, "position_embeddings_type": "relative",
         "conv_depthwise_kernel_size": 3},
        {"input_values": Noise((160,)), "labels": Numbers(15, (4,))}, {}, "Wav2Vec2ConformerConfig",
    ),
    "WavLM": Subject(
        "speech", "WavLMForSequenceClassification",
        {**SPEECH, "num_feat_extract_layers": 2, "num_labels": CLASSES, "num_buckets": 8, "max_bucket_distance": 16,
         "classifier_proj_size": 16},
        {"input_values": Noise((160,)), "labels": Numbers(CLASSES)}, {}, "WavLMConfig",
    ),
    "Moonshine": Subject(
        "speech", "MoonshineForConditionalGeneration",
        {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 2,
         "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
         "max_position_embeddings": 32, "pad_token_id": 0},
        {"input_values": Noise((1600,)), "labels": Numbers(WORDS, (LENGTH,))}, NO_CACHE, "MoonshineConfig",
    ),
    "Speech2Text": Subject(
        "speech", "Speech2TextForConditionalGeneration",
        {"vocab_size": WORDS, **S2T, "num_conv_layers": 1, "conv_kernel_sizes": (3,), "conv_channels": 16,
         "input_feat_per_channel": 8, "max_source_positions": 32, "max_target_positions": 32},
        {"input_features": Noise((16, 8)), "labels": Numbers(WORDS, (LENGTH,))}, NO_CACHE, "Speech2TextConfig",
    ),
    "AST": Subject(
        "speech", "ASTForAudioClassification",
        {**without(PATCHES, "image_size"), "num_mel_bins": 16, "max_length": 32, "frequency_stride": 4,
         "time_stride": 4, "num_labels": CLASSES},
        {"input_values": Noise((32, 16)), "labels": Numbers(CLASSES)}, {}, "ASTConfig",
    ),
    "TimeSeriesTransformer": Subject(
        "time series", "TimeSeriesTransformerForPrediction", {**SERIES, "num_time_features": 1}, PAST, {},
        "TimeSeriesTransformerConfig",
    ),
    "Informer": Subject(
        "time series", "InformerForPrediction",
        {**SERIES, "num_time_features": 1, "distil": True, "sampling_factor": 2, "attention_type": "prob"}, PAST, {},
        "InformerConfig",
    ),
    "Autoformer": Subject(
        "time series", "AutoformerForPrediction",
        {**SERIES, "num_time_features": 1, "label_length": 3, "moving_average": 3, "autocorrelation_factor": 1}, PAST,
        {}, "AutoformerConfig",
    ),
    "PatchTST": Subject(
        "time series", "PatchTSTForPrediction",
        {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "num_hidden_layers": 2,
         "d_model": 16, "num_attention_heads": 4, "ffn_dim": 24, "prediction_length": 4},
        {"past_values": Noise((16, 2)), "future_values": Noise((4, 2))}, {}, "PatchTSTConfig",
    ),
    "PatchTSMixer": Subject(
        "time series", "PatchTSMixerForPrediction",
        {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "num_layers": 2,
         "d_model": 16, "prediction_length": 4, "mode": "mix_channel", "gated_attn": True},
        {"past_values": Noise((16, 2)), "future_values": Noise((4, 2))}, {}, "PatchTSMixerConfig",
    ),
    "Decision Transformer": Subject(
        "time series", "DecisionTransformerModel",
        {"state_dim": 4, "act_dim": 3, "hidden_size": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
         "max_ep_len": 16},
        {"states": Noise((4, 4)), "actions": Noise((4, 3)), "returns_to_go": Noise((4, 1)),
         "timesteps": Numbers(16, (4,)), "wanted": Noise((4, 4))}, {}, "DecisionTransformerConfig",
    ),
    "UNet2D": Subject("diffusion", "UNet2DModel", UNET, DIFFUSION, library="diffusers"),
    "DiT": Subject(
        "diffusion", "DiTTransformer2DModel",
        {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 3, "num_layers": 2, "sample_size": 16,
         "patch_size": 4, "norm_num_groups": 1, "num_embeds_ada_norm": 1000},
        {"hidden_states": Noise((3, 16, 16)), "timestep": Numbers(1000), "class_labels": Numbers(CLASSES),
         "wanted": Noise((3, 16, 16))}, library="diffusers",
    ),
    "UNet2D-Condition": Subject(
        "diffusion", "UNet2DConditionModel",
        {**UNET, "in_channels": 3, "out_channels": 3, "cross_attention_dim": 16, "attention_head_dim": 4,
         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")},
        {**DIFFUSION, "encoder_hidden_states": Noise((5, 16))}, library="diffusers",
    ),
    "AutoencoderKL": Subject(
        "diffusion", "AutoencoderKL",
        {"block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4, "latent_channels": 2},
        {"sample": Noise((3, 16, 16)), "wanted": Noise((3, 16, 16))}, library="diffusers",
    ),
    "SD3": Subject(
        "diffusion", "SD3Transformer2DModel",
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
         "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 16, "caption_projection_dim": 32,
         "pooled_projection_dim": 16, "pos_embed_max_size": 8, "qk_norm": "rms_norm"},
        {"hidden_states": Noise((4, 8, 8)), "encoder_hidden_states": Noise((5, 16)), "pooled_projections": Noise((16,)),
         "timestep": Numbers(1000), "wanted": Noise((4, 8, 8))}, library="diffusers",
    ),
    "Flux": Subject(
        "diffusion", "FluxTransformer2DModel",
        {"patch_size": 1, "in_channels": 8, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 8,
         "num_attention_heads": 4, "joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (2, 2, 4)},
        {"hidden_states": Noise((6, 8)), "encoder_hidden_states": Noise((5, 16)), "pooled_projections": Noise((16,)),
         "timestep": Numbers(1000), "wanted": Noise((6, 8))},
        {"img_ids": torch.arange(18.0).reshape(6, 3), "txt_ids": torch.zeros(5, 3)}, library="diffusers",
    ),
    "PixArt": Subject(
        "diffusion", "PixArtTransformer2DModel",
        {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2,
         "cross_attention_dim": 32, "sample_size": 8, "caption_channels": 16, "norm_num_groups": 1},
        {"hidden_states": Noise((4, 8, 8)), "encoder_hidden_states": Noise((5, 16)), "timestep": Numbers(1000),
         "wanted": Noise((4, 8, 8))}, library="diffusers",
    ),
    "Sana": Subject(
        "diffusion", "SanaTransformer2DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2,
         "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32,
         "caption_channels": 16, "sample_size": 8},
        {"hidden_states": Noise((4, 8, 8)), "encoder_hidden_states": Noise((5, 16)), "timestep": Numbers(1000),
         "wanted": Noise((4, 8, 8))}, library="diffusers",
    ),
    "Wan": Subject(
        "diffusion", "WanTransformer3DModel",
        {"num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16,
         "freq_dim": 16, "ffn_dim": 48, "num_layers": 2, "cross_attn_norm": True},
        {"hidden_states": Noise((4, 2, 4, 4)), "timestep": Numbers(1000), "encoder_hidden_states": Noise((5, 16)),
         "wanted": Noise((4, 2, 4, 4))}, library="diffusers",
    ),
    "VQ-VAE": Subject(
        "diffusion", "VQModel",
        {"block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4, "latent_channels": 2,
         "num_vq_embeddings": 8},
        {"sample": Noise((3, 16, 16)), "wanted": Noise((3, 16, 16))}, library="diffusers",
    ),
    "Prior": Subject(
        "diffusion", "PriorTransformer",
        {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "embedding_dim": 16, "num_embeddings": 5},
        {"hidden_states": Noise((16,)), "timestep": Numbers(1000), "proj_embedding": Noise((16,)),
         "encoder_hidden_states": Noise((5, 16)), "wanted": Noise((16,))}, library="diffusers",
    ),
}  # fmt: skip
