"""From canonical parameters to a JAX decoder's tree, kernels as (in, out), with what goes wrong on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.detection.planted import Planted
from samelogits.config import DecoderConfig
from samelogits.parameters import norm_names

Tree = dict[str, Any]
QKV = ("q_proj", "k_proj", "v_proj")
DROPPED = {  # biases that stay in the file
    "SL531": QKV,
    "SL532": ("q_proj",),
    "SL533": ("k_proj",),
    "SL534": ("v_proj",),
    "SL535": ("o_proj",),
    "SL536": ("gate_proj", "up_proj", "down_proj"),
    "SL537": ("down_proj",),
}


def storage(dtype: Any, wrong: frozenset[str]) -> Any:
    """What a part stores and multiplies in."""
    if "SL825" in wrong:
        return jnp.bfloat16
    return jnp.float16 if "SL826" in wrong else dtype


def load(config: DecoderConfig, parameters: Mapping[str, np.ndarray], planted: Planted, dtype: Any) -> Tree:
    """The tree: "embed", "positions", "embed_in" and "embed_out" (if the embedding is narrow), "head" (if not tied),
    "head_bias", "embed_norm", "norm", "layers"."""
    stack, head = planted.at("stack"), planted.at("head")

    def put(value: np.ndarray, wrong: frozenset[str]) -> Any:
        return jnp.asarray(value, storage(dtype, wrong))

    def matrix(name: str, wrong: frozenset[str]) -> Any:
        return put(_matrix(parameters[f"{name}.weight"], wrong), wrong)

    tree: Tree = {"embed": matrix("model.embed_tokens", stack)}
    if config.position == "learned":
        tree["positions"] = matrix("model.embed_positions", stack)
    if config.embedding_width not in (None, config.d_model):
        tree["embed_in"] = {"kernel": matrix("model.embed_in", stack).T}
        tree["embed_out"] = {"kernel": matrix("model.embed_out", stack).T}
        if "SL614" in stack:
            tree["embed_out"] = {"kernel": tree["embed_in"]["kernel"].T}
    for name, there in (("embed_norm", config.embedding_norm), ("norm", config.final_norm)):
        if there:
            tree[name] = {part: put(value, stack) for part, value in _norm(parameters, f"model.{name}").items()}
    if config.head_bias and "SL631" not in head:
        tree["head_bias"] = put(parameters["lm_head.bias"], head)
    if not config.tie_embeddings:
        tree["head"] = matrix("lm_head", head).T
        if "SL611" in stack:
            del tree["head"]
        if "SL612" in stack:
            tree["embed"] = tree.pop("head").T
        if "SL613" in stack:
            tree["embed"], tree["head"] = tree["head"].T, tree["embed"].T
    indices = list(range(config.n_layers))
    order = [_source(i, config.n_layers, stack) for i in indices]
    if "SL702" in stack:
        order = sorted(indices, key=lambda i: f"layers.{i}.")
    tree["layers"] = []
    for i in order:
        prefix = f"model.layers.{i}."
        own = {name.removeprefix(prefix): v for name, v in parameters.items() if name.startswith(prefix)}
        wrong = planted.at(i)
        tree["layers"].append(jax.tree.map(lambda value, w=wrong: put(value, w), _layer(config, own, wrong)))
    return tree


def _source(i: int, n: int, wrong: frozenset[str]) -> int:
    if "SL701" in wrong:
        return n - 1 - i
    if "SL703" in wrong:
        return 0
    if "SL704" in wrong:
        return n - 1
    if "SL705" in wrong and i < 2:
        return 1 - i
    return min(i + 1, n - 1) if "SL706" in wrong else i


def _norm(parameters: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    parts = {"scale": f"{name}.weight", "bias": f"{name}.bias"}
    return {part: parameters[full] for part, full in parts.items() if full in parameters}


def _matrix(weight: np.ndarray, wrong: frozenset[str]) -> np.ndarray:
    """A matrix (out, in), as a file in fewer digits holds it."""
    if "SL811" in wrong:
        weight = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    if "SL812" in wrong:
        weight = weight.astype(np.float16).astype(np.float32)
    if "SL813" in wrong:
        wide = weight.astype(np.float64)
        scale = np.max(np.abs(wide), axis=-1, keepdims=True) / 127.0
        scale[scale == 0] = 1
        weight = np.round(wide / scale).astype(np.int8) * scale
    return weight


def _layer(config: DecoderConfig, own: dict[str, np.ndarray], wrong: frozenset[str]) -> Tree:
    """One layer's tree: "norms" by name, "q_norm", "k_norm", "q_proj", ..., and "gate_proj", "up_proj", "down_proj", or
    "router" and "experts"."""
    layer: Tree = {"norms": _block_norms(config, own, wrong)} | _attention(config, own, wrong)
    if "mlp.router.weight" not in own:
        return layer | _feed_forward(own, "mlp", wrong)
    layer["router"] = {"kernel": _matrix(own["mlp.router.weight"], wrong).T}
    experts = [_feed_forward(own, f"mlp.experts.{e}", wrong) for e in range(config.n_experts or 0)]
    layer["experts"] = experts[-1:] + experts[:-1] if "SL156" in wrong else experts
    return layer


def _block_norms(config: DecoderConfig, own: dict[str, np.ndarray], wrong: frozenset[str]) -> Tree:
    """Norms by name, exchanged where a mapping is wrong."""
    names = norm_names(config)
    order = list(range(len(names)))
    for code, wrongly in (("SL218", [1, 0]), ("SL234", [0, 2, 1, 3]), ("SL235", [1, 0, 3, 2])):
        if code in wrong:
            order = wrongly
    return {name: _norm(own, names[i]) for name, i in zip(names, order, strict=True)}


def _attention(config: DecoderConfig, own: dict[str, np.ndarray], wrong: frozenset[str]) -> Tree:
    N, K = config.n_heads, config.n_kv_heads
    weights, biases = _projections(own, "self_attn")
    for parts in (weights, biases):
        if parts.keys() >= set(QKV):
            _reorder_heads(config, parts, wrong)
            _exchange(config, parts, wrong)
    biases = _kept(biases, wrong)
    untransposed = {"o_proj": {"SL501"}, "q_proj": {"SL502", "SL503"}, "k_proj": {"SL503"}, "v_proj": {"SL503"}}
    found: Tree = {}
    for name, weight in weights.items():
        rows = _matrix(weight, wrong)
        found[name] = {"kernel": rows if untransposed[name] & wrong else rows.T}
        if name in biases:
            found[name]["bias"] = biases[name]
        if name in QKV:  # (in, heads, width)
            n = N if name == "q_proj" else K
            found[name] = {part: _split_heads(array, n, wrong) for part, array in found[name].items()}
    if config.qk_norm != "none":
        names = ("k_norm", "q_norm") if "SL467" in wrong else ("q_norm", "k_norm")
        for name, source, n in zip(("q_norm", "k_norm"), names, (N, K), strict=True):
            found[name] = _qk_norm(config, _norm(own, f"self_attn.{source}"), n, wrong)
    return found


def _qk_norm(
    config: DecoderConfig, part: dict[str, np.ndarray], n: int, wrong: frozenset[str]
) -> dict[str, np.ndarray]:
    """The norm of queries or keys, which have n heads."""
    if config.qk_norm == "projection":  # its elements lie as those of the projection
        part = {name: _split_heads(array, n, wrong).reshape(-1) for name, array in part.items()}
    if "scale" in part:
        scale = part["scale"]
        if "SL465" in wrong:
            scale = np.zeros_like(scale) if config.norm_weight == "plus_one" else np.ones_like(scale)
        if "SL468" in wrong:
            scale = np.broadcast_to(scale[0], scale.shape)
        part = part | {"scale": scale}
    if "bias" in part and "SL466" in wrong:
        part = part | {"bias": np.zeros_like(part["bias"])}
    return part


def _feed_forward(own: dict[str, np.ndarray], name: str, wrong: frozenset[str]) -> Tree:
    """A feed-forward layer, or one expert."""
    weights, biases = _projections(own, name)
    for parts in (weights, biases):
        if "gate_proj" in parts:
            gate, up = parts["gate_proj"], parts["up_proj"]
            if "SL121" in wrong:
                gate, up = up, gate
            if "SL125" in wrong:
                fused = np.concatenate([gate, up])
                gate, up = fused[0::2], fused[1::2]
            parts["gate_proj"], parts["up_proj"] = gate, up
    biases = _kept(biases, wrong)
    found: Tree = {name: {"kernel": _matrix(weight, wrong).T} for name, weight in weights.items()}
    for name, bias in biases.items():
        found[name]["bias"] = bias
    return found


def _projections(own: dict[str, np.ndarray], start: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Rows (out, in) and biases by projection."""

    def parts(kind: str) -> dict[str, np.ndarray]:
        names = [name for name in own if name.startswith(f"{start}.") and name.endswith(f"_proj.{kind}")]
        return {name.split(".")[-2]: own[name] for name in names}

    return parts("weight"), parts("bias")


