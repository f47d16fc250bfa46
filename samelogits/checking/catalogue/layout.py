"""SL5xx: weights that were loaded from the wrong place, in the wrong order or not at all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig

Array = np.ndarray
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def _square(name: str) -> Callable[[DecoderConfig], bool]:
    """Whether a transposed weight still has the right shape."""

    def applies(c: DecoderConfig) -> bool:
        inner = {"q_proj": c.n_heads * c.d_head, "k_proj": c.n_kv_heads * c.d_head, "o_proj": c.n_heads * c.d_head}
        return inner[name] == c.d_model

    return applies


def _rope(config: DecoderConfig) -> bool:
    return config.position == "rope"


def _biased(config: DecoderConfig) -> bool:
    return config.attention_bias


def _transpose(v: Variant, *names: str) -> None:
    v.edit([f"{name}.weight" for name in names], lambda weight: np.ascontiguousarray(weight.T))


def _zero(v: Variant, *suffixes: str) -> None:
    v.edit(suffixes, np.zeros_like)


@mistake("SL501", "the attention's output weight is transposed", _square("o_proj"))
def output_transposed(v: Variant) -> None:
    """GPT-2 stores (in, out), Llama (out, in), Flax's kernel (in, out). This one is square: no shape complains.

    Right: decide by model type, never by shape or name.
    """
    _transpose(v, "o_proj")


@mistake("SL502", "the query weight is transposed", _square("q_proj"))
def query_transposed(v: Variant) -> None:
    """GPT-2 stores (in, out), Llama (out, in). This one is square, so that no shape complains. Right: decide by model
    type."""
    _transpose(v, "q_proj")


@mistake(
    "SL503", "query, key and value weights are transposed", lambda c: _square("q_proj")(c) and _square("k_proj")(c)
)
def projections_transposed(v: Variant) -> None:
    """GPT-2 stores (in, out), Llama (out, in). These are square, so that no shape complains. Right: decide by model
    type."""
    _transpose(v, *PROJECTIONS)


def _to_halves(rows: Array, n_heads: int) -> Array:
    """Rows (or elements) of neighbouring rotary pairs, reordered to halves, head by head."""
    per_head = rows.reshape(n_heads, rows.shape[0] // n_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(per_head.swapaxes(1, 2)).reshape(rows.shape)


def _to_neighbours(rows: Array, n_heads: int) -> Array:
    """The inverse of _to_halves."""
    per_head = rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(per_head.swapaxes(1, 2)).reshape(rows.shape)


def _both(name: str) -> list[str]:
    return [f"{name}.weight", f"{name}.bias"]


@mistake("SL511", "query and key rows are in Meta's rotary order", _rope)
def rows_of_meta(v: Variant) -> None:
    """Meta's and GGUF's files order the rows for neighbouring pairs; Hugging Face's for halves. They were not
    reordered."""
    v.edit(_both("q_proj"), lambda rows: _to_neighbours(rows, v.config.n_heads))
    v.edit(_both("k_proj"), lambda rows: _to_neighbours(rows, v.config.n_kv_heads))


@mistake("SL512", "query and key rows were reordered for rotary halves once too often", _rope)
def rows_reordered_twice(v: Variant) -> None:
    """A Hugging Face file is in the order of halves already."""
    v.edit(_both("q_proj"), lambda rows: _to_halves(rows, v.config.n_heads))
    v.edit(_both("k_proj"), lambda rows: _to_halves(rows, v.config.n_kv_heads))


@mistake("SL513", "key rows were reordered with the number of query heads", lambda c: _rope(c) and _ok_count(c))
def rows_with_wrong_count(v: Variant) -> None:
    """The reordering of the keys must use their own number of heads. Gibberish, for grouped-query models alone."""
    N, K = v.config.n_heads, v.config.n_kv_heads
    v.edit(_both("k_proj"), lambda rows: _to_halves(_to_neighbours(rows, K), N))


def _ok_count(c: DecoderConfig) -> bool:
    return c.n_kv_heads != c.n_heads and c.n_kv_heads * c.d_head % (2 * c.n_heads) == 0


@mistake("SL514", "key rows are in Meta's rotary order, query rows are not", _rope)
def key_rows_of_meta(v: Variant) -> None:
    """Only one of the two was reordered."""
    v.edit(_both("k_proj"), lambda rows: _to_neighbours(rows, v.config.n_kv_heads))


@mistake("SL521", "the fused projection is read head by head", lambda c: c.n_heads == c.n_kv_heads and c.n_heads > 1)
def fused_by_head(v: Variant) -> None:
    """GPT-NeoX and BLOOM store [q k v] of each head in turn, GPT-2 all q, then all k, then all v. It was read as the
    former and is the latter. Right: decide by model type."""
    N, H = v.config.n_heads, v.config.d_head
    for layer in v.layers:
        for part in ("weight", *(["bias"] if v.config.attention_bias else [])):
            names = [v.of(layer, f"self_attn.{name}.{part}") for name in PROJECTIONS]
            fused = np.concatenate([v.parameters[name] for name in names])
            read = fused.reshape(N, 3, H, *fused.shape[1:])
            for i, name in enumerate(names):
                v.parameters[name] = np.ascontiguousarray(read[:, i]).reshape(v.parameters[name].shape)


@mistake(
    "SL522",
    "the fused projection is read flat, though stored head by head",
    lambda c: c.n_heads == c.n_kv_heads and c.n_heads > 1,
)
def fused_flat(v: Variant) -> None:
    """[q k v] of each head in turn was stored, and read as all q, all k, all v."""
    N, H = v.config.n_heads, v.config.d_head
    for layer in v.layers:
        for part in ("weight", *(["bias"] if v.config.attention_bias else [])):
            names = [v.of(layer, f"self_attn.{name}.{part}") for name in PROJECTIONS]
            whole = [v.parameters[name] for name in names]
            stored = np.stack([w.reshape(N, H, *w.shape[1:]) for w in whole], axis=1)
            for name, rows in zip(names, np.split(stored.reshape(3 * N * H, *whole[0].shape[1:]), 3), strict=True):
                v.parameters[name] = rows


@mistake("SL531", "query, key and value biases are missing", _biased)
def projection_biases_missing(v: Variant) -> None:
    """Qwen 2 has them although its configuration doesn't say so, and an adapter that reads only weights drops them."""
    _zero(v, *(f"{name}.bias" for name in PROJECTIONS))


