"""Architectures of images, alone or with text."""

from __future__ import annotations

from benchmarks._matrix_subject import BERT, LENGTH, PATCHES, TEXT, WORDS, Noise, Numbers, Subject, vision

CLIP_TEXT = {**BERT, "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": WORDS - 1}
CLIP = {"text_config": CLIP_TEXT, "vision_config": PATCHES, "projection_dim": 16}
BACKBONE = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
    "out_features": ["stage2"],
}  # fmt: skip
DETR = {
    "num_queries": 4, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
    "backbone_config": BACKBONE, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "auxiliary_loss": False,
}  # fmt: skip

MODELS: dict[str, Subject] = {
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
    "SegFormer": vision(
        "SegformerForImageClassification", "SegformerConfig", 32, num_encoder_blocks=2, depths=(1, 1),
        hidden_sizes=(16, 32), num_attention_heads=(2, 4), sr_ratios=(2, 1), patch_sizes=(7, 3), strides=(4, 2),
        mlp_ratios=(2, 2), drop_path_rate=0.0,
    ),
    "MobileViT": vision(
        "MobileViTForImageClassification", "MobileViTConfig", 64, image_size=64, hidden_sizes=(16, 24, 32),
        neck_hidden_sizes=(8, 8, 16, 16, 24, 32, 32), num_attention_heads=4, expand_ratio=2.0,
    ),
    "Swinv2": vision(
        "Swinv2ForImageClassification", "Swinv2Config", image_size=16, patch_size=2, embed_dim=16, depths=(1, 1),
        num_heads=(2, 4), window_size=4, drop_path_rate=0.0,
    ),
    "PoolFormer": vision(
        "PoolFormerForImageClassification", "PoolFormerConfig", hidden_sizes=(8, 16), depths=(1, 1),
        num_encoder_blocks=2, patch_sizes=(3, 3), strides=(2, 2), padding=(1, 1), drop_path_rate=0.0,
    ),
    "LeViT": vision(
        "LevitForImageClassification", "LevitConfig", 32, image_size=32, hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8], mlp_ratio=[2, 2, 2],
        attention_ratio=[2, 2, 2], drop_path_rate=0,
    ),
    "Hiera": vision(
        "HieraForImageClassification", "HieraConfig", image_size=(16, 16), embed_dim=8, patch_size=(3, 3),
        patch_stride=(2, 2), patch_padding=(1, 1), depths=(1, 2), num_heads=(1, 2), query_stride=(2, 2),
        masked_unit_size=(4, 4), masked_unit_attention=(True, False), num_query_pool=1, drop_path_rate=0.0,
    ),
    "CvT": vision(
        "CvtForImageClassification", "CvtConfig", patch_sizes=(3, 3), patch_stride=(2, 2), patch_padding=(1, 1),
        embed_dim=(8, 16), num_heads=(1, 2), depth=(1, 2), mlp_ratio=(2.0, 2.0), attention_drop_rate=(0.0, 0.0),
        drop_rate=(0.0, 0.0), drop_path_rate=(0.0, 0.0), qkv_bias=(True, True), cls_token=(False, True),
        qkv_projection_method=("dw_bn", "dw_bn"), kernel_qkv=(3, 3), padding_kv=(1, 1), stride_kv=(2, 2),
        padding_q=(1, 1), stride_q=(1, 1),
    ),
    "FocalNet": vision(
        "FocalNetForImageClassification", "FocalNetConfig", image_size=16, patch_size=2, embed_dim=8, depths=(1, 1),
        hidden_sizes=(8, 16), focal_levels=(2, 2), focal_windows=(3, 3), drop_path_rate=0.0,
    ),
    "EfficientNet": vision(
        "EfficientNetForImageClassification", "EfficientNetConfig", image_size=16, width_coefficient=0.25,
        depth_coefficient=0.1, hidden_dim=320, kernel_sizes=[3, 5], in_channels=[32, 16], out_channels=[16, 24],
        strides=[1, 2], num_block_repeats=[1, 1], expand_ratios=[1, 2], depthwise_padding=[], drop_connect_rate=0.0,
    ),
    "DETR": Subject(
        "vision", "DetrModel",
        DETR, {"pixel_values": Noise((3, 32, 32)), "wanted": Noise((4, 32))}, {}, "DetrConfig",
    ),
    "Conditional DETR": Subject(
        "vision", "ConditionalDetrModel",
        DETR, {"pixel_values": Noise((3, 32, 32)), "wanted": Noise((4, 32))}, {}, "ConditionalDetrConfig",
    ),
    "ViT-MAE": Subject(
        "vision", "ViTMAEForPreTraining",
        {**PATCHES, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
         "decoder_intermediate_size": 24},
        {"pixel_values": Noise((3, 16, 16)), "noise": Noise((16,))}, {}, "ViTMAEConfig",
    ),
    "SAM": Subject(
        "vision", "SamModel",
        {"vision_config": {"hidden_size": 16, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                           "image_size": 16, "patch_size": 4, "window_size": 2, "global_attn_indexes": [1],
                           "num_pos_feats": 8, "mlp_dim": 24},
         "prompt_encoder_config": {"hidden_size": 16, "image_size": 16, "patch_size": 4, "mask_input_channels": 4},
         "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 24, "num_attention_heads": 2,
                                 "iou_head_hidden_dim": 16}},
        {"pixel_values": Noise((3, 16, 16)), "input_points": Noise((1, 2, 2)), "wanted": Noise((1, 3))}, {},
        "SamConfig",
    ),
    "SigLIP": Subject(
        "vision", "SiglipModel",
        {"text_config": {**CLIP_TEXT, "max_position_embeddings": LENGTH}, "vision_config": PATCHES},
        {"input_ids": Numbers(WORDS, (LENGTH,)), "pixel_values": Noise((3, 16, 16))}, {"return_loss": True},
        "SiglipConfig",
    ),
    "BLIP": Subject(
        "vision", "BlipForConditionalGeneration",
        {"text_config": {**CLIP_TEXT, "sep_token_id": 2, "encoder_hidden_size": 32}, "vision_config": PATCHES,
         "projection_dim": 16},
        {**TEXT, "pixel_values": Noise((3, 16, 16))}, {}, "BlipConfig",
    ),
    "ViLT": Subject(
        "vision", "ViltForMaskedLM", {"vocab_size": WORDS, **BERT, **PATCHES, "max_image_length": -1},
        {**TEXT, "pixel_values": Noise((3, 16, 16))}, {}, "ViltConfig",
    ),
}  # fmt: skip
