"""Mistakes that are another config: transformers' model of it reads the same parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.detection.transformers_model import family_of
from samelogits.config import DecoderConfig
from samelogits.rotary import RopeScaling

Change = dict[str, Any]
WIDE = 2**20  # a window that no text fills


def _scaling(**fields: Any) -> Callable[[DecoderConfig], Change]:
    """The rotary scaling with other values."""
    return lambda c: {"rope_scaling": replace(c.rope_scaling, **fields)}


def _linear(factor: float) -> RopeScaling:
    return RopeScaling(kind="linear", factor=factor)


def _window(change: int) -> Callable[[DecoderConfig], Change]:
    return lambda c: {"sliding_window": (c.sliding_window or 0) + change}


def _bases(power: Callable[[DecoderConfig], float]) -> Callable[[DecoderConfig], Change]:
    """All rotary bases raised to a power: theta^(-2i / width) with another width."""

    def change(c: DecoderConfig) -> Change:
        local = {} if c.local_rope_theta is None else {"local_rope_theta": c.local_rope_theta ** power(c)}
        return {"rope_theta": (c.rope_theta or 1.0) ** power(c)} | local

    return change


def _always_raised(c: DecoderConfig) -> Change:
    """The base that dynamic scaling has at twice the length, in short texts too."""
    assert c.rope_scaling is not None
    raised = (c.rope_scaling.factor or 1.0) ** (c.rotated / (c.rotated - 2))
    return {"rope_theta": (c.rope_theta or 1.0) * raised, "rope_scaling": None}


def _yarn_factor(c: DecoderConfig) -> Change:
    assert c.rope_scaling is not None
    factor = c.rope_scaling.factor or 1.0
    return {"rope_scaling": replace(c.rope_scaling, attention_factor=1 + 0.1 * math.log(max(factor, 1.0)))}


def _sliding(choose: Callable[[int, DecoderConfig], bool]) -> Callable[[DecoderConfig], Change]:
    """Other sliding layers. Where layers rotate, their masks are exchanged instead: see transformers_family.py."""
    return lambda c: {"sliding_layers": tuple(i for i in range(c.n_layers) if choose(i, c))}


LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
)
CHANGES: dict[str, Callable[[DecoderConfig], Change]] = {
    "SL101": lambda c: {"activation": "gelu_tanh"},
    "SL102": lambda c: {"activation": "gelu"},
    "SL103": lambda c: {"activation": "silu"},
    "SL104": lambda c: {"activation": "gelu"},
    "SL105": lambda c: {"activation": "relu"},
    "SL106": lambda c: {"activation": "gelu"},
    "SL109": lambda c: {"activation": "relu_squared"},
    "SL111": lambda c: {"activation": "relu"},
    "SL112": lambda c: {"activation": "gelu"},
    "SL201": lambda c: {"norm_eps": c.norm_eps / 10},
    "SL202": lambda c: {"norm_eps": c.norm_eps * 10},
    "SL303": lambda c: {"rope_theta": 10000.0},
    "SL304": lambda c: {"rope_theta": 500000.0},
    "SL305": lambda c: {"rope_theta": 1000000.0},
    "SL312": _bases(lambda c: c.rotated / c.d_model),
    "SL313": _bases(lambda c: 0.5),
    "SL316": lambda c: {"rope_scaling": _linear(2.0)},
    "SL317": lambda c: {"rope_scaling": _linear(4.0)},
    "SL318": lambda c: {"rope_scaling": _linear(8.0)},
    "SL319": lambda c: {"rope_scaling": LLAMA3},
    "SL320": lambda c: {"rotary_width": c.d_head // 2},
    "SL324": lambda c: {"rotary_width": None},
    "SL326": _bases(lambda c: c.rotated / c.d_head),
    "SL327": lambda c: {"no_rope_layers": ()},
    "SL328": lambda c: {"no_rope_layers": tuple(sorted((i + 1) % c.n_layers for i in c.no_rope_layers))},
    "SL329": lambda c: {"local_rope_theta": None, "local_rope_scaling": None},
    "SL330": lambda c: {"rope_theta": c.local_rope_theta, "rope_scaling": c.local_rope_scaling},
    "SL340": lambda c: {
        "rope_theta": c.local_rope_theta,
        "rope_scaling": c.local_rope_scaling,
        "local_rope_theta": c.rope_theta,
        "local_rope_scaling": c.rope_scaling,
    },
    "SL341": lambda c: {"rope_scaling": None},
    "SL342": _scaling(attention_factor=1.0),
    "SL343": _yarn_factor,
    "SL344": lambda c: {"rope_scaling": _linear(c.rope_scaling.factor)},  # type: ignore[union-attr, arg-type]
    "SL345": lambda c: _scaling(truncate=not c.rope_scaling.truncate)(c),  # type: ignore[union-attr]
    "SL347": lambda c: _scaling(long_factors=c.rope_scaling.short_factors)(c),  # type: ignore[union-attr]
    "SL348": lambda c: _scaling(short_factors=c.rope_scaling.long_factors)(c),  # type: ignore[union-attr]
    "SL349": _always_raised,
    "SL350": lambda c: {"local_rope_scaling": c.rope_scaling},
    "SL433": lambda c: {"attention_softcap": None},
    "SL447": lambda c: {"clip_qkv": None},
    "SL451": lambda c: {"sliding_window": WIDE},
    "SL452": _window(1),
    "SL453": _window(-1),
    "SL454": _sliding(lambda i, c: True),
    "SL455": _sliding(lambda i, c: i not in c.sliding_layers),
    "SL456": _sliding(lambda i, c: (i - 1) % c.n_layers in c.sliding_layers),
    "SL628": lambda c: {"logit_scale": None},
    "SL629": lambda c: {"logit_scale": 1 / c.logit_scale},  # type: ignore[operator]
    "SL630": lambda c: {"logit_softcap": None},
}
OTHER_LAYERS = frozenset(["SL454", "SL455", "SL456"])


def changed(config: DecoderConfig, code: str) -> DecoderConfig | None:
    """The config that the mistake is, None where the model's family can't hold it."""
    if code in OTHER_LAYERS and config.position == "rope":
        return None
    family = family_of(config)
    assert family is not None
    other = replace(config, **CHANGES[code](config))
    if (other.local_rope_theta, other.local_rope_scaling) == (other.rope_theta, other.rope_scaling):
        other = replace(other, local_rope_theta=None, local_rope_scaling=None)  # which is the same
    tried = [other] if other.logit_scale is not None else [other, replace(other, logit_scale=1.0)]
    return next((found for found in tried if not family.obstacles(found)), None)
