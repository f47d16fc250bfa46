"""Parameters that a transformers model is loaded from, with what a conversion script gets wrong."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from benchmarks.detection.planted import Planted
from benchmarks.detection.torch_weights import Weights
from samelogits.config import DecoderConfig
from samelogits.parameters import norm_names

CODES = frozenset([
    "SL121", "SL125", "SL207", "SL208", "SL209", "SL218", "SL443", "SL444", "SL445", "SL501",
    "SL502", "SL503", "SL511", "SL512", "SL513", "SL514", "SL521", "SL522", "SL531", "SL532",
    "SL533", "SL534", "SL535", "SL536", "SL537", "SL538", "SL611", "SL612", "SL613", "SL701",
    "SL702", "SL703", "SL704", "SL705", "SL706", "SL811", "SL812", "SL813",
])  # fmt: skip
DROPPED = {
    "SL531": ("q_proj", "k_proj", "v_proj"),
    "SL532": ("q_proj",),
    "SL533": ("k_proj",),
    "SL534": ("v_proj",),
    "SL535": ("o_proj",),
    "SL536": ("gate_proj", "up_proj", "down_proj"),
    "SL537": ("down_proj",),
}


class _Known:
    """The mistakes that are planted here, of all of a candidate."""

    def __init__(self, planted: Planted):
        self._planted = planted

    def at(self, place: int | str) -> frozenset[str]:
        """Codes that act at this place."""
        return self._planted.at(place) & CODES


def planted_parameters(
    config: DecoderConfig, parameters: Mapping[str, np.ndarray], planted: Planted
) -> dict[str, np.ndarray]:
    """Canonical parameters as the script leaves them."""
    weights = Weights(config, parameters, _Known(planted), torch.float64)
    found = {name: tensor.detach().numpy().copy() for name, tensor in weights.tensors.items()}
    stack = planted.at("stack")
    E, H = "model.embed_tokens.weight", "lm_head.weight"
    if "SL611" in stack:
        found[H] = found[E]
    if "SL612" in stack:
        found[E] = found[H]
    if "SL613" in stack:
        found[E], found[H] = found[H], found[E]
    for i in range(config.n_layers):
        _layer(config, found, f"model.layers.{i}.", planted.at(i))
    _norms(config, found, [name for name in found if name.startswith(("model.norm.", "model.embed_norm."))], stack)
    before = dict(found)
    for name in before:
        parts = name.split(".", 3)
        if parts[1] == "layers":
            found[name] = before[f"model.layers.{weights.sources[int(parts[2])]}.{parts[3]}"]
    return found


def _norms(config: DecoderConfig, found: dict[str, np.ndarray], names: list[str], wrong: frozenset[str]) -> None:
    for name in names:
        if name.endswith(".weight"):
            if "SL207" in wrong:
                found[name] = found[name].astype(np.float64) + 1
            if "SL208" in wrong:
                found[name] = np.full_like(found[name], config.norm_weight != "plus_one")
        elif "SL209" in wrong:
            found[name] = np.zeros_like(found[name])


def _layer(config: DecoderConfig, found: dict[str, np.ndarray], start: str, wrong: frozenset[str]) -> None:
    _norms(config, found, [name for name in found if name.startswith(start) and "norm" in name], wrong)

    def swap(first: str, second: str) -> None:
        for part in ("weight", "bias"):
            a, b = f"{start}{first}.{part}", f"{start}{second}.{part}"
            if a in found:
                found[a], found[b] = found[b], found[a]

    if "SL218" in wrong:
        swap(*norm_names(config))
    if "SL121" in wrong:
        swap("mlp.gate_proj", "mlp.up_proj")
    if "SL444" in wrong:
        swap("self_attn.q_proj", "self_attn.k_proj")
    if "SL445" in wrong:
        swap("self_attn.k_proj", "self_attn.v_proj")
    N, K, H = config.n_heads, config.n_kv_heads, config.d_head
    for part in ("weight", "bias"):
        names = [f"{start}self_attn.{letter}_proj.{part}" for letter in "qkv"]
        if names[0] not in found:
            continue
        if "SL443" in wrong:
            for name, n in zip(names, (N, K, K), strict=True):
                rows = found[name]
                found[name] = rows.reshape(H, n, -1).swapaxes(0, 1).reshape(rows.shape)
        if "SL521" in wrong:
            rows = np.concatenate([found[name] for name in names])
            for j, name in enumerate(names):
                found[name] = np.concatenate([rows[(3 * n + j) * H :][:H] for n in range(N)])
    gates = [f"{start}mlp.gate_proj.", f"{start}mlp.up_proj."]
    if "SL125" in wrong:
        for part in ("weight", "bias"):
            if gates[0] + part in found:
                fused = np.concatenate([found[g + part] for g in gates])
                found[gates[0] + part], found[gates[1] + part] = fused[0::2], fused[1::2]
    for name in [name for name in found if name.startswith(start) and name.endswith("_proj.bias")]:
        if "SL538" in wrong:
            found[name] = 2 * found[name]
        if any(code in wrong and name.split(".")[-2] in modules for code, modules in DROPPED.items()):
            found[name] = np.zeros_like(found[name])
