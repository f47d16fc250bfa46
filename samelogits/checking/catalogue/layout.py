"""SL5xx: weights that were loaded from the wrong place, in the wrong order or not at all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.rotary import several
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


def _to_halves(rows: Array, n_heads: int, turned: int | None = None) -> Array:
    """Rows (or elements) of neighbouring rotary pairs, reordered to halves, head by head. turned: how many of a head's
    rows are in pairs, the first ones; all by default."""
    return _by_head(rows, n_heads, _halves(rows.shape[0] // n_heads, turned))


def _to_neighbours(rows: Array, n_heads: int, turned: int | None = None) -> Array:
    """The inverse of _to_halves."""
    return _by_head(rows, n_heads, np.argsort(_halves(rows.shape[0] // n_heads, turned)))


def _halves(width: int, turned: int | None) -> Array:
    pairs = width if turned is None else turned
    return np.concatenate([np.arange(0, pairs, 2), np.arange(1, pairs, 2), np.arange(pairs, width)])


def _by_head(rows: Array, n_heads: int, order: Array) -> Array:
    """Each head's rows in this order."""
    return rows[(np.arange(n_heads)[:, None] * len(order) + order).ravel()]


def _both(name: str) -> list[str]:
    return [f"{name}.weight", f"{name}.bias"]


@mistake("SL511", "query and key rows are in Meta's rotary order", several)
def rows_of_meta(v: Variant) -> None:
    """Meta's and GGUF's files order the rows for neighbouring pairs; Hugging Face's for halves. They were not
    reordered."""
    v.edit(_both("q_proj"), lambda rows: _to_neighbours(rows, v.config.n_heads, v.config.rotated))
    v.edit(_both("k_proj"), lambda rows: _to_neighbours(rows, v.config.n_kv_heads, v.config.rotated))


def _reorders(c: DecoderConfig) -> bool:
    """Whether one order is not the inverse of the other, as for four elements."""
    return several(c) and c.rotated > 4


@mistake("SL512", "query and key rows were reordered for rotary halves once too often", _reorders)
def rows_reordered_twice(v: Variant) -> None:
    """A Hugging Face file is in the order of halves already."""
    v.edit(_both("q_proj"), lambda rows: _to_halves(rows, v.config.n_heads, v.config.rotated))
    v.edit(_both("k_proj"), lambda rows: _to_halves(rows, v.config.n_kv_heads, v.config.rotated))


def _other_count(c: DecoderConfig) -> bool:
    """Whether heads of a wrong count have pairs to reorder."""
    rows = c.n_kv_heads * c.d_head // c.n_heads  # of such a head
    return several(c) and c.rotated == c.d_head and c.n_kv_heads != c.n_heads and rows > 2 and rows % 2 == 0


@mistake("SL513", "key rows were reordered with the number of query heads", _other_count)
def rows_with_wrong_count(v: Variant) -> None:
    """The reordering of the keys must use their own number of heads. Gibberish, for grouped-query models alone."""
    N, K = v.config.n_heads, v.config.n_kv_heads
    v.edit(_both("k_proj"), lambda rows: _to_halves(_to_neighbours(rows, K), N))


@mistake("SL514", "key rows are in Meta's rotary order, query rows are not", several)
def key_rows_of_meta(v: Variant) -> None:
    """Only one of the two was reordered."""
    v.edit(_both("k_proj"), lambda rows: _to_neighbours(rows, v.config.n_kv_heads, v.config.rotated))


Head = tuple[str, int]  # a projection, and one of its heads


def _flat(c: DecoderConfig) -> list[Head]:
    """All queries, all keys, all values."""
    return [(name, i) for name in PROJECTIONS for i in range(c.n_heads if name == "q_proj" else c.n_kv_heads)]


def _grouped(c: DecoderConfig) -> list[Head]:
    """The queries that share a key head, the key head, its value head; then the next."""
    G = c.n_heads // c.n_kv_heads
    return [
        head
        for i in range(c.n_kv_heads)
        for head in (*(("q_proj", i * G + j) for j in range(G)), ("k_proj", i), ("v_proj", i))
    ]


def _in_quarters(c: DecoderConfig) -> list[Head]:
    """A quarter of the queries, of the values, of the keys; then the next."""
    size = c.n_heads // 4
    return [
        (name, quarter * size + i)
        for quarter in range(4)
        for name in ("q_proj", "v_proj", "k_proj")
        for i in range(size)
    ]


def _fuse(v: Variant, stored: list[Head], read: list[Head]) -> None:
    """Rows of a fused projection that lie in one order are read in another."""
    H = v.config.d_head
    for layer in v.layers:
        for part in ("weight", *(["bias"] if v.config.attention_bias else [])):
            names = {name: v.of(layer, f"self_attn.{name}.{part}") for name in PROJECTIONS}
            right = {name: v.parameters[of] for name, of in names.items()}
            wrong = {name: array.copy() for name, array in right.items()}
            for (name, i), (source, j) in zip(read, stored, strict=True):
                wrong[name][i * H : (i + 1) * H] = right[source][j * H : (j + 1) * H]
            v.parameters |= {names[name]: array for name, array in wrong.items()}


def _one_each(c: DecoderConfig) -> bool:
    """Whether each query head has a key head of its own."""
    return c.n_heads == c.n_kv_heads and c.n_heads > 1


def _shared(c: DecoderConfig) -> bool:
    return 1 < c.n_kv_heads < c.n_heads


def _quarters(c: DecoderConfig) -> bool:
    return c.n_heads == c.n_kv_heads and c.n_heads % 4 == 0


@mistake("SL521", "the fused projection is read head by head", _one_each)
def fused_by_head(v: Variant) -> None:
    """GPT-NeoX and BLOOM store [q k v] of each head in turn, GPT-2 all q, then all k, then all v. It was read as the
    former and is the latter. Right: decide by model type."""
    _fuse(v, _flat(v.config), _grouped(v.config))


@mistake("SL522", "the fused projection is read flat, though stored head by head", _one_each)
def fused_flat(v: Variant) -> None:
    """[q k v] of each head in turn was stored, and read as all q, all k, all v."""
    _fuse(v, _grouped(v.config), _flat(v.config))


@mistake("SL523", "the fused projection is read group by group", _shared)
def fused_by_group(v: Variant) -> None:
    """Falcon's newer files and InternLM 2's store, for each key head, the queries that share it, the key and the value;
    Phi 3's all q, then all k, then all v. It was read as the former and is the latter."""
    _fuse(v, _flat(v.config), _grouped(v.config))


@mistake("SL524", "the fused projection is read flat, though stored group by group", _shared)
def fused_groups_flat(v: Variant) -> None:
    """For each key head the queries that share it, the key and the value were stored, and read as all q, all k, all
    v."""
    _fuse(v, _grouped(v.config), _flat(v.config))


@mistake("SL525", "the fused projection is read flat, though stored in four parts", _quarters)
def fused_quarters_flat(v: Variant) -> None:
    """CodeGen stores a quarter of the queries, of the values, of the keys, four times: the order of the four devices it
    was trained on. Read as all q, all k, all v."""
    _fuse(v, _in_quarters(v.config), _flat(v.config))


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


@mistake("SL535", "the attention's output bias is missing", lambda c: c.attention_output_bias)
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


@mistake("SL538", "biases are added twice", lambda c: c.attention_bias or c.attention_output_bias or c.mlp_bias)
def biases_twice(v: Variant) -> None:
    """Once in a fused kernel and once after it."""
    v.edit([f"{n}.bias" for n in (*PROJECTIONS, "o_proj", "gate_proj", "up_proj", "down_proj")], lambda bias: 2 * bias)
