"""Parameters of the further families as a wrong conversion leaves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from benchmarks.detection.planted import Planted
from benchmarks.detection.transformers_weights import planted_parameters
from samelogits.config import DecoderConfig
from samelogits.parameters import norm_names

Array = np.ndarray
CODES = frozenset([
    "SL224", "SL225", "SL234", "SL235", "SL325", "SL339", "SL465", "SL466", "SL467", "SL468", "SL523", "SL524",
    "SL525", "SL614", "SL631",
])  # fmt: skip
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def family_parameters(config: DecoderConfig, parameters: Mapping[str, Array], planted: Planted) -> dict[str, Array]:
    """Canonical parameters that the model is written from."""
    found = planted_parameters(config, parameters, planted)
    stack, head = planted.at("stack"), planted.at("head")
    _norms(found, [name for name in found if name.startswith(("model.norm.", "model.embed_norm."))], stack)
    for i in range(config.n_layers):
        _layer(config, found, f"model.layers.{i}.", planted.at(i))
    if "SL339" in stack:
        table = "model.embed_positions.weight"
        found[table] = np.roll(found[table], config.position_offset, axis=0)
    if "SL614" in stack:
        found["model.embed_out.weight"] = found["model.embed_in.weight"].T
    if "SL631" in head:
        found["lm_head.bias"] = np.zeros_like(found["lm_head.bias"])
    return found


def _norms(found: dict[str, Array], names: list[str], wrong: frozenset[str]) -> None:
    """Norms that multiply by 1 + weight, with the weight as the factor, or a factor of bfloat16."""
    for name in names:
        if name.endswith(".weight"):
            if "SL224" in wrong:
                found[name] = found[name].astype(np.float64) - 1
            if "SL225" in wrong:
                found[name] = (1 + torch.from_numpy(found[name])).bfloat16().double().numpy() - 1


def _layer(config: DecoderConfig, found: dict[str, Array], start: str, wrong: frozenset[str]) -> None:
    _norms(found, [name for name in found if name.startswith(start) and "norm" in name], wrong)
    norms = norm_names(config)

    def swap(first: str, second: str) -> None:
        for part in ("weight", "bias"):
            a, b = f"{start}{first}.{part}", f"{start}{second}.{part}"
            if a in found:
                found[a], found[b] = found[b], found[a]

    if "SL234" in wrong:
        swap(norms[1], norms[2])
    if "SL235" in wrong:
        swap(norms[0], norms[1])
        swap(norms[2], norms[3])
    if "SL467" in wrong:
        swap("self_attn.q_norm", "self_attn.k_norm")
    for side in "qk":
        weight, bias = (f"{start}self_attn.{side}_norm.{part}" for part in ("weight", "bias"))
        if "SL465" in wrong:
            found[weight] = np.full_like(found[weight], config.norm_weight == "plain")
        if "SL466" in wrong:
            found[bias] = np.zeros_like(found[bias])
        if "SL468" in wrong:
            found[weight] = np.repeat(found[weight][:1], len(found[weight]), axis=0)
        if "SL325" in wrong:
            _to_the_front(
                config, found, f"{start}self_attn.{side}_", config.n_heads if side == "q" else config.n_kv_heads
            )
    for code, orders in ORDERS.items():
        if code in wrong:
            _fused(config, found, f"{start}self_attn.", *(order(config) for order in orders))


def _to_the_front(config: DecoderConfig, found: dict[str, Array], start: str, heads: int) -> None:
    """The last elements of each head, that are turned, come first. What is seen of heads is put back afterwards."""
    for name in [name for name in found if name.startswith(start)]:
        rows = found[name]
        by_head = rows.reshape(1 if rows.shape == (config.d_head,) else heads, config.d_head, -1)
        found[name] = np.roll(by_head, config.rotated, axis=1).reshape(rows.shape)


def _flat(config: DecoderConfig) -> list[str]:
    """Which head stands where in a fused projection: queries, keys, values."""
    counts = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
    return [f"{side}{i}" for side, count in zip("qkv", counts, strict=True) for i in range(count)]


def _by_group(config: DecoderConfig) -> list[str]:
    """Key head by key head: its queries, itself, its values."""
    shared = config.n_heads // config.n_kv_heads
    return [
        head
        for k in range(config.n_kv_heads)
        for head in (*(f"q{n}" for n in range(k * shared, (k + 1) * shared)), f"k{k}", f"v{k}")
    ]


def _by_quarter(config: DecoderConfig) -> list[str]:
    """CodeGen's: four times a quarter of queries, values, keys."""
    size = config.n_heads // 4
    return [f"{side}{i}" for four in range(4) for side in "qvk" for i in range(four * size, (four + 1) * size)]


Order = Callable[[DecoderConfig], list[str]]
# How it is stored, and how it is read.
ORDERS: dict[str, tuple[Order, Order]] = {
    "SL523": (_flat, _by_group),
    "SL524": (_by_group, _flat),
    "SL525": (_by_quarter, _flat),
}


def _fused(config: DecoderConfig, found: dict[str, Array], start: str, stored: list[str], read: list[str]) -> None:
    for part in ("weight", "bias"):
        names = [f"{start}{name}.{part}" for name in PROJECTIONS]
        if names[0] not in found:
            continue
        heads = {
            f"{name.removeprefix(start)[0]}{i}": piece
            for name in names
            for i, piece in enumerate(np.split(found[name], len(found[name]) // config.d_head))
        }
        taken = dict(zip(read, (heads[head] for head in stored), strict=True))
        for name in names:
            count = len(found[name]) // config.d_head
            side = name.removeprefix(start)[0]
            found[name] = np.concatenate([taken[f"{side}{i}"] for i in range(count)])
