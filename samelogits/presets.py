"""Named architectures: the two texts that the project grew from, and the checkpoints that people know."""

from __future__ import annotations

from dataclasses import replace

from samelogits.config import DecoderConfig
from samelogits.errors import ConfigError

_SEED_RELU = DecoderConfig(
    vocab_size=1000, d_model=64, n_layers=2, n_heads=4, n_kv_heads=4, d_head=16, d_ff=192, max_seq_len=128,
    norm="layer_norm", norm_eps=1e-5, norm_placement="pre", final_norm=True, activation="relu", gated=False,
    position="learned", rope_theta=None, attention_bias=True, attention_output_bias=True, mlp_bias=True,
    tie_embeddings=False, dropout=0.1,
)  # fmt: skip

_SEED_GELU = replace(
    _SEED_RELU, vocab_size=50000, d_model=512, n_layers=6, n_heads=8, n_kv_heads=8, d_head=64, d_ff=2048,
    max_seq_len=256, activation="gelu",
)  # fmt: skip

_GPT2 = DecoderConfig(
    vocab_size=50257, d_model=768, n_layers=12, n_heads=12, n_kv_heads=12, d_head=64, d_ff=3072, max_seq_len=1024,
    norm="layer_norm", norm_eps=1e-5, norm_placement="pre", final_norm=True, activation="gelu_tanh", gated=False,
    position="learned", rope_theta=None, attention_bias=True, attention_output_bias=True, mlp_bias=True,
    tie_embeddings=True, dropout=0.1,
)  # fmt: skip

_LLAMA_TINY = DecoderConfig(
    vocab_size=256, d_model=96, n_layers=4, n_heads=4, n_kv_heads=2, d_head=32, d_ff=256, max_seq_len=256,
    norm="rms_norm", norm_eps=1e-5, norm_placement="pre", final_norm=True, activation="silu", gated=True,
    position="rope", rope_theta=10000.0, attention_bias=False, attention_output_bias=False, mlp_bias=False,
    tie_embeddings=True, dropout=0.0,
)  # fmt: skip

PRESETS: dict[str, DecoderConfig] = {
    "seed-relu": _SEED_RELU,
    "seed-gelu": _SEED_GELU,
    "seed-gelu-sinusoidal": replace(_SEED_GELU, position="sinusoidal"),
    "gpt2": _GPT2,
    "gpt2-medium": replace(_GPT2, d_model=1024, n_layers=24, n_heads=16, n_kv_heads=16, d_ff=4096),
    "llama-tiny": _LLAMA_TINY,
    "smollm2-135m": replace(
        _LLAMA_TINY,
        vocab_size=49152,
        d_model=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        d_head=64,
        d_ff=1536,
        max_seq_len=8192,
        rope_theta=100000.0,
    ),
}


def preset(name: str) -> DecoderConfig:
    """The preset of this name; an unknown one raises ConfigError listing the known."""
    if name not in PRESETS:
        raise ConfigError(f"preset: expected one of {', '.join(PRESETS)}, found {name!r}")
    return PRESETS[name]
