"""From canonical parameters to a JAX decoder's tree, kernels as (in, out), with what goes wrong on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.detection.planted import Planted
from samelogits.config import DecoderConfig
from samelogits.parameters import norm_names

Tree = dict[str, Any]
QKV = ("q_proj", "k_proj", "v_proj")


def storage(dtype: Any, wrong: frozenset[str]) -> Any:
    """What a part stores and multiplies in."""
    if "SL825" in wrong:
        return jnp.bfloat16
    return jnp.float16 if "SL826" in wrong else dtype


def load(config: DecoderConfig, parameters: Mapping[str, np.ndarray], planted: Planted, dtype: Any) -> Tree:
    """The tree: "embed", "positions", "head" (if not tied), "norm", "layers"."""
    stack, head = planted.at("stack"), planted.at("head")

    def put(value: np.ndarray, wrong: frozenset[str]) -> Any:
        return jnp.asarray(value, storage(dtype, wrong))

    tree: Tree = {"embed": put(_matrix(parameters["model.embed_tokens.weight"], stack), stack)}
    if config.position == "learned":
        tree["positions"] = put(_matrix(parameters["model.embed_positions.weight"], stack), stack)
    if config.final_norm:
        tree["norm"] = {p: put(v, stack) for p, v in _norm(parameters, "model.norm").items()}
    if not config.tie_embeddings:
        tree["head"] = put(_matrix(parameters["lm_head.weight"], head).T, head)
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
        layer = _layer(config, own, wrong)
        tree["layers"].append({m: {p: put(v, wrong) for p, v in part.items()} for m, part in layer.items()})
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
    found = {"scale": parameters[f"{name}.weight"]}
    if f"{name}.bias" in parameters:
        found["bias"] = parameters[f"{name}.bias"]
    return found


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
    """One layer's tree: "norm1", "norm2", "q_proj", ..., "down_proj"."""
    names = norm_names(config)
    if "SL218" in wrong:
        names = (names[1], names[0])
    layer: Tree = {f"norm{n + 1}": _norm(own, name) for n, name in enumerate(names)}
    # Rows (out, in) and biases by projection.
    weights = {name.split(".")[1]: v for name, v in own.items() if "_proj.weight" in name}
    biases = {name.split(".")[1]: v for name, v in own.items() if "_proj.bias" in name}
    for parts in (weights, biases):
        _reorder_heads(config, parts, wrong)
        _exchange(config, parts, wrong)
    for missing, codes in (
        (QKV, {"SL531"}),
        (("q_proj",), {"SL532"}),
        (("k_proj",), {"SL533"}),
        (("v_proj",), {"SL534"}),
        (("o_proj",), {"SL535"}),
        (("gate_proj", "up_proj", "down_proj"), {"SL536"}),
        (("down_proj",), {"SL537"}),
    ):
        if codes & wrong:
            biases = {name: v for name, v in biases.items() if name not in missing}
    for name, weight in weights.items():
        kept = {"o_proj": {"SL501"}, "q_proj": {"SL502", "SL503"}, "k_proj": {"SL503"}, "v_proj": {"SL503"}}
        rows = _matrix(weight, wrong)
        kernel = rows if kept.get(name, set()) & wrong else rows.T
        bias = biases.get(name)
        if name in QKV:  # (in, heads, width)
            n = config.n_heads if name == "q_proj" else config.n_kv_heads
            kernel = _split_heads(kernel, n, wrong)
            bias = None if bias is None else _split_heads(bias, n, wrong)
        layer[name] = {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}
    return layer


def _split_heads(array: np.ndarray, n: int, wrong: frozenset[str]) -> np.ndarray:
    if "SL443" in wrong:
        return array.reshape(*array.shape[:-1], -1, n).swapaxes(-1, -2)
    return array.reshape(*array.shape[:-1], n, -1)


def _reorder_heads(config: DecoderConfig, parts: dict[str, np.ndarray], wrong: frozenset[str]) -> None:
    """Rows of queries and keys in another rotary order."""
    if not parts.keys() >= set(QKV):
        return
    N, K = config.n_heads, config.n_kv_heads

    def to_meta(rows: np.ndarray, n: int) -> np.ndarray:
        halves = rows.reshape(n, 2, -1, *rows.shape[1:])
        return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)

    def from_meta(rows: np.ndarray, n: int) -> np.ndarray:
        heads = rows.reshape(n, -1, *rows.shape[1:])
        return np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(rows.shape)

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
    if parts.keys() >= set(QKV):
        N, H = config.n_heads, config.d_head
        q, k, v = (parts[name] for name in QKV)
        if "SL444" in wrong:
            q, k = k, q
        if "SL445" in wrong:
            k, v = v, k
        if "SL521" in wrong:
            fused = np.concatenate([q, k, v]).reshape(N, 3, H, -1)
            q, k, v = (fused[:, i].reshape(q.shape) for i in range(3))
        if "SL522" in wrong:
            fused = np.stack([a.reshape(N, H, -1) for a in (q, k, v)], axis=1)
            q, k, v = (a.reshape(q.shape) for a in np.split(fused.reshape(3 * N * H, -1), 3))
        parts.update(zip(QKV, (q, k, v), strict=True))
    if "gate_proj" in parts:
        gate, up = parts["gate_proj"], parts["up_proj"]
        if "SL121" in wrong:
            gate, up = up, gate
        if "SL125" in wrong:
            fused = np.concatenate([gate, up])
            gate, up = fused[0::2], fused[1::2]
        parts["gate_proj"], parts["up_proj"] = gate, up
