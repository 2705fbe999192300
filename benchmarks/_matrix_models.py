"""Architectures of `transformers` and `diffusers` as data: a small configuration each, and how its batch is drawn.

No model has a line of code of its own here: each is built from its class, its configuration class and options, with
random weights, and is called by the names of its inputs. What a configuration says about dropout stays as it is; only
what draws in Python (dropped layers, masked time steps) is off, since a program has no such draws.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, LENGTH, WORDS, CLASSES = 8, 12, 48, 6
"""Samples of a batch, words of a sample, words of a vocabulary, classes of images."""


@dataclass(frozen=True)
class Numbers:
    """Whole numbers below `below`, of this shape behind the batch."""

    below: int
    shape: tuple[int, ...] = ()

    def draw(self, g: torch.Generator) -> Tensor:
        return torch.randint(self.below, (ROWS, *self.shape), generator=g)


@dataclass(frozen=True)
class Noise:
    """Normal numbers of this shape behind the batch."""

    shape: tuple[int, ...]

    def draw(self, g: torch.Generator) -> Tensor:
        return torch.randn(ROWS, *self.shape, generator=g)


class Task(nn.Module):
    """The loss of a model whose inputs have names; `wanted` is compared with what it gives first."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], constants: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.names, self.constants = model, names, dict(constants)

    def forward(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.names, inputs, strict=True))
        wanted = given.pop("wanted", None)
        out = self.model(**given, **self.constants)
        return out.loss if wanted is None else F.mse_loss(out[0], wanted)


@dataclass(frozen=True)
class Subject:
    """An architecture: class of the model, its options, the inputs of a batch, and what else it is called with."""

    family: str
    model: str
    options: Mapping[str, Any]
    batch: Mapping[str, Numbers | Noise]
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    config: str = ""
    library: str = "transformers"

    def make(self) -> Task:
        """The model with random weights, the same ones after the same seed."""
        library = importlib.import_module(self.library)
        cls = getattr(library, self.model)
        made = cls(getattr(library, self.config)(**self.options)) if self.config else cls(**self.options)
        return Task(made.train(), tuple(self.batch), self.constants)

    def draw(self, seed: int) -> tuple[Tensor, ...]:
        """A batch, in the order of the inputs' names."""
        g = torch.Generator().manual_seed(seed)
        return tuple(part.draw(g) for part in self.batch.values())


TEXT = {"input_ids": Numbers(WORDS, (LENGTH,)), "labels": Numbers(WORDS, (LENGTH,))}
NO_CACHE = {"use_cache": False}


def text(family: str, model: str, config: str, **options: Any) -> Subject:
    """A model of words that gives the loss of labels."""
    return Subject(family, model, {"vocab_size": WORDS, **options}, TEXT, NO_CACHE, config)


def encoder(model: str, config: str, **options: Any) -> Subject:
    return Subject("encoder", model, {"vocab_size": WORDS, **options}, TEXT, {}, config)


def vision(model: str, config: str, side: int = 16, **options: Any) -> Subject:
    """A model of images that gives the loss of classes."""
    batch = {"pixel_values": Noise((3, side, side)), "labels": Numbers(CLASSES)}
    return Subject("vision", model, {"num_labels": CLASSES, **options}, batch, {}, config)


LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
BERT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
PATCHES = {**{k: BERT[k] for k in BERT if k != "max_position_embeddings"}, "image_size": 16, "patch_size": 4}
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
UNET = {
    "sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
CLIP_TEXT = {**BERT, "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": WORDS - 1}
CLIP = {"text_config": CLIP_TEXT, "vision_config": PATCHES, "projection_dim": 16}
DIFFUSION = {
    "sample": Noise((3, 16, 16)), "timestep": Numbers(1000), "wanted": Noise((3, 16, 16)),
}  # fmt: skip

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
    "T5": text(
        "encoder-decoder", "T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=48, num_layers=1,
        num_heads=4, decoder_start_token_id=0,
    ),
    "BART": text(
        "encoder-decoder", "BartForConditionalGeneration", "BartConfig", d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_position_embeddings=32,
    ),
    "ViT": vision("ViTForImageClassification", "ViTConfig", **PATCHES),
    "DINOv2": vision("Dinov2ForImageClassification", "Dinov2Config", **{
        **{k: v for k, v in PATCHES.items() if k != "intermediate_size"}, "mlp_ratio": 2
    }),
    "BEiT": vision("BeitForImageClassification", "BeitConfig", **PATCHES, drop_path_rate=0.0),
    "ConvNeXt": vision(
        "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=(16, 32), depths=(1, 1), num_stages=2,
        patch_size=2, layer_scale_init_value=0.1,
    ),
    "ResNet": vision(
        "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=(16, 32), depths=(1, 1),
        layer_type="basic",
    ),
    "Swin": vision(
        "SwinForImageClassification", "SwinConfig", image_size=16, patch_size=2, embed_dim=16, depths=(2, 2),
        num_heads=(2, 4), window_size=4, drop_path_rate=0.0,
    ),
    "CLIP": Subject(
        "vision", "CLIPModel", CLIP, {"input_ids": Numbers(WORDS, (LENGTH,)), "pixel_values": Noise((3, 16, 16))},
        {"return_loss": True}, "CLIPConfig",
    ),
    "Wav2Vec2": Subject(
        "speech", "Wav2Vec2ForCTC", {"vocab_size": 16, **SPEECH, "num_feat_extract_layers": 2},
        {"input_values": Noise((160,)), "labels": Numbers(15, (4,))}, {}, "Wav2Vec2Config",
    ),
    "Whisper": Subject(
        "speech", "WhisperForConditionalGeneration", {"vocab_size": WORDS, **WHISPER},
        {"input_features": Noise((8, 32)), "labels": Numbers(WORDS, (LENGTH,))}, NO_CACHE, "WhisperConfig",
    ),
    "UNet2D": Subject("diffusion", "UNet2DModel", UNET, DIFFUSION, library="diffusers"),
    "DiT": Subject(
        "diffusion", "DiTTransformer2DModel",
        {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 3, "num_layers": 2, "sample_size": 16,
         "patch_size": 4, "norm_num_groups": 1, "num_embeds_ada_norm": 1000},
        {"hidden_states": Noise((3, 16, 16)), "timestep": Numbers(1000), "class_labels": Numbers(CLASSES),
         "wanted": Noise((3, 16, 16))}, library="diffusers",
    ),
    "Mixtral": text("experts", "MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=4),
    "Qwen3-MoE": text("experts", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **LLAMA, **MOE, head_dim=8),
    "DeepSeek-V3": text(
        "experts", "DeepseekV3ForCausalLM", "DeepseekV3Config",
        **{**LLAMA, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        n_group=2, topk_group=1, kv_lora_rank=8, q_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1,
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
    "Gemma-3": text(
        "decoder", "Gemma3ForCausalLM", "Gemma3TextConfig", **LLAMA, head_dim=8, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "OLMo-2": text("decoder", "Olmo2ForCausalLM", "Olmo2Config", **LLAMA),
    "StableLM": text("decoder", "StableLmForCausalLM", "StableLmConfig", **LLAMA, use_qkv_bias=True),
    "ELECTRA": encoder("ElectraForMaskedLM", "ElectraConfig", **BERT, embedding_size=16),
    "SegFormer": vision(
        "SegformerForImageClassification", "SegformerConfig", 32, num_encoder_blocks=2, depths=(1, 1),
        hidden_sizes=(16, 32), num_attention_heads=(2, 4), sr_ratios=(2, 1), patch_sizes=(7, 3), strides=(4, 2),
        mlp_ratios=(2, 2), drop_path_rate=0.0,
    ),
    "MobileViT": vision(
        "MobileViTForImageClassification", "MobileViTConfig", 64, image_size=64, hidden_sizes=(16, 24, 32),
        neck_hidden_sizes=(8, 8, 16, 16, 24, 32, 32), num_attention_heads=4, expand_ratio=2.0,
    ),
    "HuBERT": Subject(
        "speech", "HubertForCTC", {"vocab_size": 16, **SPEECH, "num_feat_extract_layers": 2},
        {"input_values": Noise((160,)), "labels": Numbers(15, (4,))}, {}, "HubertConfig",
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
    "Granite-MoE": text(
        "experts", "GraniteMoeForCausalLM", "GraniteMoeConfig", **LLAMA, num_local_experts=4, num_experts_per_tok=2,
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
}  # fmt: skip
"""Name in the table → architecture."""
