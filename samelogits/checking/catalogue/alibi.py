"""SL3xx: ALiBi."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from samelogits.checking.catalogue.mistake import mistake
from samelogits.checking.variant import Variant
from samelogits.config import DecoderConfig
from samelogits.positions import alibi_slopes, alibi_table

Array = np.ndarray


def _alibi(config: DecoderConfig) -> bool:
    return config.position == "alibi"


def _rounded(config: DecoderConfig) -> bool:
    return config.alibi_rounded


def _plain(config: DecoderConfig) -> bool:
    return _alibi(config) and not config.alibi_rounded


def _many(config: DecoderConfig) -> bool:
    return _alibi(config) and config.n_heads > 1


def _odd(config: DecoderConfig) -> bool:
    """Whether some slopes lie between those of a power of two of heads."""
    return _alibi(config) and config.n_heads & (config.n_heads - 1) != 0


def bias(v: Variant, change: Callable[[Array], Array]) -> None:
    """Change what is added to the scores [B, N, T, S]."""

    def wrap(right: Callable[..., Array]) -> Callable[..., Array]:
        return lambda x, y: right(x, change(y)) if y.ndim == 4 else right(x, y)

    v.exchange("add", wrap)


def _slopes(v: Variant, slopes_N: Array) -> None:
    """Other slopes of the heads."""
    c, keys_BS = v.config, v.batch.positions_BT
    assert c.alibi_max is not None
    ratio = (slopes_N / alibi_slopes(c.n_heads, c.alibi_max))[:, None, None]
    if c.alibi_rounded:  # the wrong slopes are rounded too, and their products
        right, wrong = (alibi_table(c, keys_BS, keys_BS, slopes)[:, :, :1] for slopes in (None, slopes_N))
        ratio = np.divide(wrong, right, out=np.ones(right.shape), where=right != 0)
    bias(v, lambda table: table * ratio)


@mistake("SL351", "ALiBi is left out", _alibi)
def alibi_missing(v: Variant) -> None:
    """BLOOM, MPT and some of Falcon's models have no other positions: without it attention knows no order but the
    mask's."""
    bias(v, np.zeros_like)


@mistake("SL352", "ALiBi's slopes are in reverse order", _many)
def alibi_reversed(v: Variant) -> None:
    """The first head has the steepest slope. Right: 2^(-8 / N) for the first, 2^-8 for the last."""
    assert v.config.alibi_max is not None
    _slopes(v, alibi_slopes(v.config.n_heads, v.config.alibi_max)[::-1])


@mistake("SL353", "ALiBi's slopes begin at 1", _alibi)
def alibi_from_one(v: Variant) -> None:
    """Heads count from 0: 2^(-8 i / N) for i = 0, 1, ... instead of 1, 2, ...; and so do those between a power of
    two."""
    steepest, heads = v.config.alibi_max, v.config.n_heads
    assert steepest is not None
    power = 1 << (heads.bit_length() - 1)
    exponents = np.concatenate([np.arange(power), np.arange(heads - power)]) / power
    _slopes(v, np.exp2(-steepest * exponents))


@mistake("SL354", "ALiBi's slopes fall evenly, where the heads are no power of two", _odd)
def alibi_even(v: Variant) -> None:
    """2^(-8 i / N) for all heads. Right: those of the largest power of two, then every second one of twice as many."""
    c = v.config
    assert c.alibi_max is not None
    _slopes(v, np.exp2(-c.alibi_max * np.arange(1, c.n_heads + 1) / c.n_heads))


@mistake("SL355", "ALiBi's sign is wrong", _alibi)
def alibi_sign(v: Variant) -> None:
    """Far tokens are favoured, not near ones: the distance was counted from key to query, or subtracted."""
    bias(v, lambda table: -table)


@mistake("SL356", "ALiBi is not scaled with the scores", lambda c: _rounded(c) and c.score_scale(0) != 1)
def alibi_unscaled(v: Variant) -> None:
    """q . k / sqrt(H) + ALiBi instead of (q . k + ALiBi) / sqrt(H), which is Falcon's. BLOOM and MPT scale q . k
    alone."""
    bias(v, lambda table: table / v.config.score_scale(0))


@mistake("SL357", "ALiBi is scaled with the scores", lambda c: _plain(c) and c.score_scale(0) != 1)
def alibi_scaled(v: Variant) -> None:
    """(q . k + ALiBi) / sqrt(H), which is Falcon's, instead of q . k / sqrt(H) + ALiBi."""
    bias(v, lambda table: table * v.config.score_scale(0))


@mistake(
    "SL358",
    "ALiBi's table is not rounded to bfloat16",
    _rounded,
    seen_with="slopes or distances that bfloat16 can't hold: over 256 tokens, or more than 8 heads, of no power of two",
    rounding=True,
)
def alibi_unrounded(v: Variant) -> None:
    """Falcon's models were trained with slopes, and their products with positions, in bfloat16, and run so in any
    precision."""
    c = v.config
    assert c.alibi_max is not None
    positions = v.batch.positions_BT[:, None, None].astype(np.float64)
    exact = alibi_slopes(c.n_heads, c.alibi_max)[:, None, None] * positions * c.score_scale(0)
    bias(v, lambda table: np.broadcast_to(exact, table.shape))


@mistake("SL359", "ALiBi's steepest slope is that of a maximum of 8", lambda c: _alibi(c) and c.alibi_max != 8)
def alibi_default(v: Variant) -> None:
    """MPT has `alibi_bias_max` in its configuration; 8 is the default."""
    _slopes(v, alibi_slopes(v.config.n_heads, 8.0))
