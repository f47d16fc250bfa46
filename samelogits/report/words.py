"""Numbers, names and places in words, and text from outside made harmless."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from samelogits.checking.places import ranges

NAME_LENGTH = 200
OPERATIONS = {
    "embed_tokens": "the tokens' rows of the embedding",
    "embed_positions": "the positions' rows",
    "embedded": "what the first layer reads",
    "input_layernorm": "the norm's result before attention",
    "post_attention_layernorm": "the norm's result after attention",
    "post_feedforward_layernorm": "the norm's result after the feed-forward layer",
    "self_attn.q": "the queries",
    "self_attn.k": "the keys",
    "self_attn.v": "the values",
    "pre_feedforward_layernorm": "the norm's result before the feed-forward layer",
    "self_attn.q_normed": "the queries after their norm",
    "self_attn.k_normed": "the keys after their norm",
    "self_attn.q_rotated": "the queries after rotary positions",
    "self_attn.k_rotated": "the keys after rotary positions",
    "self_attn.scores": "the scores, scaled and capped, before the mask",
    "self_attn.weights": "the attention weights, after mask and softmax",
    "self_attn.mixed": "the values mixed by the weights, heads joined",
    "self_attn.output": "the result of attention's output product",
    "residual_mid": "the residual sum after attention",
    "mlp.gate": "the result of the feed-forward layer's gate product",
    "mlp.up": "the result of the feed-forward layer's up product",
    "mlp.activated": "the activation function's result, times up where there is a gate",
    "mlp.output": "the result of the feed-forward layer's down product",
    "residual_out": "the residual sum after the feed-forward layer",
    "norm": "the final norm's result",
    "logits": "the output head's result",
}
_BY_HEAD = ("q", "k", "v", "q_normed", "k_normed", "q_rotated", "k_rotated")


def one_line(text: object, length: int = NAME_LENGTH) -> str:
    """Text from outside on one line: what can't be printed as an escape (controls, line ends, changes of direction),
    the middle of what is too long left out."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    if len(safe) <= length:
        return safe
    half = (length - 5) // 2
    return f"{safe[:half]} ... {safe[-half:]}"


def block(text: str, lines: int = 200, width: int = 240) -> str:
    """Source text from outside: its line ends stay, and what can't be printed becomes an escape."""
    found = text.expandtabs(4).splitlines()
    more = [f"... {len(found) - lines} more lines"] if len(found) > lines else []
    return "\n".join([one_line(line, width) for line in found[:lines]] + more)


def number(value: float, digits: int = 3) -> str:
    """A short number: 0.04, 2.5, 310, 2.3e6, infinite, not a number."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-4:
        mantissa, _, exponent = f"{value:.{max(1, digits - 2)}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def limits(share: float | None) -> str:
    """A share of the limit, in words."""
    if share is None:
        return "not known"
    if math.isinf(share):
        return "infinite"
    return f"{number(share)} of the limit" if share <= 1 else f"{number(share)} times the limit"


def value(found: float) -> str:
    """An element of an array."""
    return f"{found:.9g}" if math.isfinite(found) else str(found)


def split_tap(name: str) -> tuple[int | None, str]:
    """A tap's layer, None outside of layers, and its operation."""
    first, _, rest = name.partition(".")
    index, _, operation = rest.partition(".")
    if first == "layers" and index.isascii() and index.isdigit() and len(index) < 6 and operation:
        return int(index), operation
    return None, name


def tap_words(name: str) -> str:
    """ "layer 3, mlp.activated"."""
    layer, operation = split_tap(name)
    return one_line(operation if layer is None else f"layer {layer}, {operation}")


def element_words(name: str, place: Sequence[int], shape: Sequence[int]) -> str:
    """ "token 17, element 40": the index of an element in words; the row only where there is more than one."""
    if not place:
        return ""
    kind = name.rpartition(".")[2]
    axes: tuple[str, ...] = ("row", "token", "element")
    if kind in _BY_HEAD:
        axes = ("row", "token", "head", "element")
    elif kind in ("scores", "weights"):
        axes = ("row", "head", "query token", "key token")
    elif kind == "logits":
        axes = ("row", "token", "vocabulary id")
    if len(place) > len(axes) or len(place) != len(shape or place):
        return "index " + ", ".join(map(str, place))
    parts = [f"{axis} {index}" for axis, index in zip(axes, place, strict=False)]
    return ", ".join(parts[1:] if shape and shape[0] == 1 and len(parts) > 1 else parts)


def grouped(names: Iterable[str]) -> list[str]:
    """Tap names in short: "layers 0 to 29: self_attn.scores, self_attn.weights"."""
    layers: dict[str, set[int]] = {}
    for name in names:
        layer, operation = split_tap(name)
        layers.setdefault(one_line(operation), set()).update(() if layer is None else (layer,))
    alike: dict[str, list[str]] = {}
    for operation, found in layers.items():
        alike.setdefault(ranges(found), []).append(operation)
    heads = {where: f"layer{'' if where.isdigit() else 's'} {where}: " if where else "" for where in alike}
    return [heads[where] + ", ".join(operations) for where, operations in alike.items()]


def source_place(place: str, root: Path | None = None) -> tuple[str, int] | None:
    """ "file:line" as a path, relative to root (the working directory by default) where it lies there, and a line."""
    path, _, line = place.rpartition(":")
    if not path or not (line.isascii() and line.isdigit()) or len(line) > 9 or "\0" in path:
        return None
    base = Path.cwd() if root is None else root
    try:
        path = Path(path).relative_to(base).as_posix() if Path(path).is_absolute() else Path(path).as_posix()
    except ValueError:
        path = Path(path).as_posix()
    return path, max(1, int(line))


def counted(count: int, noun: str) -> str:
    """ "1 tap", "2 taps"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
