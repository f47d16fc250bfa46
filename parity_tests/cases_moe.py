"""Unkind configs of the families with experts, as config.json has them. transformers wants widths divisible by 8."""

_SIZES = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 40, "rms_norm_eps": 1e-3, "rope_theta": 500.0,
    "hidden_act": "silu",
}  # fmt: skip

CASES = {
    "mixtral": (
        _SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
        _SIZES | {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 5, "head_dim": 10},
        _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 4, "tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        _SIZES | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True,
                  "head_dim": 10},
        _SIZES | {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "mlp_only_layers": [1],
                  "attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
        _SIZES | {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "decoder_sparse_step": 2,
                  "tie_word_embeddings": True},
    ),
    "olmoe": (
        _SIZES | {"num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 0.9},
        _SIZES | {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True},
        _SIZES | {"num_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True,
                  "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 3.0}},
    ),
}  # fmt: skip