@mistake("SL532", "the query bias is missing", _biased)
def query_bias_missing(v: Variant) -> None:
    """One of three was left out."""
    _zero(v, "q_proj.bias")


@mistake("SL533", "the key bias is missing", _biased)
def key_bias_missing(v: Variant) -> None:
    """One of three was left out. Without rotary positions a key bias moves all scores of a query alike, so that the
    logits are the same function: only the taps tell."""
    _zero(v, "k_proj.bias")


@mistake("SL534", "the value bias is missing", _biased)
def value_bias_missing(v: Variant) -> None:
    """One of three was left out."""
    _zero(v, "v_proj.bias")


@mistake("SL535", "the attention's output bias is missing", _biased)
def output_bias_missing(v: Variant) -> None:
    """GPT-2 has it, Qwen 2 has not."""
    _zero(v, "o_proj.bias")


@mistake("SL536", "the feed-forward biases are missing", lambda c: c.mlp_bias)
def feed_forward_biases_missing(v: Variant) -> None:
    """A layer written for Llama, which has none, reads a model that has them."""
    _zero(v, "gate_proj.bias", "up_proj.bias", "down_proj.bias")


@mistake("SL537", "the bias of the feed-forward layer's second product is missing", lambda c: c.mlp_bias)
def down_bias_missing(v: Variant) -> None:
    """One of two was left out."""
    _zero(v, "down_proj.bias")


@mistake("SL538", "biases are added twice", lambda c: c.attention_bias or c.mlp_bias)
def biases_twice(v: Variant) -> None:
    """Once in a fused kernel and once after it."""
    v.edit([f"{n}.bias" for n in (*PROJECTIONS, "o_proj", "gate_proj", "up_proj", "down_proj")], lambda bias: 2 * bias)
