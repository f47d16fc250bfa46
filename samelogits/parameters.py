"""Canonical parameter names and shapes of a config, and random parameters that hide nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError

Shape = tuple[int, ...]
TABLES = ("model.embed_tokens.", "model.embed_positions.")


class BlockNorms(NamedTuple):
    """Names of a block's norms by their place; None where there is none.

    before_*: of what the layer reads. *_output: of what it gives, before that is added. *_sum: of the residual sum.
    """

    before_attention: str | None = None
    attention_output: str | None = None
    attention_sum: str | None = None
    before_feed_forward: str | None = None
    feed_forward_output: str | None = None
    feed_forward_sum: str | None = None


def block_norms(config: DecoderConfig) -> BlockNorms:
    """The norms that the blocks of this config have."""
    first, second = "post_attention_layernorm", "post_feedforward_layernorm"
    match config.norm_placement:
        case "pre":
            other = None if config.shared_norm else first
            return BlockNorms(before_attention="input_layernorm", before_feed_forward=other)
        case "post":
            return BlockNorms(attention_sum=first, feed_forward_sum=second)
        case "output":
            return BlockNorms(attention_output=first, feed_forward_output=second)
        case "sandwich":
            return BlockNorms("input_layernorm", first, None, "pre_feedforward_layernorm", second, None)


def norm_names(config: DecoderConfig) -> list[str]:
    """Names of a block's norms, in data-flow order."""
    return [name for name in block_norms(config) if name is not None]


def feed_forwards(config: DecoderConfig, layer: int) -> dict[str, int]:
    """Names and inner widths of a layer's feed-forward parts: one, or its experts."""
    if not config.has_experts(layer):
        return {"mlp": config.d_ff}
    assert config.n_experts is not None
    assert config.expert_width is not None
    return {f"mlp.experts.{expert}": config.expert_width for expert in range(config.n_experts)}


