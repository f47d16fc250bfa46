"""SL6xx: embeddings and the output head."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.catalogue.norms import of_stack
from samelogits.checking.rounding import round_bfloat16
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig

Array = np.ndarray


def _untied(config: DecoderConfig) -> bool:
    return not config.tie_embeddings


def _embedded(v: Variant, change: Callable[[Array], Array]) -> None:
    """Change token embeddings, not those of positions."""
    tokens = v.batch.tokens_BT
    v.exchange(
        "embed", lambda right: lambda ids, table: change(right(ids, table)) if ids is tokens else right(ids, table)
    )


def _head(v: Variant, operation: str, wrap: Callable[[Callable[..., Array]], Callable[..., Array]]) -> None:
    v.places = ["head"]
    v.exchange(operation, wrap)


def _logits(v: Variant, change: Callable[[Array], Array]) -> None:
    """Change what the head gives in the end."""
    c = v.config
    last = "soft_cap" if c.logit_softcap is not None else "scale" if c.logit_scale is not None else "linear"
    _head(v, last, lambda right: lambda *a: change(right(*a)))


def _unscaled(config: DecoderConfig) -> bool:
    """Whether a scale of the embeddings is neither meant nor undone by a norm."""
    return config.embedding_scale is None and not config.embedding_norm


def _scaled(config: DecoderConfig) -> bool:
    return config.embedding_scale not in (None, 1)


def _scaled_logits(config: DecoderConfig) -> bool:
    return config.logit_scale not in (None, 1)


def _capped(config: DecoderConfig) -> bool:
    return config.logit_softcap is not None


def _narrow(config: DecoderConfig) -> bool:
    return config.embedding_width not in (None, config.d_model)


def _scale(v: Variant, change: Callable[[float], float]) -> None:
    """Another factor of the embeddings."""
    v.places = ["stack"]
    v.exchange("scale_rounded", lambda right: lambda x, factor: right(x, change(factor)))


@mistake("SL601", "token embeddings are multiplied by sqrt(D)", _unscaled, local=False)
def embeddings_scaled(v: Variant) -> None:
    """Gemma and the first transformer do so, GPT-2 and Llama don't."""
    _embedded(v, lambda x: x * math.sqrt(v.config.d_model))


@mistake("SL602", "token embeddings are divided by sqrt(D)", _unscaled, local=False)
def embeddings_unscaled(v: Variant) -> None:
    """The scale was folded into the table already, or is applied the wrong way round."""
    _embedded(v, lambda x: x / math.sqrt(v.config.d_model))


@mistake("SL603", "each token reads the next row of the embedding", local=False)
def rows_shifted(v: Variant) -> None:
    """The table has a row more or less in front (a padding row, a special token)."""
    _ids(v, lambda ids: (ids + 1) % v.config.vocab_size)


@mistake("SL604", "each token reads the row before", local=False)
def rows_shifted_back(v: Variant) -> None:
    """The table has a row less in front than the ids expect."""
    _ids(v, lambda ids: (ids - 1) % v.config.vocab_size)


@mistake("SL605", "the tokens are shifted: each place reads the token before it", local=False)
def tokens_shifted(v: Variant) -> None:
    """A start token is put in front and the last token falls out, as encoder-decoder models do with their labels."""
    _ids(v, lambda ids: np.roll(ids, 1, axis=1))


def _ids(v: Variant, change: Callable[[Array], Array]) -> None:
    tokens = v.batch.tokens_BT
    v.exchange("embed", lambda right: lambda ids, table: right(change(ids) if ids is tokens else ids, table))


@mistake("SL606", "token embeddings are not scaled", _scaled, local=False)
def scale_missing(v: Variant) -> None:
    """Gemma multiplies them by sqrt(D), Granite by its `embedding_multiplier`, and a block written for Llama has no
    place for it."""
    _scale(v, lambda factor: 1.0)


@mistake(
    "SL607",
    "the embeddings' scale is rounded to bfloat16",
    lambda c: c.embedding_scale is not None and _bfloat16(c.embedding_scale) != c.embedding_scale,
    local=False,
)
def scale_bfloat16(v: Variant) -> None:
    """Gemma's sqrt(3072) is 55.4256 in float32 and 55.5 in bfloat16. Right: as the dtype of the run rounds it. Widths
    such as 2304 are exact, and hide it."""
    _scale(v, _bfloat16)


def _bfloat16(factor: float) -> float:
    return float(round_bfloat16(np.array(factor)))


@mistake("SL608", "token embeddings are divided by their scale", _scaled, local=False)
def scale_inverted(v: Variant) -> None:
    """Divided where it should be multiplied."""
    _scale(v, lambda factor: 1 / factor)


@mistake(
    "SL609", "the embeddings' scale is applied to the head too", lambda c: _scaled(c) and c.tie_embeddings, local=False
)
def scale_of_head(v: Variant) -> None:
    """The scale was folded into the one table that embedding and head share. Right: on the way in alone."""
    factor = v.config.embedding_scale
    _head(v, "linear", lambda right: lambda x, *rest: right(x * factor, *rest))


