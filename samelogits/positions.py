"""Position tables, computed once here and handed to all three implementations: the table is part of the function."""

from __future__ import annotations

import numpy as np

from samelogits.config import DecoderConfig
from samelogits.rotary import RopeScaling, rotary_frequencies


def rotary_tables(
    positions_BT: np.ndarray, width: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [B, T, width / 2] in float32 for half-split rotary positions (Su et al., 2021).

    Trained models ran with float32 tables: frequencies 1 / theta^(2i / width), then angles, then cos and sin, each
    rounded once to float32. A float64 table would be another function: its angle differs by 5e-4 at position 8000.
    The kinds of scaling that depend on the text's length take it from the largest position of the batch.
    """
    length = int(positions_BT.max(initial=-1)) + 1
    frequencies = rotary_frequencies(width, theta, scaling, length)
    cos, sin = cosines_and_sines(positions_BT[..., None].astype(np.float32) * frequencies)
    factor = np.float32(1 if scaling is None or scaling.attention_factor is None else scaling.attention_factor)
    return cos * factor, sin * factor


def cosines_and_sines(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both of float32 angles, rounded once to float32."""
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)


def sinusoidal_table(positions_BT: np.ndarray, d_model: int) -> np.ndarray:
    """Fixed position vectors [B, T, D] in float32, sine and cosine interleaved (Vaswani et al., 2017)."""
    frequencies = 10000.0 ** -(np.arange(0, d_model, 2, dtype=np.float64) / d_model)
    angles = positions_BT[..., None] * frequencies
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*positions_BT.shape, d_model).astype(np.float32)


def alibi_slopes(n_heads: int, steepest: float) -> np.ndarray:
    """The slope of each head, float32 [N]: 2^(-steepest i / P) for the largest power of two P of heads; the others
    take every second one of those of 2 P heads (Press et al., 2021)."""
    power = 1 << (n_heads.bit_length() - 1)
    exponents = np.arange(1, power + 1) / power
    between = np.arange(1, 2 * (n_heads - power), 2) / (2 * power)
    return np.exp2(-steepest * np.concatenate([exponents, between])).astype(np.float32)


def alibi_table(
    config: DecoderConfig, positions_BT: np.ndarray, key_positions_BS: np.ndarray, slopes_N: np.ndarray | None = None
) -> np.ndarray:
    """What ALiBi adds to the scores, float32 [B, N, T, S]: a head's slope (default: that of alibi_slopes) times the way
    from query to key.

    With alibi_rounded it counts from the first token instead, which leaves the softmax as it is but for its roundings:
    slopes, positions and products are bfloat16, and the sum is scaled like q . k.
    """
    if slopes_N is None:
        assert config.alibi_max is not None
        slopes_N = alibi_slopes(config.n_heads, config.alibi_max)
    if config.alibi_rounded:
        table_BNS = to_bfloat16(to_bfloat16(slopes_N)[:, None] * to_bfloat16(key_positions_BS[:, None]))
        scaled_BNS = table_BNS * np.float32(config.score_scale(0))
        return np.asarray(np.repeat(scaled_BNS[:, :, None], positions_BT.shape[1], axis=2))
    way_BTS = key_positions_BS[:, None, :] - positions_BT[:, :, None]
    return np.asarray(slopes_N[:, None, None] * way_BTS[:, None].astype(np.float32))


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Finite float32 values rounded to the nearest bfloat16, ties to even, as float32."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)