def _kept(biases: dict[str, np.ndarray], wrong: frozenset[str]) -> dict[str, np.ndarray]:
    """Those that were not left in the file."""
    missing = {name for code in wrong & DROPPED.keys() for name in DROPPED[code]}
    return {name: bias for name, bias in biases.items() if name not in missing}


def _split_heads(array: np.ndarray, n: int, wrong: frozenset[str]) -> np.ndarray:
    if "SL443" in wrong:
        return array.reshape(*array.shape[:-1], -1, n).swapaxes(-1, -2)
    return array.reshape(*array.shape[:-1], n, -1)


def _reorder_heads(config: DecoderConfig, parts: dict[str, np.ndarray], wrong: frozenset[str]) -> None:
    """Rows of queries and keys in another rotary order."""
    N, K, turned = config.n_heads, config.n_kv_heads, config.rotary_width

    def to_meta(rows: np.ndarray, n: int) -> np.ndarray:
        heads = rows.reshape(n, -1, *rows.shape[1:])
        first, rest = heads[:, :turned], heads[:, turned:] if turned else heads[:, :0]
        pairs = np.stack(np.split(first, 2, axis=1), axis=2).reshape(first.shape)
        return np.concatenate([pairs, rest], axis=1).reshape(rows.shape)

    def from_meta(rows: np.ndarray, n: int) -> np.ndarray:
        heads = rows.reshape(n, -1, *rows.shape[1:])
        first, rest = heads[:, :turned], heads[:, turned:] if turned else heads[:, :0]
        return np.concatenate([first[:, 0::2], first[:, 1::2], rest], axis=1).reshape(rows.shape)

    q, k = parts["q_proj"], parts["k_proj"]
    if "SL511" in wrong:
        q, k = to_meta(q, N), to_meta(k, K)
    if "SL512" in wrong:
        q, k = from_meta(q, N), from_meta(k, K)
    if "SL513" in wrong:
        k = from_meta(to_meta(k, K), N)
    if "SL514" in wrong:
        k = to_meta(k, K)
    parts["q_proj"], parts["k_proj"] = q, k