@mistake("SL610", "the norm after the embedding is left out", lambda c: c.embedding_norm, local=False)
def embedding_norm_missing(v: Variant) -> None:
    """BLOOM's `word_embeddings_layernorm` was not loaded: other models have none."""
    of_stack(v, 0, lambda right, x, *rest: x)


@mistake("SL611", "the output head is the embedding, though the file has its own", _untied, local=False)
def head_tied(v: Variant) -> None:
    """`tie_word_embeddings` isn't read, and its default is true in many classes."""
    v.parameters["lm_head.weight"] = v.parameters["model.embed_tokens.weight"]


@mistake("SL612", "the embedding is the output head, though the file has its own", _untied, local=False)
def embedding_tied(v: Variant) -> None:
    """Tied in the other direction: the head was loaded last and both share one storage."""
    v.parameters["model.embed_tokens.weight"] = v.parameters["lm_head.weight"]


@mistake("SL613", "embedding and output head are swapped", _untied, local=False)
def head_and_embedding_swapped(v: Variant) -> None:
    """The two have one shape, and GGUF's `output` and `token_embd` were exchanged."""
    p, a, b = v.parameters, "lm_head.weight", "model.embed_tokens.weight"
    p[a], p[b] = p[b], p[a]


@mistake(
    "SL614", "the projection back to the embedding's width is that into the model, transposed", _narrow, local=False
)
def projections_tied(v: Variant) -> None:
    """OPT's `project_in` and `project_out` have transposed shapes, but weights of their own."""
    v.parameters["model.embed_out.weight"] = np.ascontiguousarray(v.parameters["model.embed_in.weight"].T)


@mistake("SL621", "logits have a soft cap at 30", lambda c: not _capped(c), local=False)
def logits_capped(v: Variant) -> None:
    """30 tanh(logits / 30), as Gemma 2 has it. The order of the logits stays, so that greedy text hides it."""
    _logits(v, lambda x: 30 * np.tanh(x / 30))


@mistake("SL622", "logits are divided by sqrt(D)", lambda c: c.logit_scale is None, local=False)
def logits_scaled(v: Variant) -> None:
    """T5 scales tied heads so. Greedy text hides it."""
    _head(v, "linear", lambda right: lambda *a: right(*a) / math.sqrt(v.config.d_model))


@mistake("SL623", "log-probabilities are returned, not logits", local=False)
def log_probabilities(v: Variant) -> None:
    """A log-softmax was applied already. The softmax of both is the same; logits are not."""
    _logits(
        v, lambda x: x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
    )


@mistake("SL624", "probabilities are returned, not logits", local=False)
def probabilities(v: Variant) -> None:
    """A softmax was applied already, and the loss or the sampler will apply another."""

    def softmax(x: Array) -> Array:
        exp = np.exp(x - x.max(-1, keepdims=True))
        return exp / exp.sum(-1, keepdims=True)

    _logits(v, softmax)


@mistake("SL625", "logits are rounded to bfloat16", rounding=True, local=False)
def logits_bfloat16(v: Variant) -> None:
    """The head runs in 16 bits, or its output is cast. Logits that become equal then go to the lowest id."""
    _logits(v, round_bfloat16)


@mistake("SL626", "logits are divided by a temperature of 0.8", local=False)
def logits_tempered(v: Variant) -> None:
    """The sampler's temperature is applied to what is returned. Trainers mean raw logits."""
    _logits(v, lambda x: x / 0.8)


@mistake("SL627", "logits are those of the next place", local=False)
def logits_shifted(v: Variant) -> None:
    """Logits were shifted for the loss (`logits[:, 1:]`), and lie one place too early."""
    _logits(v, lambda x: np.roll(x, -1, axis=1))


@mistake("SL628", "logits are not scaled", _scaled_logits, local=False)
def logit_scale_missing(v: Variant) -> None:
    """Cohere's `logit_scale`, Granite's `logits_scaling` or MPT's isn't read. Greedy text hides it."""
    _head(v, "scale", lambda right: lambda x, factor: x)


@mistake("SL629", "logits are divided by their scale", _scaled_logits, local=False)
def logit_scale_inverted(v: Variant) -> None:
    """Granite divides by `logits_scaling`, Cohere multiplies by `logit_scale`. Greedy text hides it."""
    _head(v, "scale", lambda right: lambda x, factor: right(x, 1 / factor))


@mistake("SL630", "the logits' soft cap is left out", _capped, local=False)
def logit_cap_missing(v: Variant) -> None:
    """`final_logit_softcapping` isn't read. The order of the logits stays, so that greedy text hides it."""
    _head(v, "soft_cap", lambda right: lambda x, cap: x)


@mistake("SL631", "the output head's bias is missing", lambda c: c.head_bias, local=False)
def head_bias_missing(v: Variant) -> None:
    """Phi, GPT-J and CodeGen have `lm_head.bias`; most heads have none, and an adapter that reads only the weight drops
    it."""
    v.places = ["head"]
    v.edit("lm_head.bias", np.zeros_like)
