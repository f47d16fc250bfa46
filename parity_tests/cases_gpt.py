"""Config files of GPT-2's kin, each optional key on in one and off in another, no two sizes alike."""

from __future__ import annotations

from typing import Any

_GPT2 = {
    "vocab_size": 31, "n_positions": 27, "n_embd": 20, "n_layer": 3, "n_head": 4, "n_inner": 37,
    "layer_norm_epsilon": 3e-4, "activation_function": "gelu_new",
}  # fmt: skip
_HEADS = _GPT2 | {"n_embd": 40, "n_head": 5}  # of 8 elements
_NEO = {
    "vocab_size": 31, "max_position_embeddings": 27, "hidden_size": 20, "num_layers": 4, "num_heads": 5,
    "intermediate_size": 37, "window_size": 5, "layer_norm_epsilon": 3e-4, "activation_function": "gelu_new",
    "attention_types": [[["global", "local"], 2]],
}  # fmt: skip
_OPT = {
    "vocab_size": 31, "max_position_embeddings": 27, "hidden_size": 20, "num_hidden_layers": 3, "ffn_dim": 37,
    "num_attention_heads": 4, "activation_function": "relu", "pad_token_id": 1,
}  # fmt: skip
_BLOOM = {"vocab_size": 31, "hidden_size": 20, "n_layer": 3, "n_head": 4, "layer_norm_epsilon": 3e-4}
_MPT = {
    "vocab_size": 31, "d_model": 20, "n_layers": 3, "n_heads": 4, "max_seq_len": 27, "layer_norm_epsilon": 3e-4,
}  # fmt: skip

CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "gpt2": (
        _GPT2,
        _GPT2 | {"scale_attn_weights": False, "n_inner": None, "activation_function": "relu"},
        _GPT2 | {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False, "embd_pdrop": 0.3,
                 "resid_pdrop": 0.3},
        _GPT2 | {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False, "attn_pdrop": 0.0, "n_ctx": 27,
                 "reorder_and_upcast_attn": True, "activation_function": "gelu", "n_head": 5},
    ),
    "gpt_bigcode": (
        _GPT2 | {"activation_function": "gelu_pytorch_tanh"},
        _GPT2 | {"multi_query": False, "tie_word_embeddings": False, "attention_softmax_in_fp32": False},
        _GPT2 | {"multi_query": True, "scale_attn_weights": False, "n_inner": None, "n_head": 5,
                 "activation_function": "gelu"},
        _GPT2 | {"multi_query": False, "scale_attn_weights": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
    "gpt_neo": (
        _NEO,
        _NEO | {"attention_types": [[["global"], 4]], "intermediate_size": None, "tie_word_embeddings": False},
        _NEO | {"attention_types": [[["local"], 3], [["global"], 1]], "window_size": 1, "num_heads": 4,
                "activation_function": "relu"},
        _NEO | {"num_layers": 3, "attention_types": [[["global", "local", "local"], 1]], "window_size": 26,
                "attention_layers": ["global", "local", "local"], "embed_dropout": 0.2, "resid_dropout": 0.2},
    ),
    "gptj": (
        _HEADS | {"rotary_dim": 6},
        _HEADS | {"rotary_dim": 8, "tie_word_embeddings": True, "n_inner": None},
        _HEADS | {"rotary_dim": 2, "n_head": 4, "activation_function": "gelu", "rotary": True, "resid_pdrop": 0.1,
                  "embd_pdrop": 0.1},
    ),
    "codegen": (
        _HEADS | {"rotary_dim": 6},
        _HEADS | {"rotary_dim": 10, "n_head": 4, "tie_word_embeddings": True, "n_inner": None, "n_ctx": 9},
        _HEADS | {"rotary_dim": 4, "n_head": 10, "activation_function": "relu"},
    ),
    "opt": (
        _OPT,
        _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 13, "enable_bias": False},
        _OPT | {"layer_norm_elementwise_affine": False, "tie_word_embeddings": False, "word_embed_proj_dim": 24,
                "activation_function": "gelu"},
        _OPT | {"_remove_final_layer_norm": True, "enable_bias": False, "dropout": 0.0, "layerdrop": 0.1},
        _OPT | {"do_layer_norm_before": False, "layer_norm_elementwise_affine": False, "num_attention_heads": 5},
    ),
    "bloom": (
        _BLOOM,
        _BLOOM | {"n_head": 5, "tie_word_embeddings": False, "pretraining_tp": 4, "hidden_dropout": 0.1},
        {"vocab_size": 31, "n_embed": 24, "n_layer": 2, "num_attention_heads": 6, "seq_length": 27},
    ),
    "mpt": (
        _MPT,
        _MPT | {"n_heads": 5, "tie_word_embeddings": False, "attn_config": {"clip_qkv": 0.7, "alibi": True}},
        _MPT | {"d_model": 24, "n_heads": 6, "attn_config": {"softmax_scale": 0.3, "attn_impl": "triton"}},
        _MPT | {"d_model": 12, "n_heads": 3, "norm_type": "layernorm", "learned_pos_emb": False,
                "attn_config": {"softmax_scale": 0.9, "clip_qkv": 1.5, "qk_ln": False}},
    ),
}  # fmt: skip
