"""Config.json files of Llama and its kin, small and unkind: every optional key is on and off somewhere."""

from __future__ import annotations

from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
}  # fmt: skip
_LONGROPE = {"short_factor": [1.1, 1.3, 2.0], "long_factor": [1.5, 3.0, 7.5]}


def _sized(**keys: Any) -> dict[str, Any]:
    return {
        "vocab_size": 31, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 40, "rms_norm_eps": 1e-3, "hidden_act": "silu", **keys,
    }  # fmt: skip


def _gemma(**keys: Any) -> dict[str, Any]:
    sizes = _sized(head_dim=10, **keys)
    return {key: value for key, value in sizes.items() if key != "hidden_act"}


CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": (
        _sized(rope_theta=500.0, attention_bias=True, tie_word_embeddings=True, torch_dtype="float32"),
        _sized(head_dim=10, num_key_value_heads=None, mlp_bias=True, hidden_act="gelu", pretraining_tp=1,
               rope_scaling={"type": "linear", "factor": 2.5}),
        _sized(rope_theta=700.0, rope_scaling=_LLAMA3, attention_dropout=0.1, num_key_value_heads=1),
        _sized(rope_scaling={"type": "dynamic", "factor": 3}, max_position_embeddings=10, rope_theta=300),
        _sized(rope_parameters={"rope_theta": 900.0, **_YARN, "beta_fast": 3, "beta_slow": 0.5, "mscale": 0.7,
                                "mscale_all_dim": 0.4}, head_dim=12),
        _sized(rope_parameters={"rope_type": "yarn", "rope_theta": 900.0, "factor": None, "truncate": False,
                                "original_max_position_embeddings": 30}, head_dim=12),
        _sized(rope_parameters={**_YARN, "attention_factor": 1.4, "rope_theta": 200}),
        _sized(rope_scaling={"rope_type": "longrope", "factor": 3.0, **_LONGROPE}, max_position_embeddings=14),
    ),
    "mistral": (
        _sized(sliding_window=5, rope_theta=800.0),
        _sized(sliding_window=None, head_dim=8, tie_word_embeddings=True),
        _sized(sliding_window=2, num_key_value_heads=4, rope_scaling={**_YARN, "finetuned": True}),
        _sized(hidden_act="gelu_new", num_key_value_heads=1),
    ),
    "ministral": (
        _sized(head_dim=8, sliding_window=5, layer_types=[_SLIDING, _FULL, _SLIDING]),
        _sized(head_dim=6, sliding_window=7, tie_word_embeddings=True),
        _sized(head_dim=10, layer_types=[_FULL] * 3, num_key_value_heads=1, rope_scaling=_YARN),
    ),
    "qwen2": (
        _sized(use_sliding_window=False, sliding_window=5, max_window_layers=1, rope_theta=1e6, use_mrope=False),
        _sized(use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=True),
        _sized(use_sliding_window=True, sliding_window=4, num_key_value_heads=4,
               layer_types=[_SLIDING, _FULL, _SLIDING], rope_scaling={**_YARN, "type": "yarn"}),
        _sized(num_key_value_heads=1, hidden_act="gelu"),
    ),
    "qwen3": (
        _sized(head_dim=10, attention_bias=True, rope_theta=1e6),
        _sized(head_dim=8, use_sliding_window=True, sliding_window=6, max_window_layers=2, num_key_value_heads=1),
        _sized(hidden_size=20, head_dim=6, tie_word_embeddings=True, num_attention_heads=6,
               rope_parameters={"rope_theta": 900.0, **_YARN}),
    ),
    "gemma": (
        _sized(head_dim=10, hidden_act="gelu", hidden_activation=None, rope_theta=500.0),
        _sized(head_dim=6, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", attention_bias=True,
               num_key_value_heads=1),
        _sized(hidden_size=20, head_dim=8, hidden_act="silu", tie_word_embeddings=False, num_attention_heads=6,
               rope_scaling=_LLAMA3),
    ),
    "gemma2": (
        _gemma(sliding_window=5, query_pre_attn_scalar=7, num_hidden_layers=4, cache_implementation="hybrid"),
        _gemma(sliding_window=4, query_pre_attn_scalar=10, attention_bias=True, attn_logit_softcapping=None,
               final_logit_softcapping=2.0, hidden_activation="gelu", hidden_act="gelu", tie_word_embeddings=False),
        _gemma(layer_types=[_FULL, _FULL, _SLIDING], attn_logit_softcapping=1.5, final_logit_softcapping=None,
               query_pre_attn_scalar=3, sliding_window=6, rope_theta=700.0, num_key_value_heads=1),
        _gemma(layer_types=[_FULL] * 3, rope_scaling={"type": "linear", "factor": 2.0}),
    ),
    "gemma3_text": (
        _gemma(sliding_window=5, query_pre_attn_scalar=7, num_hidden_layers=4, sliding_window_pattern=3,
               rope_theta=5000.0, rope_local_base_freq=60.0, rope_scaling={"rope_type": "linear", "factor": 8.0}),
        _gemma(sliding_window=4, query_pre_attn_scalar=10, attention_bias=True, final_logit_softcapping=3.0,
               layer_types=[_FULL, _SLIDING, _SLIDING], tie_word_embeddings=False, hidden_activation="silu"),
        _gemma(layer_types=[_SLIDING, _FULL, _SLIDING], sliding_window=6, num_key_value_heads=1, rope_parameters={
            _FULL: {"rope_theta": 900.0, **_YARN}, _SLIDING: {"rope_type": "linear", "rope_theta": 40, "factor": 1.5}}),
        _gemma(layer_types=[_FULL] * 3, use_bidirectional_attention=False),
        _gemma(layer_types=[_SLIDING] * 3, sliding_window=3, rope_theta=10000.0),
    ),
    "phi3": (
        _sized(sliding_window=5, rope_theta=700.0, embd_pdrop=0.1, resid_pdrop=0.0, lm_head_bias=False),
        _sized(rope_scaling={"type": "su", **_LONGROPE, "original_max_position_embeddings": 16}, sliding_window=30,
               original_max_position_embeddings=16, tie_word_embeddings=True),
        _sized(rope_scaling={"type": "longrope", "short_factor": [1.0, 1.2], "long_factor": [2.0, 5.0]},
               partial_rotary_factor=0.75, original_max_position_embeddings=16, num_key_value_heads=4),
        _sized(partial_rotary_factor=0.4, hidden_size=40, num_key_value_heads=1, attention_bias=False),
        _sized(rope_scaling={"type": "yarn", **_LONGROPE}, original_max_position_embeddings=30),
    ),
    "granite": (
        _sized(embedding_multiplier=12.0, logits_scaling=49, residual_multiplier=0.22, attention_multiplier=0.3),
        _sized(attention_bias=True, tie_word_embeddings=True, attention_multiplier=0.25, hidden_size=64),
        _sized(mlp_bias=True, logits_scaling=0.3, rope_theta=700.0, num_key_value_heads=None, rope_scaling=_LLAMA3),
    ),
    "smollm3": (
        _sized(num_hidden_layers=5),
        _sized(no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=5, attention_bias=True),
        _sized(no_rope_layer_interval=2, mlp_bias=True, sliding_window=5, tie_word_embeddings=False, rope_theta=600.0),
        _sized(no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=4, num_key_value_heads=1,
               layer_types=[_SLIDING, _FULL, _FULL], rope_scaling=_YARN, max_window_layers=28),
    ),
    "arcee": (
        _sized(hidden_act="relu2", attention_bias=True, rope_scaling={**_YARN, "mscale": 1.0}),
        _sized(hidden_act="gelu", mlp_bias=True, head_dim=10, tie_word_embeddings=True),
        _sized(hidden_act="relu2", num_key_value_heads=None, rope_theta=600.0),
    ),
    "helium": (
        _sized(head_dim=6, rope_theta=600.0),
        _sized(head_dim=4, num_attention_heads=6, attention_bias=True, tie_word_embeddings=True),
        _sized(head_dim=6, mlp_bias=True, num_key_value_heads=1, hidden_act="gelu", rope_scaling=_LLAMA3),
    ),
}  # fmt: skip
