"""Llama as Hugging Face stores it, and what the families made after it share: the canonical names, rotary halves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from samelogits.checkpoints.families import Family, Rule
from samelogits.checkpoints.families.foreign_config import HARMLESS, Field, ForeignConfig
from samelogits.checkpoints.families.rope import read_rope, write_rope
from samelogits.config import DecoderConfig

_LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "post_feedforward_layernorm",
)
_MODULES = ("model.embed_tokens", *(f"model.layers.{{i}}.{name}" for name in _LAYER), "model.norm", "lm_head")
RULES = tuple(Rule(module, (module,)) for module in _MODULES)
_BIASES = ("attention_bias", "mlp_bias")
_ACTIVATION = Field("hidden_act", "activation", "silu")


def read_heads(
    keys: ForeignConfig, known: Mapping[str, Any], *, kv_heads: int | None = None, d_head: int | None = None
) -> dict[str, Any]:
    """The sizes of attention. kv_heads, d_head: what the absence of their keys means; None for one per query head, and
    for hidden_size / heads."""
    d_model, n_heads = known["d_model"], known["n_heads"]
    d_head = keys.take("head_dim", int, d_head)
    if d_head is None:
        if n_heads < 1 or d_model % n_heads:
            raise keys.fault("head_dim", f"a number, as hidden_size {d_model} / {n_heads} heads isn't whole", None)
        d_head = d_model // n_heads
    n_kv_heads = keys.take_or_none("num_key_value_heads", int, kv_heads)
    # Dropout on the attention weights acts in training only, and this decoder has none there: any rate is accepted.
    keys.take("attention_dropout", float)
    return {"n_kv_heads": n_heads if n_kv_heads is None else n_kv_heads, "d_head": d_head}


def read_llama(
    keys: ForeignConfig,
    known: Mapping[str, Any],
    *,
    kv_heads: int | None = None,
    d_head: int | None = None,
    theta: float = 10000.0,
) -> dict[str, Any]:
    """The sizes of attention and the rotary positions; theta: what the absence of rope_theta means."""
    heads = read_heads(keys, known, kv_heads=kv_heads, d_head=d_head)
    return heads | read_rope(keys, heads["d_head"], known["max_seq_len"], theta=theta)


def write_heads(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of read_heads."""
    return {"num_key_value_heads": config.n_kv_heads, "head_dim": config.d_head, "attention_dropout": 0.0}


def write_llama(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of read_llama."""
    return write_heads(config) | write_rope(config)


def whole_heads(config: DecoderConfig) -> list[str]:
    """What transformers asks of some families, though head_dim stands apart."""
    if config.d_model % config.n_heads:
        return [f"n_heads must divide d_model {config.d_model}, found {config.n_heads}"]
    return []


def llama_like(
    model_type: str,
    architecture: str,
    *,
    derive: Callable[[ForeignConfig, Mapping[str, Any]], dict[str, Any]] = read_llama,
    express: Callable[[DecoderConfig], dict[str, Any]] = write_llama,
    biases: Iterable[str] = (),
    tied: bool = False,
    activation: Field = _ACTIVATION,
    fields: Iterable[Field] = (),
    constants: Mapping[str, Any] = MappingProxyType({}),
    fixed: Mapping[str, Any] = MappingProxyType({}),
    harmless: Iterable[str] = (),
    limits: Callable[[DecoderConfig], list[str]] = lambda config: [],
    rules: tuple[Rule, ...] = RULES,
    interleaved: bool = False,
) -> Family:
    """A family of pre-norm blocks with RMSNorm and rotary positions.

    biases: which keys of them it knows; the others are false. The one of attention means its output too, unless that is
    a constant. tied: what the absence of tie_word_embeddings means. fields, constants: those beside or instead of
    Llama's.
    """
    known = {
        field.name: field
        for field in (
            Field("vocab_size", "vocab_size"),
            Field("max_position_embeddings", "max_seq_len"),
            Field("hidden_size", "d_model"),
            Field("intermediate_size", "d_ff"),
            Field("num_hidden_layers", "n_layers"),
            Field("num_attention_heads", "n_heads"),
            Field("rms_norm_eps", "norm_eps"),
            activation,
            *(Field(name, name, False) for name in biases),
            Field("tie_word_embeddings", "tie_embeddings", tied),
            *fields,
        )
        if field.name not in constants
    }
    if "attention_bias" in known and "attention_output_bias" not in constants:
        known.setdefault("attention_output_bias", replace(known["attention_bias"], name="attention_output_bias"))
    lacking = {name: False for name in _BIASES if name not in known}
    return Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        constants={
            "norm": "rms_norm",
            "norm_placement": "pre",
            "final_norm": True,
            "gated": True,
            "position": "rope",
            **({} if "dropout" in known else {"dropout": 0.0}),
            **({} if "attention_output_bias" in known else {"attention_output_bias": False}),
            **lacking,
            **constants,
        },
        fields=tuple(known.values()),
        fixed={**lacking, **fixed},
        harmless=HARMLESS.union(harmless, ["pretraining_tp"]),  # in how many parts Llama once took its products
        derive=derive,
        express=express,
        limits=limits,
        rules=rules,
        ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
        interleaved=interleaved,
    )


LLAMA = llama_like(
    "llama",
    "LlamaForCausalLM",
    biases=_BIASES,
    # The first files have max_sequence_length alone, and transformers its default. The last one is Falcon 3's.
    fields=(Field("max_position_embeddings", "max_seq_len", 2048),),
    fixed={"rope_interleaved": False, "is_llama_config": True, "activation": "swiglu"},
    limits=whole_heads,
)
