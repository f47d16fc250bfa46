"""Canonical parameter names and shapes of a config, and random parameters that hide nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError

Shape = tuple[int, ...]


def norm_names(config: DecoderConfig) -> tuple[str, str]:
    """Names of a block's two norms: the one of the attention layer, the one of the feed-forward layer."""
    if config.norm_placement == "pre":
        return "input_layernorm", "post_attention_layernorm"
    return "post_attention_layernorm", "post_feedforward_layernorm"


def parameter_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Canonical name to shape, in data-flow order. Linear weights are (out, in); a tied head has no entry."""
    D, F = config.d_model, config.d_ff
    NH, KH = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    shapes: dict[str, Shape] = {}

    def linear(name: str, n_out: int, n_in: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (n_out, n_in)
        if bias:
            shapes[f"{name}.bias"] = (n_out,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (D,)
        if config.norm == "layer_norm":
            shapes[f"{name}.bias"] = (D,)

    shapes["model.embed_tokens.weight"] = (config.vocab_size, D)
    if config.position == "learned":
        shapes["model.embed_positions.weight"] = (config.max_seq_len, D)
    attention_norm, feed_forward_norm = norm_names(config)
    for i in range(config.n_layers):
        layer = f"model.layers.{i}"
        norm(f"{layer}.{attention_norm}")
        linear(f"{layer}.self_attn.q_proj", NH, D, config.attention_bias)
        linear(f"{layer}.self_attn.k_proj", KH, D, config.attention_bias)
        linear(f"{layer}.self_attn.v_proj", KH, D, config.attention_bias)
        linear(f"{layer}.self_attn.o_proj", D, NH, config.attention_bias)
        norm(f"{layer}.{feed_forward_norm}")
        if config.gated:
            linear(f"{layer}.mlp.gate_proj", F, D, config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", F, D, config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", D, F, config.mlp_bias)
    if config.final_norm:
        norm("model.norm")
    if not config.tie_embeddings:
        linear("lm_head", config.vocab_size, D, bias=False)
    return shapes


def check_parameters(config: DecoderConfig, found: Mapping[str, Shape], where: str) -> None:
    """Raise one CheckpointError that lists every missing, unexpected and misshapen parameter.

    found: canonical name to shape. where: the file or object that the message names.
    """
    expected = parameter_shapes(config)
    faults = [f"{name}: expected shape {expected[name]}, found nothing" for name in expected if name not in found]
    faults += [f"{name}: not a parameter of this config" for name in found if name not in expected]
    faults += [
        f"{name}: expected shape {expected[name]}, found {tuple(found[name])}"
        for name in expected
        if name in found and tuple(found[name]) != expected[name]
    ]
    raise_faults(faults, where)


def raise_faults(faults: Iterable[str], where: str, shown: int = 8) -> None:
    """Raise one CheckpointError naming all faults (the first few in words), or return if there are none."""
    faults = list(faults)
    if faults:
        more = f"; and {len(faults) - shown} more" if len(faults) > shown else ""
        raise CheckpointError(f"{where}: " + "; ".join(faults[:shown]) + more)


def random_parameters(config: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 parameters for tests and teaching: activations of unit scale, nothing zero, nothing one.

    Weights have variance 1 / fan-in, embeddings 1; norm weights are 1 + N(0, 0.5), biases N(0, 0.5). Small or special
    values (std 0.02, norm weight 1, bias 0) would hide mistakes.
    """
    rng = np.random.default_rng(seed)
    parameters = {}
    for name, shape in parameter_shapes(config).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith(".bias"):
            values *= np.float32(0.5)
        elif "norm" in name:
            values = 1 + np.float32(0.5) * values
        elif "embed" not in name:
            values *= np.float32(1 / math.sqrt(shape[-1]))
        parameters[name] = values
    return parameters


def initial_parameters(config: DecoderConfig, seed: int = 0, std: float = 0.02) -> dict[str, np.ndarray]:
    """Float32 parameters to train from, as GPT-2 starts: N(0, std), the two projections into the residual stream
    N(0, std / sqrt(2 n_layers)), norm weights 1, biases 0 (Radford et al., 2019)."""
    rng = np.random.default_rng(seed)
    parameters = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith(".bias"):
            values = np.zeros(shape, np.float32)
        elif "norm" in name:
            values = np.ones(shape, np.float32)
        else:
            into_residual = name.endswith((".o_proj.weight", ".down_proj.weight"))
            scale = std / math.sqrt(2 * config.n_layers) if into_residual else std
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        parameters[name] = values
    return parameters
