"""The data's way through the decoder, told step by step for a reader: shapes, a few values, the top candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samelogits.backend import Model
from samelogits.batch import check_ids
from samelogits.errors import InputError
from samelogits.taps import tap_names

_TITLES = {
    "embed_tokens": "token embedding: each id becomes a row of the table",
    "embed_positions": "position embedding: each position's own vector",
    "embedded": "what enters the first block",
    "norm": "final norm",
    "logits": "output head: one score for each token of the vocabulary",
    "input_layernorm": "norm before attention",
    "post_attention_layernorm": "norm",
    "post_feedforward_layernorm": "norm after feed-forward",
    "self_attn.q": "queries: what each position looks for",
    "self_attn.k": "keys: what each position offers",
    "self_attn.v": "values: what each position gives",
    "pre_feedforward_layernorm": "norm before feed-forward",
    "self_attn.q_normed": "queries normed",
    "self_attn.k_normed": "keys normed",
    "self_attn.q_rotated": "queries turned by their position",
    "self_attn.k_rotated": "keys turned by their position",
    "self_attn.scores": "scores: queries times keys, scaled",
    "self_attn.weights": "weights: softmax over the keys that may be seen",
    "self_attn.mixed": "values mixed by the weights, heads side by side",
    "self_attn.output": "output projection",
    "residual_mid": "residual sum after attention",
    "mlp.gate": "gate projection",
    "mlp.up": "up projection",
    "mlp.activated": "activation",
    "mlp.output": "down projection",
    "residual_out": "residual sum after feed-forward",
}


def walk(
    models: Sequence[Model], tokens: Any, decode: Callable[[list[int]], str] | None = None, candidates: int = 5
) -> str:
    """The walk as text, for the last position of the first row, in each model.

    models: the same checkpoint in one or more backends. tokens: int [B, T]. decode: ids to text, for showing tokens.
    """
    config = models[0].config
    ids = check_ids(tokens, "tokens", config.vocab_size)[:1]
    if ids.size == 0:
        raise InputError("tokens: expected at least one, found none")
    activations = [model.activations(ids) for model in models]
    names = [model.backend for model in models]
    width = max(map(len, names))

    def show(token: int) -> str:
        if decode is None:
            return f"{token}"
        try:
            return f"{token} {decode([token])!r}"
        except InputError:  # the vocabulary has more rows than the tokenizer has tokens
            return f"{token}"

    T = ids.shape[1]
    lines = [f"[1] token ids {list(ids.shape)}", "    " + "  ".join(show(int(i)) for i in ids[0])]
    layer = ""
    for step, tap in enumerate(tap_names(config), start=2):
        kind, place = tap, ""
        if tap.startswith("layers."):
            _, index, kind = tap.split(".", 2)
            place = f"block {index}"
        if place != layer:
            layer = place
            lines += ["", f"-- {place or 'after the blocks'} --"]
        arrays = [found[tap] for found in activations]
        lines += ["        |", f"[{step}] {_TITLES[kind]} {list(arrays[0].shape)}  ({tap})"]
        for name, array in zip(names, arrays, strict=True):
            lines.append(f"    {name:<{width}}  {_values(_last_position(array, kind))}")
        if len(arrays) > 1:
            apart = max(float(np.max(np.abs(array.astype(np.float64) - arrays[0]))) for array in arrays[1:])
            lines.append(f"    {'':<{width}}  largest difference in the whole array {apart:.2g}")
    lines += ["        |", f"[{step + 1}] softmax: the likeliest tokens to follow position {T - 1}"]
    for name, found in zip(names, activations, strict=True):
        logits_V = found["logits"][0, -1].astype(np.float64)
        probabilities_V = np.exp(logits_V - logits_V.max())
        probabilities_V /= probabilities_V.sum()
        best = np.argsort(-logits_V, kind="stable")[:candidates]
        lines.append(f"    {name}")
        lines += [f"      {show(int(i)):<16} logit {logits_V[i]:9.4f}   {probabilities_V[i]:6.2%}" for i in best]
    return "\n".join(lines) + "\n"


def _last_position(array: np.ndarray, kind: str) -> np.ndarray:
    """The last query's values, of the first head where there are heads."""
    if kind in ("self_attn.scores", "self_attn.weights"):
        return np.asarray(array[0, 0, -1])
    return np.asarray(array[0, -1, 0] if array.ndim == 4 else array[0, -1])


def _values(vector: np.ndarray, shown: int = 6) -> str:
    cells = [f"{value:9.4f}" for value in vector[: shown - 1]]
    if len(vector) > shown:
        cells.append("  ...")
    cells += [f"{value:9.4f}" for value in vector[max(len(vector) - 1, shown - 1) :]]
    return "[" + " ".join(cells) + "]"
