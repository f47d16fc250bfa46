"""The architectures of GGUF files: what llama.cpp computes under each name, and how its converter stores it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from samelogits.checkpoints.families import Rule
from samelogits.checkpoints.gguf_keys import Keys, read_windows
from samelogits.config import LAYER_LIMIT, DecoderConfig, QKNorm

_LAYER = "model.layers.{i}"
_Q, _K, _V = (f"{_LAYER}.self_attn.{part}_proj" for part in "qkv")
_GATE, _UP = (f"{_LAYER}.mlp.{part}_proj" for part in ("gate", "up"))


@dataclass(frozen=True)
class Architecture:
    """name: general.architecture. constants: DecoderConfig fields that every such file shares.

    pairs: where the rows of q and k have rotary pairs: half a head "apart"; "beside" each other, as the model itself
    has them; or "permuted" to be so by the converter, in every layer. qk_norm: what kind it is where the file has one.
    derive: the other fields, out of the keys and those that all architectures read alike. rules: modules that are
    stored under other names than elsewhere.
    """

    name: str
    constants: Mapping[str, Any]
    pairs: Literal["apart", "beside", "permuted"] = "apart"
    qk_norm: QKNorm = "none"
    derive: Callable[[Keys, Mapping[str, Any]], dict[str, Any]] = lambda keys, known: {}
    rules: tuple[Rule, ...] = ()


def tensor_rules(architecture: Architecture, fused: bool, merged: bool) -> tuple[Rule, ...]:
    """Every module by its name in the file. fused: whether q, k and v are one tensor, which any file may do. merged:
    whether a layer's experts are, as in all but the oldest files; each is then named by its place `[{e}]` in it."""
    qkv = [Rule("blk.{i}.attn_qkv", (_Q, _K, _V))]
    apart = [Rule(f"blk.{{i}}.attn_{part}", (module,)) for part, module in zip("qkv", (_Q, _K, _V), strict=True)]
    expert = "_exps[{e}]" if merged else ".{e}"
    experts = [
        Rule(f"blk.{{i}}.ffn_{part}{expert}", (f"{_LAYER}.mlp.experts.{{e}}.{part}_proj",))
        for part in ("gate", "up", "down")
    ]
    return (*architecture.rules, *(qkv if fused else apart), *_RULES, *experts)


def _pre(config: DecoderConfig) -> bool:
    return config.norm_placement == "pre"


def _two_norms(config: DecoderConfig) -> bool:
    return not config.shared_norm


_RULES = (
    Rule("token_embd", ("model.embed_tokens",)),
    Rule("position_embd", ("model.embed_positions",)),
    Rule("token_embd_norm", ("model.embed_norm",)),
    Rule("blk.{i}.attn_norm", (f"{_LAYER}.input_layernorm",)),
    Rule("blk.{i}.attn_q_norm", (f"{_LAYER}.self_attn.q_norm",)),
    Rule("blk.{i}.attn_k_norm", (f"{_LAYER}.self_attn.k_norm",)),
    Rule("blk.{i}.attn_output", (f"{_LAYER}.self_attn.o_proj",)),
    Rule("blk.{i}.ffn_norm", (f"{_LAYER}.post_attention_layernorm",), when=_pre),
    Rule("blk.{i}.post_attention_norm", (f"{_LAYER}.post_attention_layernorm",)),
    Rule("blk.{i}.ffn_norm", (f"{_LAYER}.pre_feedforward_layernorm",)),
    Rule("blk.{i}.post_ffw_norm", (f"{_LAYER}.post_feedforward_layernorm",)),
    Rule("blk.{i}.ffn_gate_inp", (f"{_LAYER}.mlp.router",)),
    Rule("blk.{i}.ffn_gate", (_GATE,)),
    Rule("blk.{i}.ffn_up", (_UP,)),
    Rule("blk.{i}.ffn_down", (f"{_LAYER}.mlp.down_proj",)),
    Rule("output_norm", ("model.norm",)),
    Rule("output", ("lm_head",)),
)


