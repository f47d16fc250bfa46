"""Config.json files of the families OLMo to Falcon, small and unkind: every optional key is on and off somewhere."""

from __future__ import annotations

from typing import Any

_LINEAR = {"rope_type": "linear", "factor": 2.0}
_DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0}  # fmt: skip


def _sized(**keys: Any) -> dict[str, Any]:
    return {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
            "max_position_embeddings": 40, **keys}  # fmt: skip


def _gated(**keys: Any) -> dict[str, Any]:
    return _sized(intermediate_size=28, **keys)


def _silu(**keys: Any) -> dict[str, Any]:
    return _gated(**{"hidden_act": "silu", **keys})


_SLIDING, _FULL = "sliding_attention", "full_attention"

CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "olmo": (
        _silu(num_key_value_heads=2, clip_qkv=0.9, attention_bias=True, rope_theta=500.0, tie_word_embeddings=True),
        _silu(rope_scaling={"type": "linear", "factor": 2.0}, clip_qkv=None, hidden_act="gelu"),
        _silu(num_key_value_heads=1, rope_parameters={"rope_theta": 700.0, **_YARN}, attention_dropout=0.1),
        _silu(num_key_value_heads=2, rope_parameters={"rope_theta": 900.0, **_LLAMA3}, clip_qkv=2.0),
    ),
    "olmo2": (
        _silu(num_key_value_heads=2, attention_bias=True, rms_norm_eps=1e-3, rope_theta=500.0),
        _silu(tie_word_embeddings=True, rope_parameters={"rope_theta": 700.0, **_DYNAMIC}, max_position_embeddings=10,
              head_dim=10),
        _silu(num_key_value_heads=1, rope_scaling=_YARN | {"beta_fast": 4, "beta_slow": 0.5, "attention_factor": 1.3}),
    ),
    "olmo3": (
        _silu(num_hidden_layers=5, num_key_value_heads=2, sliding_window=5, rope_theta=500000.0, rope_scaling=_YARN),
        _silu(layer_types=[_FULL, _SLIDING, _FULL], sliding_window=4, attention_bias=True, rms_norm_eps=1e-3,
               rope_parameters={_FULL: {"rope_theta": 700.0, "rope_type": "default"},
                                _SLIDING: {"rope_theta": 90.0, "rope_type": "default"}}),
        _silu(layer_types=[_FULL] * 3, num_key_value_heads=1, tie_word_embeddings=True),
        _silu(layer_types=[_SLIDING] * 3, sliding_window=5),
    ),
    "starcoder2": (
        _gated(sliding_window=5, rope_theta=999.4, residual_dropout=0.1, embedding_dropout=0.1),
        _gated(num_key_value_heads=1, use_bias=False, tie_word_embeddings=False, hidden_act="gelu",
               mlp_type="default", norm_type="layer_norm"),
        _gated(num_key_value_heads=4, norm_epsilon=1e-3, residual_dropout=0.1, embedding_dropout=0.0,
               rope_parameters={"rope_theta": 700.0, **_LINEAR}),
    ),
    "cohere": (
        _silu(num_key_value_heads=2, use_qk_norm=True, logit_scale=0.3, rope_theta=800.0),
        _silu(attention_bias=True, tie_word_embeddings=False, layer_norm_eps=1e-3, model_max_length=99),
        _silu(num_key_value_heads=1, use_qk_norm=True, attention_bias=True, hidden_act="gelu_new", pretraining_tp=1,
               rope_parameters={"rope_theta": 700.0, **_LLAMA3}),
    ),
    "cohere2": (
        _silu(num_hidden_layers=5, num_key_value_heads=2, sliding_window=5, rope_theta=50000, head_dim=6,
               sliding_window_pattern=3, layer_switch=3, order_of_interleaved_layers="local_attn_first",
               position_embedding_type="rope_gptj", rotary_pct=1.0, use_embedding_sharing=True, use_qk_norm=False,
               use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=False, logit_scale=0.25),
        _silu(layer_types=[_FULL, _SLIDING, _SLIDING], sliding_window=4, attention_bias=True, head_dim=10,
               tie_word_embeddings=False, layer_norm_eps=1e-3),
        _silu(layer_types=[_FULL] * 3, num_key_value_heads=1),
        _silu(num_hidden_layers=4, sliding_window=5, rope_scaling={"type": "linear", "factor": 2.0}),
    ),
    "nemotron": (
        _gated(num_key_value_heads=2, head_dim=8, partial_rotary_factor=0.75, attention_bias=True, rope_theta=500.0),
        _gated(num_key_value_heads=4, hidden_size=32, mlp_bias=True, tie_word_embeddings=True, norm_eps=1e-3,
               kv_channels=8, rope_scaling=None),
        _gated(num_key_value_heads=1, head_dim=12, hidden_act="gelu",
               rope_parameters={"rope_theta": 700.0, "partial_rotary_factor": 0.5, **_LINEAR}),
    ),
    "glm": (
        _silu(num_key_value_heads=4, head_dim=12, attention_bias=False, partial_rotary_factor=1.0,
               tie_word_embeddings=True),
        _silu(head_dim=8, rms_norm_eps=1e-3, rope_theta=500.0),
        _silu(num_key_value_heads=1, head_dim=8, rope_parameters={"rope_theta": 70.0, "partial_rotary_factor": 0.25}),
    ),
    "glm4": (
        _silu(head_dim=8, rms_norm_eps=1e-3, rope_theta=500.0),
        _silu(num_key_value_heads=4, head_dim=12, attention_bias=False, partial_rotary_factor=1.0,
               tie_word_embeddings=True, hidden_act="gelu"),
        _silu(num_key_value_heads=1, head_dim=8,
               rope_parameters={"rope_theta": 70.0, "partial_rotary_factor": 0.75, **_YARN}),
    ),
    "stablelm": (
        _silu(num_key_value_heads=2, hidden_size=32, qk_layernorm=True, use_parallel_residual=True, rope_theta=500.0),
        _silu(num_key_value_heads=4, hidden_size=32, use_qkv_bias=True, partial_rotary_factor=0.75,
               tie_word_embeddings=True, layer_norm_eps=1e-3, hidden_dropout=0.1),
        _silu(num_key_value_heads=1, hidden_size=32, qk_layernorm=True, use_qkv_bias=True, hidden_act="gelu",
               rope_parameters={"rope_theta": 700.0, "partial_rotary_factor": 0.5, **_LINEAR}),
        _silu(num_key_value_heads=4, partial_rotary_factor=1.0, use_parallel_residual=True),
    ),
    "phi": (
        _gated(num_key_value_heads=2, hidden_size=32, qk_layernorm=True, rope_theta=500.0, tie_word_embeddings=True),
        _gated(hidden_size=40, partial_rotary_factor=0.4, resid_pdrop=0.1, embd_pdrop=0.0, hidden_act="relu"),
        _gated(num_key_value_heads=1, layer_norm_eps=1e-3, qk_layernorm=True, resid_pdrop=0.1, embd_pdrop=0.1,
               rope_parameters={"rope_theta": 700.0, "partial_rotary_factor": 1.0, **_DYNAMIC},
               max_position_embeddings=10),
    ),
    "gpt_neox": (
        _gated(hidden_size=32, rotary_pct=0.5, rotary_emb_base=500, rope_theta=500.0, partial_rotary_factor=0.5,
               hidden_act="gelu_new", hidden_dropout=0.1, attention_probs_dropout_prob=0, hidden_dropout_prob=0),
        _gated(hidden_size=32, use_parallel_residual=False, tie_word_embeddings=True, layer_norm_eps=1e-3),
        _gated(attention_bias=False, rotary_pct=1.0, rope_scaling={"type": "linear", "factor": 2.0}),
        _gated(use_parallel_residual=False, attention_bias=False,
               rope_parameters={"rope_theta": 700.0, "partial_rotary_factor": 0.67, "rope_type": "default"}),
    ),
    "falcon": (
        _sized(multi_query=True, parallel_attn=True, rope_theta=500.0, num_kv_heads=4, ff_factor=4,
               apply_residual_connection_post_layernorm=False, auto_map={"AutoModel": "modeling_falcon.FalconModel"}),
        _sized(multi_query=False, parallel_attn=False, alibi=True, bias=True, layer_norm_epsilon=1e-3),
        _sized(num_attention_heads=6, multi_query=True, alibi=True, tie_word_embeddings=False, activation="gelu_new"),
        _sized(new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=28, multi_query=True),
        _sized(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, bias=True,
               rope_parameters={"rope_theta": 700.0, **_YARN}),
        _sized(multi_query=False, parallel_attn=True, ffn_hidden_size=28, hidden_dropout=0.1),
        _sized(multi_query=True, parallel_attn=False, bias=True, rope_scaling={"type": "linear", "factor": 2.0}),
    ),
}  # fmt: skip
