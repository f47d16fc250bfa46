"""Random configs of families of decoders, each with the operations that it is known for.

Most are as transformers has them. Windows, and lengths that a model was first trained with, are shorter than the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmarks.detection.draws import Draw, Values, attention_biases, gpt_values, llama_values, other_number
from samelogits.config import DecoderConfig
from samelogits.rotary import RopeScaling


def _gemma(d: Draw) -> Values:
    values = llama_values(d, d_model="whole") | attention_biases(d, 0.3)
    width = values["d_head"]
    return values | {
        "norm_placement": "sandwich",
        "norm_weight": "plus_one",
        "norm_wide": True,
        "activation": "gelu_tanh",
        "tie_embeddings": d.flip(0.7),
        "embedding_scale": math.sqrt(values["d_model"]),
        "attention_scale": other_number(d, width, 4, 30) ** -0.5,
        "n_layers": d.between(3, 5),
    }


def _gemma2(d: Draw) -> Values:
    values = _gemma(d)
    layers = range(0, values["n_layers"], 2)
    return values | {
        "attention_softcap": d.choose(2.0, 3.0, 5.0),
        "logit_softcap": d.choose(3.0, 5.0, 10.0),
        "sliding_window": d.window(),
        "sliding_layers": tuple(layers),
    }


def _gemma3(d: Draw) -> Values:
    values = _gemma(d)
    scaling = RopeScaling(kind="linear", factor=d.choose(4.0, 8.0)) if d.flip(0.7) else None
    local = RopeScaling(kind="linear", factor=2.0) if scaling and d.flip(0.3) else None
    return (
        values
        | d.every(d.choose(2, 3), values["n_layers"])
        | {
            "qk_norm": "head",
            "rope_theta": d.choose(100000.0, 1000000.0),
            "rope_scaling": scaling,
            "local_rope_theta": d.choose(100.0, 1000.0, 10000.0),
            "local_rope_scaling": local,
            "logit_softcap": d.choose(None, None, 5.0),
        }
    )


def _cohere(d: Draw) -> Values:
    values = llama_values(d) | {
        "norm": "layer_norm",
        "norm_bias": False,
        "norm_eps": 1e-5,
        "parallel_residual": True,
        "shared_norm": True,
        "tie_embeddings": d.flip(0.7),
        "logit_scale": d.choose(0.0625, 0.3, 0.25),
    }
    values |= attention_biases(d, 0.3)
    if d.flip():
        return values | {"qk_norm": "heads"}
    n_layers = d.between(3, 5)
    windows = d.every(d.choose(2, 3), n_layers)
    bare = tuple(i for i in range(n_layers) if i not in windows["sliding_layers"])
    return values | windows | {"n_layers": n_layers, "no_rope_layers": bare}


def _smollm(d: Draw) -> Values:
    values = llama_values(d) | attention_biases(d, 0.3)
    n_layers, interval = d.between(3, 5), d.choose(2, 3)
    return values | {"n_layers": n_layers, "no_rope_layers": tuple(range(interval - 1, n_layers, interval))}


def _olmo(d: Draw) -> Values:
    values = llama_values(d) | attention_biases(d, 0.3)
    limit = d.choose(0.8, 1.2, 2.0) if d.flip(0.7) else None
    return values | {"norm": "layer_norm", "norm_weight": "none", "norm_eps": 1e-5, "clip_qkv": limit}


def _olmo2(d: Draw) -> Values:
    values = llama_values(d) | attention_biases(d, 0.3)
    values |= {"norm_placement": "output", "qk_norm": "projection", "norm_wide": True}
    if d.flip(0.4):  # OLMo 3
        values |= {"n_layers": d.between(3, 5)}
        values |= d.every(d.choose(2, 3, 4), values["n_layers"])
    return values


def _granite(d: Draw) -> Values:
    values = llama_values(d, d_head=(8, 12, 16), d_model="free") | attention_biases(d, 0.3)
    scaling = RopeScaling(
        kind="llama3",
        factor=8.0,
        original_length=d.between(12, 20),
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
    )
    return values | {
        "mlp_bias": d.flip(0.3),
        "residual_scale": d.choose(0.3, 0.5, 0.7),
        "embedding_scale": round(1.5 + 5 * d.rng.random(), 3),
        "attention_scale": d.choose(0.1, 0.2, 0.45),
        "logit_scale": 1 / d.choose(3.0, 6.0, 2.5),
        "rope_scaling": scaling,
    }


def _phi(d: Draw) -> Values:
    values = gpt_values(d) | {
        "position": "rope",
        "rope_theta": d.choose(10000.0, 1000.0, 100.0),
        "rotary_width": d.choose(4, 6),
        "parallel_residual": True,
    }
    if d.flip():  # GPT-NeoX
        return values
    normed = d.flip(0.7)
    return values | {
        "activation": "gelu_tanh",
        "shared_norm": True,
        "head_bias": True,
        "qk_norm": "head" if normed else "none",
        "qk_norm_bias": normed,
    }


def _nemotron(d: Draw) -> Values:
    biased = d.flip(0.3)
    return llama_values(d) | {
        "norm": "layer_norm",
        "norm_weight": "plus_one",
        "norm_eps": 1e-5,
        "gated": False,
        "activation": "relu_squared",
        "rotary_width": d.choose(4, 6),
        "attention_bias": biased,
        "attention_output_bias": biased,
        "mlp_bias": d.flip(0.3),
    }


def _bloom(d: Draw) -> Values:
    values = gpt_values(d)
    return values | {
        "d_ff": 4 * values["d_model"],
        "activation": "gelu_tanh",
        "position": "alibi",
        "alibi_max": 8.0,
        "embedding_norm": True,
    }


def _mpt(d: Draw) -> Values:
    values = gpt_values(d)
    return values | {
        "d_ff": 4 * values["d_model"],
        "norm_bias": False,
        "activation": "gelu",
        "position": "alibi",
        "alibi_max": d.choose(8.0, 8.0, 5.0, 4.0),
        "attention_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "clip_qkv": d.choose(0.8, 1.2, 2.0) if d.flip() else None,
        "attention_scale": d.choose(0.2, 0.45) if d.flip() else None,
    }


def _falcon(d: Draw) -> Values:
    """Its ALiBi is rounded to bfloat16, which shows with more than eight heads: fewer have slopes that are exact."""
    biased, parallel = d.flip(), d.flip()
    values = gpt_values(d, (9, 9), (12, 12), (16, 16), (10, 1), (12, 4) if parallel else (12, 1), d_head=(4, 6))
    grouped = 1 < values["n_kv_heads"] < values["n_heads"]
    return values | {
        "activation": "gelu",
        "position": "alibi",
        "alibi_max": 8.0,
        "alibi_rounded": True,
        "attention_bias": biased,
        "attention_output_bias": biased,
        "mlp_bias": biased,
        "parallel_residual": parallel,
        "shared_norm": parallel and not (grouped and d.flip()),
    }


def _opt(d: Draw) -> Values:
    values, biased, before = gpt_values(d), d.flip(0.8), d.flip()
    return values | {
        "activation": d.choose("relu", "gelu"),
        "position_offset": 2,
        "norm_placement": "pre" if before else "post",
        "final_norm": before and d.flip(0.8),
        "norm_weight": "plain" if d.flip(0.85) else "none",
        "attention_bias": biased,
        "attention_output_bias": biased,
        "mlp_bias": biased,
        "embedding_width": values["d_model"] // 2 + 1 if d.flip(0.6) else None,
    }


def _neo(d: Draw) -> Values:
    values = gpt_values(d)
    n_layers = d.between(3, 5)
    return values | {
        "n_layers": n_layers,
        "attention_scale": 1.0,
        "attention_bias": False,
        "sliding_window": d.window(),
        "sliding_layers": tuple(range(1, n_layers, 2)),
        "dropout": 0.1,
    }


def _stanford(d: Draw) -> Values:
    """GPT-2 as Stanford's Mistral of 2021 has it; so many layers that their numbers sort otherwise as text."""
    values = gpt_values(d, (3, 3), (4, 4), (5, 5), d_head=(8, 10))
    return values | {"n_layers": d.between(11, 12), "scale_by_layer": True, "dropout": 0.1}