def _experts(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    """Experts in every layer, as wide as another model's feed-forward layer. Whether their weights are made to add up
    to 1 is what the architecture says: no file does."""
    return {
        "n_experts": keys.take("expert_count", int),
        "n_active_experts": keys.take("expert_used_count", int),
        "expert_width": known["d_ff"],
    }


def _llama(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    """Llama, or Mixtral."""
    if not keys.take("expert_count", int, 0):
        return {}
    return _experts(keys, known) | {"normalize_experts": True}


def _qwen3moe(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    values = _experts(keys, known)
    width = keys.take("expert_feed_forward_length", int, 0) or known["d_ff"] // max(values["n_active_experts"], 1)
    return values | {"expert_width": width}


def _phi3(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    return read_windows(keys, known["n_layers"], 0)


def _gemma(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"embedding_scale": math.sqrt(max(known["d_model"], 0))}


def _gemma2(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(keys, known),
        **read_windows(keys, known["n_layers"], 2, 4096),
        "attention_scale": _wide_scale(known, 46),
        "attention_softcap": keys.take("attn_logit_softcapping", float, 50.0),
        "logit_softcap": keys.take("final_logit_softcapping", float, 30.0),
    }


def _gemma3(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(keys, known),
        **_local_windows(keys, known, 6, 10000.0),
        "attention_scale": _wide_scale(known, 62),
        "logit_softcap": keys.take_or_none("final_logit_softcapping", float),
    }


def _wide_scale(known: Mapping[str, Any], n_layers: int) -> float | None:
    """The factor of the scores: llama.cpp knows by their number of layers the Gemmas that go by another width than that
    of their heads."""
    d_model, n_heads = known["d_model"], known["n_heads"]
    if known["n_layers"] != n_layers or not 0 < n_heads <= d_model or d_model // n_heads == known["d_head"]:
        return None
    return float((d_model // n_heads) ** -0.5)


def _local_windows(keys: Keys, known: Mapping[str, Any], period: int, theta: float) -> dict[str, Any]:
    """Windows, and the rotary base of their layers, whose positions are not stretched."""
    windows = read_windows(keys, known["n_layers"], period)
    theta = keys.take("rope.freq_base_swa", float, theta)
    same = (theta, None) == (known["rope_theta"], known["rope_scaling"])
    return windows | {"local_rope_theta": None if same or not windows["sliding_layers"] else theta}


def _olmo(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"clip_qkv": keys.take_or_none("attention.clamp_kqv", float)}


def _olmo2(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    return _local_windows(keys, known, 4, known["rope_theta"])


def _granite(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    embedding, residual, scale, divisor = (
        keys.take_or_none(key, float) for key in ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
    )
    return {
        "embedding_scale": None if embedding == 1 else embedding,
        "residual_scale": None if residual == 1 else residual,
        "attention_scale": None if scale == 1 / math.sqrt(max(known["d_head"], 1)) else scale,
        "logit_scale": 1 / divisor if divisor and divisor != 1 else None,
    }


def _cohere(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": keys.take_or_none("logit_scale", float)}


def _cohere2(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    windows = read_windows(keys, known["n_layers"], 4)
    bare = tuple(i for i in range(min(known["n_layers"], LAYER_LIMIT)) if i not in windows["sliding_layers"])
    return _cohere(keys, known) | windows | {"no_rope_layers": bare}


def _smollm3(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"no_rope_layers": tuple(range(3, min(known["n_layers"], LAYER_LIMIT), 4))}


def _falcon(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"shared_norm": not keys.has("blk.0.attn_norm_2.weight")}


def _stablelm(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    keys.take_or_none("use_parallel_residual", bool)  # often wrong: llama.cpp goes by the norm
    parallel = not keys.has("blk.0.ffn_norm.weight")
    return {"parallel_residual": parallel, "shared_norm": parallel}


def _gptneox(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"parallel_residual": keys.take("use_parallel_residual", bool)}


def _mpt(keys: Keys, known: Mapping[str, Any]) -> dict[str, Any]:
    return _olmo(keys, known) | {"alibi_max": keys.take("attention.max_alibi_bias", float)}


_ROPE = {"position": "rope"}
_SEQUENTIAL = {"norm_placement": "pre", "final_norm": True, "dropout": 0.0}
_LLAMA = {**_SEQUENTIAL, **_ROPE, "norm": "rms_norm", "activation": "silu", "gated": True}
# Where llama.cpp knows one GELU only, it is the tanh approximation: so is what it computes for GPT-NeoX and Falcon.
_GPT = {**_SEQUENTIAL, "norm": "layer_norm", "activation": "gelu_tanh", "gated": False}
_SQUARED = {"activation": "relu_squared", "gated": False}
_SHARED = {"parallel_residual": True, "shared_norm": True}
_GEMMA = {**_LLAMA, "norm_weight": "plus_one", "norm_wide": True, "activation": "gelu_tanh"}
_SANDWICH = {**_GEMMA, "norm_placement": "sandwich"}
_OUTPUT = {"norm_placement": "output", "norm_wide": True}
_COHERE = {**_LLAMA, **_SHARED, "norm": "layer_norm"}

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("llama", _LLAMA, "permuted", derive=_llama),
        Architecture("granite", _LLAMA, "permuted", derive=_granite),
        Architecture("smollm3", _LLAMA, "permuted", derive=_smollm3),
        Architecture("arcee", {**_LLAMA, **_SQUARED}, "permuted"),
        Architecture("qwen2", _LLAMA),
        Architecture("qwen3", _LLAMA, qk_norm="head"),
        Architecture("qwen3moe", {**_LLAMA, "normalize_experts": True}, qk_norm="head", derive=_qwen3moe),
        Architecture("phi3", _LLAMA, derive=_phi3, rules=(Rule("blk.{i}.ffn_up", (_GATE, _UP)),)),
        Architecture("gemma", _GEMMA, derive=_gemma),
        Architecture("gemma2", _SANDWICH, derive=_gemma2),
        Architecture("gemma3", _SANDWICH, qk_norm="head", derive=_gemma3),
        Architecture("olmo", {**_LLAMA, "norm": "layer_norm", "norm_weight": "none"}, "permuted", derive=_olmo),
        Architecture("olmo2", {**_LLAMA, **_OUTPUT}, qk_norm="projection", derive=_olmo2),
        Architecture("olmoe", _LLAMA, qk_norm="projection", derive=_experts),
        Architecture("command-r", _COHERE, "beside", qk_norm="heads", derive=_cohere),
        Architecture("cohere2", _COHERE, "beside", derive=_cohere2),
        Architecture("stablelm", {**_LLAMA, "norm": "layer_norm"}, qk_norm="heads", derive=_stablelm),
        Architecture("nemotron", {**_GPT, **_ROPE, **_SQUARED, "norm_weight": "plus_one"}),
        Architecture("starcoder2", {**_GPT, **_ROPE}),
        Architecture("phi2", {**_GPT, **_ROPE, **_SHARED}),
        Architecture("gptneox", {**_GPT, **_ROPE}, derive=_gptneox),
        Architecture(
            "falcon",
            {**_GPT, **_ROPE, "parallel_residual": True},
            derive=_falcon,
            rules=(
                Rule("blk.{i}.attn_norm_2", (f"{_LAYER}.input_layernorm",), when=_two_norms),
                Rule("blk.{i}.attn_norm", (f"{_LAYER}.post_attention_layernorm",), when=_two_norms),
            ),
        ),
        Architecture("gpt2", {**_GPT, "position": "learned"}),
        Architecture("starcoder", {**_GPT, "position": "learned"}),
        Architecture("bloom", {**_GPT, "position": "alibi", "alibi_max": 8.0, "embedding_norm": True}),
        Architecture("mpt", {**_GPT, "position": "alibi"}, derive=_mpt),
    )
}
