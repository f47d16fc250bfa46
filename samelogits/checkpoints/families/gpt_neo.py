"""GPT-Neo: scores without a factor, and layers that look back through a window."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig, one_rate
from samelogits.checkpoints.families.gpt2 import BLOCK, GPT2_HARMLESS, LAYER, K, Q, V, head_width
from samelogits.config import DecoderConfig

_DEFAULT_TYPES = [[["global", "local"], 12]]
_DEFAULT_WINDOW = 256


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    # Dropout on the attention weights acts in training only, and this decoder has none there: any rate is accepted.
    keys.take("attention_dropout", float)
    layers = _attention_layers(keys, known["n_layers"])
    local = tuple(i for i, kind in enumerate(layers) if kind == "local")
    window = keys.take("window_size", int, _DEFAULT_WINDOW)
    return {
        "n_kv_heads": known["n_heads"],
        "d_head": head_width(keys, known, "num_heads", "hidden_size"),
        "d_ff": keys.take("intermediate_size", int, 4 * known["d_model"]),
        "dropout": one_rate(*(keys.take(f"{part}_dropout", float, 0.0) for part in ("resid", "embed"))),
        "sliding_window": window if local else None,
        "sliding_layers": local,
    }


def _attention_layers(keys: ForeignConfig, n_layers: int) -> list[str]:
    """The kind of each layer: attention_types says it in short, attention_layers at length."""
    types, layers = keys.take("attention_types", list), keys.take("attention_layers", list)
    if types is None and layers is None:
        types = _DEFAULT_TYPES
    if types is not None:
        try:
            # No more than one too many: the file decides how many there would be.
            several = (kinds for kinds, times in types for _ in range(min(times, n_layers + 1)))
            spelled = list(islice((kind for kinds in several for kind in kinds), n_layers + 1))
        except (TypeError, ValueError):
            raise keys.fault("attention_types", "pairs of a list of kinds and a number", types) from None
        if layers is not None and layers != spelled:
            raise keys.fault("attention_layers", "what attention_types says", layers)
        layers = spelled
    kinds: list[str] = layers
    if len(kinds) != n_layers or not all(kind in ("global", "local") for kind in kinds):
        raise keys.fault("attention_types", f"'global' or 'local' for {n_layers} layers", kinds)
    return kinds


def _express(config: DecoderConfig) -> dict[str, Any]:
    layers = ["local" if i in config.sliding_layers else "global" for i in range(config.n_layers)]
    return {
        "intermediate_size": config.d_ff,
        "embed_dropout": config.dropout,
        "resid_dropout": config.dropout,
        "attention_dropout": 0.0,
        "attention_types": [[layers, 1]],
        "window_size": config.sliding_window or _DEFAULT_WINDOW,
    }


GPT_NEO = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    prefix="transformer.",
    constants={
        "norm": "layer_norm",
        "norm_placement": "pre",
        "final_norm": True,
        "gated": False,
        "position": "learned",
        "rope_theta": None,
        "attention_bias": False,
        "attention_output_bias": True,
        "mlp_bias": True,
        "attention_scale": 1.0,
    },
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "max_seq_len"),
        Field("hidden_size", "d_model"),
        Field("num_layers", "n_layers"),
        Field("num_heads", "n_heads"),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("activation_function", "activation", "gelu_new"),
        Field("tie_word_embeddings", "tie_embeddings", True),
    ),
    fixed={},
    harmless=GPT2_HARMLESS | {"classifier_dropout"},
    derive=_derive,
    express=_express,
    rules=(
        Rule("transformer.wte", ("model.embed_tokens",)),
        Rule("transformer.wpe", ("model.embed_positions",)),
        Rule(f"{BLOCK}.ln_1", (f"{LAYER}.input_layernorm",)),
        Rule(f"{BLOCK}.attn.attention.q_proj", (Q,)),
        Rule(f"{BLOCK}.attn.attention.k_proj", (K,)),
        Rule(f"{BLOCK}.attn.attention.v_proj", (V,)),
        Rule(f"{BLOCK}.attn.attention.out_proj", (f"{LAYER}.self_attn.o_proj",)),
        Rule(f"{BLOCK}.ln_2", (f"{LAYER}.post_attention_layernorm",)),
        Rule(f"{BLOCK}.mlp.c_fc", (f"{LAYER}.mlp.up_proj",)),
        Rule(f"{BLOCK}.mlp.c_proj", (f"{LAYER}.mlp.down_proj",)),
        Rule("transformer.ln_f", ("model.norm",)),
        Rule("lm_head", ("lm_head",)),
    ),
    ignored=(f"{BLOCK}.attn.attention.bias", f"{BLOCK}.attn.attention.masked_bias"),
)