def parameter_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Canonical name to shape, in data-flow order. Linear weights are (out, in); a tied head has no weight."""
    D, N, K, H, E = config.d_model, config.n_heads, config.n_kv_heads, config.d_head, config.n_experts or 0
    table_width = D if config.embedding_width is None else config.embedding_width
    shapes: dict[str, Shape] = {}

    def linear(name: str, n_out: int, n_in: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (n_out, n_in)
        if bias:
            shapes[f"{name}.bias"] = (n_out,)

    def norm(name: str, shape: Shape = (D,), bias: bool = config.norm_bias) -> None:
        if config.norm_weight != "none":
            shapes[f"{name}.weight"] = shape
            if config.norm == "layer_norm" and bias:
                shapes[f"{name}.bias"] = shape

    shapes["model.embed_tokens.weight"] = (config.vocab_size, table_width)
    if config.position == "learned":
        shapes["model.embed_positions.weight"] = (config.position_offset + config.max_seq_len, D)
    if table_width != D:
        linear("model.embed_in", D, table_width, bias=False)
    if config.embedding_norm:
        norm("model.embed_norm")
    norms = block_norms(config)
    for i in range(config.n_layers):
        layer = f"model.layers.{i}"
        if norms.before_attention:
            norm(f"{layer}.{norms.before_attention}")
        for part, heads in (("q", N), ("k", K), ("v", K)):
            linear(f"{layer}.self_attn.{part}_proj", heads * H, D, config.attention_bias)
        if config.qk_norm != "none":
            for part, heads in (("q", N), ("k", K)):
                shape = {"head": (H,), "heads": (heads, H), "projection": (heads * H,)}[config.qk_norm]
                norm(f"{layer}.self_attn.{part}_norm", shape, config.qk_norm_bias)
        linear(f"{layer}.self_attn.o_proj", D, N * H, config.attention_output_bias)
        for name in (norms.attention_output, norms.attention_sum, norms.before_feed_forward):
            if name:
                norm(f"{layer}.{name}")
        if config.has_experts(i):
            linear(f"{layer}.mlp.router", E, D, bias=False)
        for name, width in feed_forwards(config, i).items():
            if config.gated:
                linear(f"{layer}.{name}.gate_proj", width, D, config.mlp_bias)
            linear(f"{layer}.{name}.up_proj", width, D, config.mlp_bias)
            linear(f"{layer}.{name}.down_proj", D, width, config.mlp_bias)
        for name in (norms.feed_forward_output, norms.feed_forward_sum):
            if name:
                norm(f"{layer}.{name}")
    if config.final_norm:
        norm("model.norm")
    if table_width != D:
        linear("model.embed_out", table_width, D, bias=False)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, table_width)
    if config.head_bias:
        shapes["lm_head.bias"] = (config.vocab_size,)
    return shapes


def check_count(config: DecoderConfig, found: int, where: str) -> None:
    """Raise CheckpointError where so few tensors can't be a model of this config, before their names are made: the few
    bytes of a config can ask for very many."""
    sparse = config.n_layers - len(config.dense_layers) if config.n_experts is not None else 0
    least = config.n_layers + sparse * (config.n_experts or 0)
    if found < least:
        raise CheckpointError(f"{where}: expected the tensors of this config, {least} or more, found {found}")


def check_parameters(config: DecoderConfig, found: Mapping[str, Shape], where: str) -> None:
    """Raise one CheckpointError that lists every missing, unexpected and misshapen parameter.

    found: canonical name to shape. where: the file or object that the message names.
    """
    check_count(config, len(found), where)
    expected = parameter_shapes(config)
    faults = [f"{name}: expected shape {expected[name]}, found nothing" for name in expected if name not in found]
    faults += [f"{name}: not a parameter of this config" for name in found if name not in expected]
    faults += [
        f"{name}: expected shape {expected[name]}, found {tuple(found[name])}"
        for name in expected
        if name in found and tuple(found[name]) != expected[name]
    ]
    raise_faults(faults, where)


class CheckedParameters(Mapping[str, np.ndarray]):
    """Parameters by canonical name: all that a config has and no more, and each, when it is read, of its shape.

    Raises CheckpointError. A backend that took another shape would broadcast it, or clamp the ids that it lacks.
    """

    def __init__(self, config: DecoderConfig, parameters: Mapping[str, np.ndarray]):
        self._parameters, self._shapes = parameters, parameter_shapes(config)
        check_parameters(config, {name: self._shapes.get(name, ()) for name in parameters}, "parameters")

    def __getitem__(self, name: str) -> np.ndarray:
        array, shape = self._parameters[name], self._shapes[name]
        if array.shape != shape:
            raise CheckpointError(f"parameters: {name}: expected shape {shape}, found {array.shape}")
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def raise_faults(faults: Iterable[str], where: str, shown: int = 8) -> None:
    """Raise one CheckpointError naming all faults (the first few in words), or return if there are none."""
    faults = list(faults)
    if faults:
        more = f"; and {len(faults) - shown} more" if len(faults) > shown else ""
        raise CheckpointError(f"{where}: " + "; ".join(faults[:shown]) + more)


def random_parameters(config: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 parameters for tests and teaching: activations of unit scale, nothing zero, nothing one.

    Weights have variance 1 / fan-in, embeddings 1; norms multiply by 1 + N(0, 0.5), biases are N(0, 0.5). Small or
    special values (std 0.02, norm weight 1, bias 0) would hide mistakes.
    """
    rng = np.random.default_rng(seed)
    parameters = {}
    for name, shape in parameter_shapes(config).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith(".bias"):
            values *= np.float32(0.5)
        elif "norm" in name:
            values = np.float32(config.norm_weight == "plain") + np.float32(0.5) * values
        elif not name.startswith(TABLES):
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
            values = np.full(shape, config.norm_weight == "plain", np.float32)
        else:
            into_residual = name.endswith((".o_proj.weight", ".down_proj.weight"))
            scale = std / math.sqrt(2 * config.n_layers) if into_residual else std
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        parameters[name] = values
    return parameters
