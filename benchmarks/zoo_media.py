"""The zoo's models of sound, images, several of them, and series, as data."""

from __future__ import annotations

from benchmarks.zoo_models import (
    HIDDEN,
    WORDS,
    Entry,
    Settings,
    classes,
    features,
    generating,
    headed,
    images,
    joined,
    masks,
    normal,
    series,
    words,
)
from benchmarks.zoo_text import GPT, SEQ2SEQ, TEXT

VIT: Settings = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
    **{"image_size": 32, "patch_size": 8, "num_labels": 5},
}
#: Four stages.
STAGES: Settings = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 12, 16, 24], "num_labels": 5}
AUDIO: Settings = {
    **{key: TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
    **{"vocab_size": 32, "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2)},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0},
}
MOBILE: Settings = {"patch_size": 2, "base_attn_unit_dims": [16, 24, 32], "width_multiplier": 0.25, "num_labels": 5}
SERIES: Settings = {
    **{"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
}
SWIN: Settings = {
    **{"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [1, 2], "window_size": 4},
    "num_labels": 5,
}
PATCHES: Settings = {
    **{"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "prediction_length": 4},
    **{"d_model": 16, "num_attention_heads": 2, "ffn_dim": 24, "num_hidden_layers": 2},
}
HEADS: Settings = {"num_attention_heads": [1, 2, 2, 2]}
FOCAL: Settings = {
    **{"num_labels": 5, "embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16], "focal_levels": [2, 2]},
    **{"focal_windows": [3, 3], "image_size": 32},
}
HIERA: Settings = {
    **{"num_labels": 5, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "image_size": [32, 32]},
    **{"num_query_pool": 1, "masked_unit_size": [4, 4], "masked_unit_attention": [True, False]},
}
MEL: Settings = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
FILTERS: Settings = {
    **{"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64, "max_target_positions": 64},
}
STABLE: Settings = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}
SPECTRUM: Settings = {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8}
BOXES: Settings = {"image_size": [32, 32], "num_detection_tokens": 4}
LATENTS: Settings = {
    **{"d_model": 32, "num_latents": 6, "d_latents": 24, "num_self_attends_per_block": 2, "qk_channels": 16},
    **{"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "v_channels": 24, "max_position_embeddings": 16},
}
STATES: Settings = {"state_dim": 7, "act_dim": 3, "max_ep_len": 96}
SOUND, VIDEO, PAST = normal(input_values=(400,)), normal(pixel_values=(4, 3, 32, 32)), normal(past_values=(32, 2))
DECODED, BOTH = words(decoder_input_ids=6), joined(WORDS, images())
TRAJECTORY = joined(
    normal(states=(5, 7), actions=(5, 3), rewards=(5, 1), returns_to_go=(5, 1)), words(timesteps=5), masks(5)
)
EMBEDDED, FORECAST = ("text_embeds", "image_embeds"), ("prediction_outputs",)
ACTIONS = ("state_preds", "action_preds", "return_preds")
AUDIOS = (
    generating("whisper", "Whisper", {**SEQ2SEQ, **MEL}, joined(normal(input_features=(8, 32)), DECODED)),
    generating(
        "speech-to-text", "Speech2Text", {**SEQ2SEQ, **FILTERS}, joined(normal(input_features=(32, 8)), DECODED)
    ),
    headed("wav2vec2", "Wav2Vec2", "ForCTC", AUDIO, SOUND),
    headed("wav2vec2-stable", "Wav2Vec2", "ForCTC", {**AUDIO, **STABLE}, SOUND),
    headed("hubert", "Hubert", "ForCTC", AUDIO, SOUND),
    headed("wavlm", "WavLM", "ForCTC", AUDIO, SOUND, num_buckets=8, max_bucket_distance=16),
    headed("unispeech", "UniSpeech", "ForCTC", AUDIO, SOUND),
    headed("sew", "SEW", "ForCTC", AUDIO, normal(input_values=(800,))),
    headed(
        "data2vec-audio",
        "Data2VecAudio",
        "ForCTC",
        {**AUDIO, "num_conv_pos_embeddings": 2},
        SOUND,
        conv_pos_kernel_size=3,
    ),
    headed("audio-spectrogram", "AST", "ForAudioClassification", {**VIT, **SPECTRUM}, normal(input_values=(32, 16))),
)
VISION = (
    classes("vit", "ViT", VIT),
    classes("deit", "DeiT", VIT),
    classes("swin", "Swin", SWIN),
    classes("swinv2", "Swinv2", SWIN),
    classes("beit", "Beit", VIT, use_relative_position_bias=True),
    classes("data2vec-vision", "Data2VecVision", VIT, use_relative_position_bias=True),
    classes("convnext", "ConvNext", STAGES),
    classes("convnextv2", "ConvNextV2", STAGES),
    classes("resnet", "ResNet", STAGES, embedding_size=8),
    classes("regnet", "RegNet", STAGES, embedding_size=8, groups_width=4),
    classes("bit", "Bit", STAGES, hidden_sizes=[16, 24, 32, 40], embedding_size=8, num_groups=4),
    classes(
        "efficientnet",
        "EfficientNet",
        {"num_labels": 5},
        width_coefficient=0.25,
        depth_coefficient=0.2,
        hidden_dim=320,
        image_size=32,
    ),
    classes("mobilenet-v1", "MobileNetV1", {"num_labels": 5}, depth_multiplier=0.25),
    classes("mobilenet-v2", "MobileNetV2", {"num_labels": 5}, depth_multiplier=0.25),
    classes(
        "mobilevit",
        "MobileViT",
        VIT,
        64,
        hidden_sizes=[16, 24, 32],
        patch_size=2,
        neck_hidden_sizes=[4, 8, 12, 16, 20, 24, 32],
    ),
    classes(
        "mobilevitv2",
        "MobileViTV2",
        {**VIT, "base_attn_unit_dims": [16, 24, 32]},
        64,
        patch_size=2,
        width_multiplier=0.25,
    ),
    classes("segformer", "Segformer", STAGES, **HEADS),
    headed(
        "segformer-maps",
        "Segformer",
        "ForSemanticSegmentation",
        STAGES,
        images(),
        **HEADS,
        decoder_hidden_size=16,
    ),
    classes("poolformer", "PoolFormer", STAGES, 64),
    classes("cvt", "Cvt", {"num_labels": 5}, embed_dim=[8, 16, 24], depth=[1, 2, 3], num_heads=[1, 2, 2]),
    classes(
        "levit",
        "Levit",
        {"num_labels": 5},
        size=64,
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    classes("pvt", "Pvt", STAGES, 64, **HEADS, image_size=64),
    classes("pvt-v2", "PvtV2", STAGES, 64, **HEADS, image_size=64),
    classes("dinov2", "Dinov2", VIT),
    classes("dinov2-registers", "Dinov2WithRegisters", VIT, num_register_tokens=2),
    features("dinov3", "DINOv3ViT", "Model", VIT, images(), num_register_tokens=2),
    features(
        "vit-mae",
        "ViTMAE",
        "ForPreTraining",
        VIT,
        images(),
        ("logits",),
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=24,
    ),
    classes("focalnet", "FocalNet", FOCAL),
    classes("swiftformer", "SwiftFormer", {"num_labels": 5}, depths=[1, 1, 1, 1], embed_dims=[8, 12, 16, 24]),
    classes("hiera", "Hiera", HIERA),
    classes("vit-msn", "ViTMSN", VIT),
    classes("ijepa", "IJepa", VIT),
    headed("videomae", "VideoMAE", "ForVideoClassification", VIT, VIDEO, num_frames=4),
    headed("vivit", "Vivit", "ForVideoClassification", {**VIT, "tubelet_size": [2, 8, 8]}, VIDEO, num_frames=4),
    headed("timesformer", "Timesformer", "ForVideoClassification", VIT, VIDEO, num_frames=4),
    features("yolos", "Yolos", "ForObjectDetection", {**VIT, **BOXES}, images(), ("logits", "pred_boxes")),
    features(
        "glpn",
        "GLPN",
        "ForDepthEstimation",
        {**STAGES, **HEADS},
        images(64),
        ("predicted_depth",),
        decoder_hidden_size=8,
    ),
)
DUAL = {"text_config": {**TEXT, "projection_dim": 16}, "vision_config": {**VIT, "projection_dim": 16}}
OTHERS = (
    features("clip-text", "CLIPText", "ModelWithProjection", TEXT, WORDS, (*HIDDEN, "text_embeds"), projection_dim=16),
    features(
        "clip-vision", "CLIPVision", "ModelWithProjection", VIT, images(), (*HIDDEN, "image_embeds"), projection_dim=16
    ),
    features("clip", "CLIP", "Model", DUAL, BOTH, EMBEDDED, projection_dim=16),
    features("clip-scores", "CLIP", "Model", DUAL, BOTH, ("logits_per_text",), projection_dim=16),
    features("siglip", "Siglip", "Model", DUAL, BOTH, EMBEDDED),
    features("siglip-vision", "SiglipVision", "Model", VIT, images()),
    features("blip", "Blip", "Model", DUAL, BOTH, EMBEDDED, projection_dim=16),
    headed("vilt", "Vilt", "ForQuestionAnswering", {**TEXT, **VIT}, BOTH),
    headed("perceiver", "Perceiver", "ForMaskedLM", {**TEXT, **LATENTS}, joined(words(inputs=16), masks(16))),
    features("time-series-transformer", "TimeSeriesTransformer", "Model", SERIES, series(), HIDDEN),
    features("informer", "Informer", "Model", SERIES, series(), HIDDEN),
    features("patchtst", "PatchTST", "ForPrediction", PATCHES, PAST, FORECAST, loss="mse"),
    features("patchtsmixer", "PatchTSMixer", "ForPrediction", PATCHES, PAST, FORECAST, num_layers=2),
    features("decision-transformer", "DecisionTransformer", "Model", {**GPT, **STATES}, TRAJECTORY, ACTIONS),
    features("git", "Git", "Model", TEXT, BOTH, HIDDEN, vision_config=VIT),
)
#: Functions of torchvision's that make a classifier, and the size of its images.
PICTURES = {
    **dict.fromkeys(("resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "densenet121"), 32),
    **dict.fromkeys(("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "shufflenet_v2_x1_0"), 32),
    **dict.fromkeys(("efficientnet_b0", "efficientnet_v2_s", "mnasnet1_0", "regnet_y_400mf", "regnet_x_400mf"), 32),
    **dict.fromkeys(("convnext_tiny", "swin_t", "swin_v2_t"), 32),
    **dict.fromkeys(("alexnet", "squeezenet1_0", "vgg11", "vgg11_bn", "googlenet"), 64),
    **{"inception_v3": 96, "vit_b_32": 224, "maxvit_t": 224},
}
FIXED: Settings = {"googlenet": {"init_weights": True}, "inception_v3": {"init_weights": True}}
TORCHVISION = tuple(
    Entry(
        f"torchvision-{name}",
        "",
        {"weights": None, "num_classes": 5, **FIXED.get(name, {})},
        name,
        images(size, name="x"),
        library="torchvision.models",
    )
    for name, size in PICTURES.items()
)
MEDIA = (*AUDIOS, *VISION, *OTHERS, *TORCHVISION)