def _exchange(config: DecoderConfig, parts: dict[str, np.ndarray], wrong: frozenset[str]) -> None:
    """Fused projections that are taken apart wrongly, and names that are exchanged."""
    N, K, H = config.n_heads, config.n_kv_heads, config.d_head
    G = N // K
    q, k, v = (parts[name] for name in QKV)
    rest = q.shape[1:]
    if "SL444" in wrong:
        q, k = k, q
    if "SL445" in wrong:
        k, v = v, k
    if wrong & {"SL521", "SL523"}:
        groups = np.concatenate([q, k, v]).reshape(K, G + 2, H, *rest)
        q, k, v = groups[:, :G].reshape(q.shape), groups[:, G].reshape(k.shape), groups[:, G + 1].reshape(v.shape)
    if wrong & {"SL522", "SL524"}:
        q, k, v = _in_turn((q, k, v), K, rest)
    if "SL525" in wrong:
        q, k, v = _in_turn((q, v, k), 4, rest)
    parts.update(zip(QKV, (q, k, v), strict=True))


def _in_turn(stored: Sequence[np.ndarray], count: int, rest: tuple[int, ...]) -> list[np.ndarray]:
    """What is read as all queries, all keys, all values, where a part of each was stored so many times in turn."""
    fused = np.concatenate([rows.reshape(count, -1, *rest) for rows in stored], axis=1).reshape(-1, *rest)
    return np.split(fused, np.cumsum([len(rows) for rows in stored])[:-1])