def _yarn(d: Draw) -> Values:
    """Bounds that differ when they are rounded: a wide head, a base that is not too large."""
    factor = d.choose(4.0, 8.0)
    scaling = RopeScaling(
        kind="yarn",
        factor=factor,
        original_length=d.between(16, d.length - 4),
        beta_fast=d.choose(1.0, 2.0, 32.0),
        beta_slow=d.choose(0.25, 0.5),
        truncate=d.flip(0.4),
        attention_factor=d.choose(1.2, 1.5, 0.8, 0.1 * math.log(factor) + 1),
    )
    theta = d.choose(10000.0, 5000.0, 1000.0)
    return llama_values(d, d_head=(16, 20, 24), d_model="whole") | {"rope_theta": theta, "rope_scaling": scaling}


def _longrope(d: Draw, *, within: bool = False) -> Values:
    """Phi 3. within: the text is no longer than what it was first trained with."""
    values = llama_values(d, d_head=(8, 12, 16))
    original = d.length + d.between(0, 20) if within else d.between(8, d.length - 1)
    width = d.choose(values["d_head"], values["d_head"] - 2)
    short, long = (tuple(round(1 + most * float(x), 3) for x in np.sort(d.rng.random(width // 2))) for most in (1, 6))
    scaling = RopeScaling(
        kind="longrope", original_length=original, short_factors=short, long_factors=long,
        attention_factor=d.choose(1.1, 1.19, 1.0),
    )  # fmt: skip
    return values | {"rotary_width": width if width < values["d_head"] else None, "rope_scaling": scaling}


def _dynamic(d: Draw) -> Values:
    """max_seq_len is what it was first trained with, as transformers has it."""
    original = d.between(8, d.length // 2)
    scaling = RopeScaling(kind="dynamic", factor=d.choose(2.0, 4.0), original_length=original)
    return llama_values(d, d_model="whole") | {"max_seq_len": original, "rope_scaling": scaling}


def _experts(d: Draw, values: Values) -> Values:
    n_experts = d.between(4, 7)
    width = d.between(9, 30)
    return values | {
        "d_ff": width,
        "expert_width": width,
        "n_experts": n_experts,
        "n_active_experts": d.between(2, n_experts - 2),
        "normalize_experts": True,
    }


def _mixtral(d: Draw) -> Values:
    values = _experts(d, llama_values(d, d_model="free"))
    if d.flip(0.4):
        n_layers = values["n_layers"]
        return values | {"sliding_window": d.window(), "sliding_layers": tuple(range(n_layers))}
    if d.flip():  # Qwen 3's, which may have layers without experts
        values |= {"qk_norm": "head", "dense_layers": (d.between(0, 1),), "d_ff": d.between(20, 50)}
    return values


def _olmoe(d: Draw) -> Values:
    values = _experts(d, llama_values(d)) | attention_biases(d, 0.3)
    limit = d.choose(0.8, 1.2) if d.flip() else None
    return values | {"qk_norm": "projection", "normalize_experts": d.flip(0.2), "clip_qkv": limit}


DRAWN: dict[str, Callable[[Draw], Values]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "cohere": _cohere,
    "smollm": _smollm,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "granite": _granite,
    "phi": _phi,
    "nemotron": _nemotron,
    "bloom": _bloom,
    "mpt": _mpt,
    "falcon": _falcon,
    "opt": _opt,
    "neo": _neo,
    "stanford": _stanford,
    "yarn": _yarn,
    "longrope": _longrope,
    "longrope within": lambda d: _longrope(d, within=True),
    "dynamic": _dynamic,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
}


def draw_config(rng: np.random.Generator, family: str, length: int) -> DecoderConfig:
    """A config of one of these families, for texts of this length."""
    return DecoderConfig(**DRAWN[family](Draw(rng, length)))
