"""The zoo's models of text, as data."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.zoo_models import (
    WORDS,
    Entry,
    Settings,
    causal,
    features,
    generating,
    headed,
    joined,
    masked,
    masks,
    pairs,
    without,
    words,
)

SPECIAL: Settings = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT: Settings = {
    **SPECIAL,
    **{"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 64},
}
ENCODER = {**TEXT, "type_vocab_size": 2}
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 16}
EXPERTS = {
    **DECODER,
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "experts_implementation": "batched_mm"},
}
EAGER: Settings = {"experts_implementation": "eager"}
SEQ2SEQ: Settings = {
    **SPECIAL,
    **{"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 2},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"max_position_embeddings": 64, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
}
T5: Settings = {
    **{"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2},
    **{"num_heads": 2, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0},
}
GPT = {**TEXT, "n_positions": 64}
HYBRID = {
    **EXPERTS,
    **{"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_expand": 2},
    **{"expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False},
}
STATE_SPACE_2: Settings = {"state_size": 4, "head_dim": 16, "num_heads": 4, "n_groups": 1, "chunk_size": 4}
RELATIVE: Settings = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
REFORMER = {
    **{"attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "num_buckets": 2},
    **{"attention_head_size": 16, "feed_forward_size": 48, "is_decoder": True},
    **{"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
}
FUNNEL = {"block_sizes": [1, 1], "d_head": 16, "d_inner": 48, "num_decoder_layers": 1}
LATENT: Settings = {
    **{"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"head_dim": 8, "num_key_value_heads": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "n_shared_experts": 1,
}
LINEAR: Settings = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
}
SQUEEZED: Settings = {
    "embedding_size": 32,
    **dict.fromkeys(("q_groups", "k_groups", "v_groups", "intermediate_groups", "output_groups"), 2),
}
BLOCKS: Settings = {"block_size": 4, "num_random_blocks": 1}
LANDMARKS: Settings = {"segment_means_seq_len": 16, "num_landmarks": 4, "conv_kernel_size": 5}
GLOBAL: Settings = {"local_radius": 3, "global_block_size": 4, "encoder_attention_type": "transient-global"}
SWITCH: Settings = {
    **{"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 8},
    "experts_implementation": "batched_mm",
}
WINDOWED: Settings = {
    **{"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
}
AHEAD: Settings = {
    **{"num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "num_buckets": 8},
    "relative_max_distance": 16,
}
DECODERS = (
    headed("gpt2", "GPT2", "LMHeadModel", GPT, WORDS),
    headed("openai-gpt", "OpenAIGPT", "LMHeadModel", GPT, WORDS),
    causal("gpt-bigcode", "GPTBigCode", GPT),
    causal("llama", "Llama", DECODER),
    causal("qwen2", "Qwen2", DECODER),
    causal("qwen3", "Qwen3", DECODER),
    causal("gemma", "Gemma", DECODER),
    causal("gemma2", "Gemma2", DECODER, sliding_window=4),
    Entry("gemma3", "Gemma3TextConfig", {**DECODER, "sliding_window": 4}, "Gemma3ForCausalLM", WORDS),
    causal("mistral", "Mistral", DECODER, sliding_window=4),
    causal("mixtral", "Mixtral", EXPERTS),
    causal("mixtral-eager", "Mixtral", EXPERTS, **EAGER),
    causal("phi", "Phi", TEXT),
    causal("phi3", "Phi3", TEXT),
    causal("opt", "OPT", TEXT, ffn_dim=48, word_embed_proj_dim=16),
    causal("bloom", "Bloom", TEXT),
    causal("gpt-neox", "GPTNeoX", TEXT),
    causal("gpt-neo", "GPTNeo", TEXT, num_layers=2, attention_types=[[["global", "local"], 1]], window_size=4),
    causal("gptj", "GPTJ", GPT, rotary_dim=8),
    causal("falcon", "Falcon", TEXT),
    causal("falcon-alibi", "Falcon", TEXT, alibi=True, new_decoder_architecture=True, num_kv_heads=1),
    causal("mpt", "Mpt", {**SPECIAL, "vocab_size": 99, "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64}),
    causal("stablelm", "StableLm", DECODER),
    causal("cohere", "Cohere", DECODER),
    causal("cohere2", "Cohere2", DECODER, sliding_window=4),
    causal("olmo", "Olmo", DECODER),
    causal("olmo2", "Olmo2", DECODER),
    causal("olmo3", "Olmo3", DECODER, sliding_window=4),
    causal("olmoe", "Olmoe", EXPERTS),
    causal("granite", "Granite", DECODER),
    causal("granite-moe", "GraniteMoe", EXPERTS),
    causal("starcoder2", "Starcoder2", DECODER),
    causal("codegen", "CodeGen", {**GPT, "num_attention_heads": 4}, rotary_dim=4),
    causal("persimmon", "Persimmon", TEXT),
    causal("nemotron", "Nemotron", DECODER),
    causal("glm", "Glm", DECODER),
    causal("glm4", "Glm4", DECODER),
    causal("smollm3", "SmolLM3", DECODER),
    causal("deepseek-v2", "DeepseekV2", EXPERTS, **LATENT),
    causal("deepseek-v3", "DeepseekV3", EXPERTS, **LATENT),
    causal("deepseek-v3-eager", "DeepseekV3", EXPERTS, **LATENT, **EAGER),
    causal("qwen2-moe", "Qwen2Moe", EXPERTS),
    causal("qwen3-moe", "Qwen3Moe", EXPERTS),
    causal("qwen3-moe-eager", "Qwen3Moe", EXPERTS, **EAGER),
    causal("qwen3-next", "Qwen3Next", EXPERTS, **LINEAR),
    causal("gpt-oss", "GptOss", EXPERTS, sliding_window=4),
    causal("jamba", "Jamba", HYBRID),
    causal("recurrent-gemma", "RecurrentGemma", DECODER, block_types=["recurrent", "attention"], lru_width=32),
    causal("mamba", "Mamba", TEXT, state_size=4, time_step_rank=4),
    causal("mamba2", "Mamba2", TEXT, **STATE_SPACE_2),
    causal("falcon-mamba", "FalconMamba", TEXT, state_size=4, time_step_rank=4),
    causal("rwkv", "Rwkv", TEXT, attention_hidden_size=32, context_length=64, use_cache=False),
    replace(causal("xglm", "XGLM", TEXT, ffn_dim=48, attention_heads=2, num_layers=2, d_model=32), double=True),
    headed("ctrl", "CTRL", "LMHeadModel", GPT, WORDS, dff=48),
    causal("biogpt", "BioGpt", TEXT),
    causal("helium", "Helium", DECODER),
    causal("arcee", "Arcee", DECODER),
    causal("exaone4", "Exaone4", DECODER, sliding_window=4),
    causal("ernie4.5", "Ernie4_5", DECODER),
    causal("seed-oss", "SeedOss", DECODER),
    causal("diffllama", "DiffLlama", DECODER, num_key_value_heads=2),
    causal("lfm2", "Lfm2", DECODER, layer_types=["conv", "full_attention"]),
    causal("apertus", "Apertus", DECODER),
    causal("phimoe", "Phimoe", EXPERTS),
    headed("xlnet", "XLNet", "LMHeadModel", without(TEXT, "max_position_embeddings"), WORDS, d_inner=48, d_head=16),
    replace(
        headed("reformer", "Reformer", "ModelWithLMHead", {**TEXT, **REFORMER}, words(16)),
        mode="train",  # it has no gradients otherwise
    ),
)
ENCODERS = (
    masked("bert", "Bert", ENCODER),
    masked("roberta", "Roberta", ENCODER),
    masked("distilbert", "DistilBert", ENCODER, hidden_dim=48),
    masked("albert", "Albert", ENCODER, embedding_size=16),
    masked("deberta", "Deberta", ENCODER, **RELATIVE, position_biased_input=False),
    masked("deberta-v2", "DebertaV2", ENCODER, **RELATIVE, position_buckets=8),
    masked("electra", "Electra", ENCODER, embedding_size=16),
    masked("mpnet", "MPNet", ENCODER),
    headed("funnel", "Funnel", "ForMaskedLM", {**without(TEXT, "num_hidden_layers"), **FUNNEL}, WORDS),
    masked("convbert", "ConvBert", ENCODER, embedding_size=16, conv_kernel_size=3),
    masked("fnet", "FNet", ENCODER),
    masked("roformer", "RoFormer", ENCODER, embedding_size=16),
    masked("squeezebert", "SqueezeBert", {**ENCODER, **SQUEEZED}),
    masked("longformer", "Longformer", ENCODER, words(16), attention_window=4),
    masked("big-bird", "BigBird", {**ENCODER, **BLOCKS}, words(48)),
    masked("nystromformer", "Nystromformer", {**ENCODER, **LANDMARKS}, words(16)),
    masked("nystromformer-plain", "Nystromformer", {**ENCODER, **LANDMARKS, "num_landmarks": 16}, words(16)),
    masked("modernbert", "ModernBert", ENCODER, cls_token_id=1, sep_token_id=2, local_attention=4),
    masked("xlm-roberta", "XLMRoberta", ENCODER),
    masked("camembert", "Camembert", ENCODER),
    masked("ernie", "Ernie", ENCODER),
    masked("mobilebert", "MobileBert", ENCODER, embedding_size=16, intra_bottleneck_size=16),
    masked("megatron-bert", "MegatronBert", ENCODER),
    masked("rembert", "RemBert", ENCODER, input_embedding_size=16, output_embedding_size=24),
    masked("data2vec-text", "Data2VecText", ENCODER),
    masked("ibert", "IBert", ENCODER),
    masked("luke", "Luke", ENCODER, entity_vocab_size=20, entity_emb_size=16),
    masked("esm", "Esm", ENCODER, mask_token_id=4),
    headed("xlm", "XLM", "WithLMHeadModel", TEXT, WORDS),
    headed("flaubert", "Flaubert", "WithLMHeadModel", TEXT, WORDS),
    masked("yoso", "Yoso", ENCODER, use_expectation=True),
    features("splinter", "Splinter", "Model", TEXT, WORDS),
)
SEQ2SEQS = (
    generating("t5", "T5", T5, pairs()),
    generating("mt5", "MT5", T5, pairs()),
    generating("umt5", "UMT5", T5, pairs()),
    generating("longt5", "LongT5", {**T5, **GLOBAL}, pairs(16)),
    generating("longt5-mask", "LongT5", {**T5, **GLOBAL}, joined(pairs(16), masks(16))),
    generating("switch-transformers", "SwitchTransformers", {**T5, **SWITCH}, joined(pairs(), masks(8))),
    generating("bart", "Bart", SEQ2SEQ, pairs()),
    generating("mbart", "MBart", SEQ2SEQ, pairs()),
    generating("pegasus", "Pegasus", SEQ2SEQ, pairs()),
    generating("pegasus-x", "PegasusX", SEQ2SEQ, pairs(16), block_size=4, num_global_tokens=3),
    generating("led", "LED", {**SEQ2SEQ, **WINDOWED}, pairs(16)),
    generating("m2m100", "M2M100", SEQ2SEQ, pairs()),
    generating("prophetnet", "ProphetNet", {**without(TEXT, "num_hidden_layers"), **AHEAD}, pairs()),
    generating("blenderbot", "Blenderbot", SEQ2SEQ, pairs()),
    generating("blenderbot-small", "BlenderbotSmall", SEQ2SEQ, pairs()),
    headed("marian", "Marian", "MTModel", SEQ2SEQ, pairs()),
    generating("plbart", "PLBart", SEQ2SEQ, pairs()),
    generating("mvp", "Mvp", SEQ2SEQ, pairs()),
    generating("bigbird-pegasus", "BigBirdPegasus", {**SEQ2SEQ, **BLOCKS}, pairs(48)),
)
TEXTS = (*DECODERS, *ENCODERS, *SEQ2SEQS)
