"""The name map of a model of transformers, out of the table by which its family's checkpoints are read."""

from __future__ import annotations

import re

from samelogits.checking.candidates.name_map import NameMap, Part, Rule, Split
from samelogits.checkpoints.families import Family
from samelogits.config import DecoderConfig
from samelogits.parameters import block_norms, parameter_shapes
from samelogits.taps import block_end, tap_names

# Canonical module in a layer to the tap that it gives.
GIVEN = {
    "self_attn.q_proj": "self_attn.q",
    "self_attn.k_proj": "self_attn.k",
    "self_attn.v_proj": "self_attn.v",
    "self_attn.q_norm": "self_attn.q_normed",
    "self_attn.k_norm": "self_attn.k_normed",
    "self_attn.o_proj": "self_attn.output",
    "mlp.router": "mlp.router",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.output",
}
LAYER = "model.layers.{i}."
MOVED = ".block_sparse_moe.", ".mlp."  # a part's name in Mixtral's files, and in transformers 5


def family_map(family: Family, config: DecoderConfig) -> NameMap:
    """Which modules of transformers' model give or are given which taps of this config."""
    shapes, known = parameter_shapes(config), set(tap_names(config))
    if config.embedding_scale is not None:
        known.discard("embed_tokens")  # some modules give rows that are scaled already
    norms = block_norms(config)
    # Canonical module to the tap that it is given.
    read = {f"{LAYER}self_attn.o_proj": "self_attn.mixed", f"{LAYER}mlp.down_proj": "mlp.activated"}
    first_linear = "gate_proj" if config.gated else "up_proj"
    middle = norms.attention_sum or norms.before_feed_forward or f"mlp.{first_linear}"
    if not config.parallel_residual:
        read[f"{LAYER}{middle}"] = "residual_mid"
    if norms.feed_forward_sum:
        read[f"{LAYER}{norms.feed_forward_sum}"] = "residual_out"
    rules: list[Rule] = []

    def add(module: str, taps: list[str], part: Part = "output", split: Split | None = None) -> None:
        """A rule for the taps of the config, `{i}` standing for the layer in both."""
        if any(tap.replace(r"\1", str(i)) in known for tap in taps for i in range(config.n_layers)):
            for name in dict.fromkeys((module, f"{module}.".replace(*MOVED).removesuffix("."))):
                pattern = re.compile(re.escape(name).replace(r"\{i\}", r"(\d+)"))
                rules.append(Rule(f"{family.model_type}: {name}", pattern, tuple(taps), part, None, split))

    for rule in family.rules:
        layers = [i for i in range(config.n_layers) if f"{rule.canonical[0].format(i=i, e=0)}.weight" in shapes]
        without_weight = config.norm_weight == "none" and "norm" in rule.canonical[0]
        if not rule.when(config) or not (layers or without_weight) or "{e}" in rule.foreign:
            continue
        module = rule.foreign.partition(".norms.")[0]
        taps = [_given(name) for name in rule.canonical]
        split = None
        if len(taps) > 1:
            widths = tuple(shapes[f"{name.format(i=layers[0])}.weight"][0] for name in rule.canonical)
            split = Split(-1, None, widths, config.n_kv_heads if rule.groups == "n_kv_heads" else rule.groups)
        add(module, taps, split=split)
        for name in rule.canonical:
            if name in read:
                add(module, [rf"layers.\1.{read[name]}"], "input")
        if rule.canonical == (f"{LAYER}mlp.router",):  # it stands within what weighs the experts
            add(module.rpartition(".")[0], [r"layers.\1.mlp.output"])
    block = next(rule.foreign for rule in family.rules if "{i}" in rule.foreign).partition("{i}")[0]
    add(f"{block}0", ["embedded"], "input")
    add(f"{block}{{i}}", [rf"layers.\1.{block_end(config)}"])
    rules.append(Rule(f"{family.model_type}: all others", re.compile(".*"), ()))  # they give what others give too
    return NameMap(f"of {family.model_type}", tuple(rules))


def _given(name: str) -> str:
    """The tap of a canonical module."""
    if name.startswith(LAYER):
        inner = name.removeprefix(LAYER)
        return rf"layers.\1.{GIVEN.get(inner, inner)}"
    return name.removeprefix("model.")
