"""Fields of public configurations, as published, that decide a model's memory."""

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B = {
    **LLAMA, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256,
    "tie_word_embeddings": False, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = {
    **LLAMA_8B, "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80,
    "intermediate_size": 28672,
}  # fmt: skip
LLAMA_1B = {
    **LLAMA_8B, "hidden_size": 2048, "head_dim": 64, "num_hidden_layers": 16, "intermediate_size": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
MISTRAL_7B = {
    "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 32000, "sliding_window": 4096,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {**MISTRAL_7B, "model_type": "mixtral", "sliding_window": None, "num_local_experts": 8}
QWEN2_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
    "num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152064, "sliding_window": 131072,
    "use_sliding_window": False, "max_window_layers": 28, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936,
    "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA2_9B = {
    "model_type": "gemma2", "hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "num_hidden_layers": 42, "intermediate_size": 14336, "vocab_size": 256000,
    "sliding_window": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3_27B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128, "num_hidden_layers": 62, "intermediate_size": 21504, "vocab_size": 262208,
        "sliding_window": 1024, "sliding_window_pattern": 6,
    },
}  # fmt: skip
PHI3_MINI = {
    "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32,
    "num_hidden_layers": 32, "intermediate_size": 8192, "vocab_size": 32064, "sliding_window": 2047,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "num_hidden_layers": 24, "intermediate_size": 2880, "vocab_size": 201088,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_local_experts": 32,
    "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "num_hidden_layers": 61, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
FALCON_7B = {
    "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_kv_heads": 71,
    "multi_query": True, "new_decoder_architecture": False, "num_hidden_layers": 32, "vocab_size": 65024,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SMOLLM2_135M = {
    "model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "num_hidden_layers": 48, "full_attention_interval": 4, "intermediate_size": 5120,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 151936,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
JAMBA = {
    "model_type": "jamba", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4, "intermediate_size": 14336,
    "num_experts": 16, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2, "vocab_size": 65536, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
ALL = {
    name: value for name, value in list(globals().items()) if name.isupper() and name != "LLAMA"
}  # by name, for tests of all
