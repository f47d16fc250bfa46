"""StarCoder2: Llama with LayerNorm, no gate, one key for all biases, and a window in every layer or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samelogits.checkpoints.families import Rule
from samelogits.checkpoints.families.foreign_config import Field, ForeignConfig, one_rate
from samelogits.checkpoints.families.llama import RULES, llama_like, read_llama, write_llama
from samelogits.config import DecoderConfig

_MLP = "model.layers.{i}.mlp"


def _derive(keys: ForeignConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.take("sliding_window", int)
    if (eps := keys.take("layer_norm_epsilon", float, known["norm_eps"])) != known["norm_eps"]:
        raise keys.fault("layer_norm_epsilon", f"norm_epsilon {known['norm_eps']}", eps)
    return {
        **read_llama(keys, known, kv_heads=2),
        "sliding_window": window,
        "sliding_layers": () if window is None else tuple(range(known["n_layers"])),
        "dropout": one_rate(known["dropout"], keys.take("embedding_dropout", float, 0.0)),
    }


def _express(config: DecoderConfig) -> dict[str, Any]:
    return write_llama(config) | {"sliding_window": config.sliding_window, "embedding_dropout": config.dropout}


STARCODER2 = llama_like(
    "starcoder2",
    "Starcoder2ForCausalLM",
    tied=True,
    activation=Field("hidden_act", "activation", "gelu_pytorch_tanh"),
    constants={"norm": "layer_norm", "gated": False},
    fields=(
        Field("use_bias", "attention_bias", True),
        Field("use_bias", "mlp_bias", True),
        Field("norm_epsilon", "norm_eps", 1e-5),
        Field("residual_dropout", "dropout", 0.0),
    ),
    fixed={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
    # What the files were made from says too: the first of them is not the function, hidden_act is.
    harmless=["activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"],
    derive=_derive,
    express=_express,
    rules=(
        Rule(f"{_MLP}.c_fc", (f"{_MLP}.up_proj",)),
        Rule(f"{_MLP}.c_proj", (f"{_MLP}.down_proj",)),
        *RULES,
    ),
)
