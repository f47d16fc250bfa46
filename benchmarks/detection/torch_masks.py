"""Which keys a query may read, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from samelogits.config import DecoderConfig


def slides(config: DecoderConfig, index: int, wrong: frozenset[str]) -> bool:
    """Whether a layer believes that it is one of those with a window."""
    layers = set(config.sliding_layers)
    if "SL455" in wrong:
        layers = set(range(config.n_layers)) - layers
    if "SL456" in wrong:
        layers = {(i + 1) % config.n_layers for i in layers}
    return index in layers


def window_of(config: DecoderConfig, index: int, length: int, wrong: frozenset[str]) -> int | None:
    """How many keys a query of this layer sees, its own included; None for all."""
    window = config.sliding_window if slides(config, index, wrong) or "SL454" in wrong else None
    if "SL425" in wrong:
        return max(1, length // 2)
    if window is None or "SL451" in wrong:
        return None
    if "SL452" in wrong:
        return window + 1
    return window - 1 if "SL453" in wrong else window


def visible_keys(config: DecoderConfig, index: int, mask_BT: Tensor, wrong: frozenset[str]) -> Tensor:
    """True where a key may be read, [B, 1, T, S]."""
    T = mask_BT.shape[1]
    seen = torch.ones(T, T, dtype=torch.bool)
    if "SL422" in wrong:
        seen = seen.tril(diagonal=1)
    elif "SL423" in wrong:
        seen = seen.tril(diagonal=-1)
    elif "SL421" not in wrong:
        seen = seen.tril()
    window = window_of(config, index, T, wrong)
    if window is not None:
        seen = seen.triu(diagonal=1 - window)
    visible = seen.expand(len(mask_BT), 1, T, T)
    return visible if "SL424" in wrong else visible & mask_BT[:, None, None, :]
