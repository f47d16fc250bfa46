"""SL6xx: embeddings and the output head."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
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


def _logits(v: Variant, change: Callable[[Array], Array]) -> None:
    v.places = ["head"]
    v.exchange("linear", lambda right: lambda *a: change(right(*a)))


@mistake("SL601", "token embeddings are multiplied by sqrt(D)", local=False)
def embeddings_scaled(v: Variant) -> None:
    """Gemma and the first transformer do so, GPT-2 and Llama don't."""
    _embedded(v, lambda x: x * math.sqrt(v.config.d_model))


@mistake("SL602", "token embeddings are divided by sqrt(D)", local=False)
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


@mistake("SL621", "logits have a soft cap at 30", local=False)
def logits_capped(v: Variant) -> None:
    """30 tanh(logits / 30), as Gemma 2 has it. The order of the logits stays, so that greedy text hides it."""
    _logits(v, lambda x: 30 * np.tanh(x / 30))


@mistake("SL622", "logits are divided by sqrt(D)", local=False)
def logits_scaled(v: Variant) -> None:
    """T5 scales tied heads so. Greedy text hides it."""
    _logits(v, lambda x: x / math.sqrt(v.config.d_model))


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
