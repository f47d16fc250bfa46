"""Rotary positions and attention windows in a config.json, wherever the files of several years keep them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from samelogits.checkpoints.families.foreign_config import ForeignConfig
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError, ConfigError, shown
from samelogits.rotary import READ, RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"
_ORIGINAL = "original_max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_TYPES = ("rope_type", "type")
_KEYS = {
    "factor": "factor",
    "original_length": _ORIGINAL,
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
_KINDS = {"original_length": int, "truncate": bool, "short_factors": list, "long_factors": list}
# What transformers doesn't read, at the values under which nobody else would either.
_INERT = {"default": {"factor": 1.0}, "yarn": {"attn_factor": 1.0, "extrapolation_factor": 1.0}}
_OLD_TYPES = MappingProxyType({"su": "longrope"})


def read_rope(
    keys: ForeignConfig,
    d_head: int,
    max_seq_len: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    original: int | None = None,
    theta_key: str = "rope_theta",
    partial_key: str = _PARTIAL,
    types: Mapping[str, str] = _OLD_TYPES,
) -> dict[str, Any]:
    """rope_theta, rope_scaling and rotary_width, wherever they stand; what stands twice must agree.

    theta, partial, original: what the absence of their keys means. partial: the rotated part of a head; None where the
    family turns all of it. theta_key, partial_key: their names at the top level. types: old names of scalings.
    """
    outside = keys.take(_ORIGINAL, int, original)
    groups = {name: keys.take(name, dict, {}) for name in ("rope_parameters", "rope_scaling")}
    thetas: dict[str, Any] = {theta_key: keys.take(theta_key, float)}
    partials: dict[str, Any] = {partial_key: keys.take(partial_key, float)}
    scalings: dict[str, Any] = {}
    for name, values in groups.items():
        if values:
            rope = ForeignConfig(values, f"{keys.where}: {name}")
            thetas[f"{name}.rope_theta"] = rope.take("rope_theta", float)
            partials[f"{name}.{_PARTIAL}"] = rope.take(_PARTIAL, float)
            scalings[name] = _read_scaling(rope, max_seq_len, outside, types)
    factor = _one(keys, _given(partials), 1.0 if partial is None else partial)
    if not 0 < factor <= 1 or (partial is None and factor != 1):
        raise keys.fault(partial_key, "1.0, the only value supported" if partial is None else "above 0 to 1", factor)
    width = int(d_head * factor)
    return {
        "rope_theta": _one(keys, _given(thetas), theta),
        "rope_scaling": _one(keys, scalings, None),
        "rotary_width": None if width == d_head else width,
    }


def read_layered_rope(
    keys: ForeignConfig,
    max_seq_len: int,
    sliding: bool,
    *,
    theta: float,
    local_theta: float,
    local_key: str | None = None,
) -> dict[str, Any]:
    """rope_theta, rope_scaling and their local counterparts: rope_parameters has an object for each type of layer.

    sliding: whether there are sliding layers. local_key: the local base at the top level, where older files have it.
    """
    nested = ForeignConfig(keys.take("rope_parameters", dict, {}), f"{keys.where}: rope_parameters")
    groups = {
        f"rope_parameters.{FULL}": nested.take(FULL, dict, {}),
        "rope_scaling": keys.take("rope_scaling", dict, {}),
        f"rope_parameters.{SLIDING}": nested.take(SLIDING, dict, {}),
    }
    nested.finish({}, ())
    thetas: list[dict[str, Any]] = [{"rope_theta": keys.take("rope_theta", float)}, {}]
    if local_key:
        thetas[1][local_key] = keys.take(local_key, float)
    scalings: list[dict[str, Any]] = [{}, {}]
    for name, values in groups.items():
        if values:
            local = name.endswith(SLIDING)
            rope = ForeignConfig(values, f"{keys.where}: {name}")
            thetas[local][f"{name}.rope_theta"] = rope.take("rope_theta", float)
            scalings[local][name] = scaling = _read_scaling(rope, max_seq_len, None, {})
            if scaling is not None and scaling.truncate is False:  # transformers reads it from beside the objects
                raise rope.fault("truncate", "true, as each type of layer has its scaling", False)
    full = _one(keys, _given(thetas[0]), theta), _one(keys, scalings[0], None)
    other = _one(keys, _given(thetas[1]), local_theta), _one(keys, scalings[1], None)
    if not sliding or other == full:
        other = None, None
    names = ("rope_theta", "rope_scaling", "local_rope_theta", "local_rope_scaling")
    return dict(zip(names, full + other, strict=True))


def write_rope(
    config: DecoderConfig, *, partial: bool = False, theta_key: str = "rope_theta", partial_key: str = _PARTIAL
) -> dict[str, Any]:
    """The inverse of read_rope. rope_parameters is for transformers 5, the others for older readers. partial: whether
    the family knows a rotated part of a head."""
    assert config.rope_theta is not None
    scaling = _scaling_keys(config.rope_scaling)
    factor = {_PARTIAL: _factor(config)} if partial or config.rotary_width is not None else {}
    values: dict[str, Any] = {theta_key: config.rope_theta}
    if factor:
        values[partial_key] = factor[_PARTIAL]
    if config.rope_scaling is not None:
        values["rope_scaling"] = scaling
        if config.rope_scaling.kind == "longrope":
            values[_ORIGINAL] = config.rope_scaling.original_length
    return values | {"rope_parameters": {"rope_theta": config.rope_theta, **factor, **scaling}}


def write_layered_rope(config: DecoderConfig, *, local_key: str | None = None) -> dict[str, Any]:
    """The inverse of read_layered_rope."""
    full = config.rope_theta, config.rope_scaling
    local = full if config.local_rope_theta is None else (config.local_rope_theta, config.local_rope_scaling)
    values: dict[str, Any] = {"rope_theta": full[0]} | ({local_key: local[0]} if local_key else {})
    if full[1] is not None:
        values["rope_scaling"] = _scaling_keys(full[1])
    objects = {
        layers: {"rope_theta": theta, **_scaling_keys(scaling)}
        for layers, (theta, scaling) in ((FULL, full), (SLIDING, local))
    }
    return values | {"rope_parameters": objects}


def read_windows(
    keys: ForeignConfig, n_layers: int, window: int | None, otherwise: Iterable[int] | None = None
) -> dict[str, Any]:
    """sliding_window and sliding_layers. otherwise: the sliding layers of a file without layer_types; None where every
    layer has the window, and layer_types can only say so too."""
    found = range(n_layers) if otherwise is None else otherwise
    layers = () if window is None else tuple(found)
    types = keys.take("layer_types", list)
    if types is not None:
        if len(types) != n_layers or not all(kind in (FULL, SLIDING) for kind in types):
            raise keys.fault("layer_types", f"{n_layers} times '{FULL}' or '{SLIDING}'", types)
        said = tuple(i for i, kind in enumerate(types) if kind == SLIDING)
        if otherwise is None and said != layers:
            raise keys.fault("layer_types", f"'{SLIDING if layers else FULL}' in every layer", types)
        layers = said
    if layers and window is None:
        raise keys.fault("sliding_window", f"a number, as layer_types has '{SLIDING}'", None)
    return {"sliding_window": window if layers else None, "sliding_layers": layers}


def layer_types(config: DecoderConfig) -> list[str]:
    """layer_types of a config.json."""
    return [SLIDING if i in config.sliding_layers else FULL for i in range(config.n_layers)]


def write_windows(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of read_windows, where transformers wants a window even if no layer has it."""
    return {"sliding_window": config.sliding_window or 4096, "layer_types": layer_types(config)}


def _given(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if value is not None}


def _one(keys: ForeignConfig, found: dict[str, Any], default: Any) -> Any:
    """The one value that all of these keys have."""
    values = list(found.values())
    if any(value != values[0] for value in values):
        raise keys.fault(", ".join(found), "one value", {key: shown(value) for key, value in found.items()})
    return values[0] if values else default


def _read_scaling(
    rope: ForeignConfig, max_seq_len: int, outside: int | None, types: Mapping[str, str]
) -> RopeScaling | None:
    """The scaling of one object, None for none. outside: the original length that stands at the top level."""
    named = {key: kind for key in _TYPES if (kind := rope.take(key, str)) is not None}
    kinds = [types.get(kind, kind) for kind in named.values()] or ["default"]
    if len(set(kinds)) > 1:
        raise rope.fault(", ".join(named), "one value", named)
    kind = kinds[0]
    if kind not in ("default", *READ):
        raise rope.fault(next(iter(named)), f"one of default, {', '.join(READ)}", kind)
    fields = {} if kind == "default" else _read_fields(rope, kind, max_seq_len, outside)
    rope.finish(_INERT.get(kind, {}), {"finetuned", *([_ORIGINAL] if kind in ("default", "linear") else [])})
    try:
        return RopeScaling.from_dict({"kind": kind, **fields}) if fields else None
    except ConfigError as error:
        name, _, reason = str(error).removeprefix("rope_scaling.").partition(":")
        raise CheckpointError(f"{rope.where}: {_KEYS[name]}:{reason}") from error


def _read_fields(rope: ForeignConfig, kind: str, max_seq_len: int, outside: int | None) -> dict[str, Any]:
    """RopeScaling's fields of this kind, those that the file leaves out as transformers fills them in."""
    fields = {name: rope.take(_KEYS[name], _KINDS.get(name, float)) for name in READ[kind]}
    if "original_length" in fields:
        outside = max_seq_len if kind == "dynamic" else outside
        inside = fields["original_length"]
        if None not in (inside, outside) and inside != outside:
            raise rope.fault(_ORIGINAL, f"{outside}, which stands outside of it", inside)
        default = max_seq_len if outside is None else outside
        fields["original_length"] = original = default if inside is None else inside
        if original < 2:
            raise rope.fault(_ORIGINAL, "at least 2", original)
    if kind == "yarn":
        factor = _fill(fields, "factor", max_seq_len / original)
        mscale, mscale_all = (_not_negative(rope, key) for key in ("mscale", "mscale_all_dim"))
        sizes = (mscale, mscale_all) if mscale and mscale_all else (1.0, 0.0)
        _fill(fields, "attention_factor", _yarn_size(factor, *sizes))
        _fill(fields, "truncate", True)
        fields["beta_fast"] = fields["beta_fast"] or 32.0
        fields["beta_slow"] = fields["beta_slow"] or 1.0
    if kind == "longrope":
        factor = rope.take("factor", float, max_seq_len / original)
        _fill(fields, "attention_factor", longrope_size(factor, original))
    for name, value in fields.items():
        if value is None:
            raise rope.fault(_KEYS[name], f"a value, as the type is {kind!r}", None)
        if type(value) is list:
            fields[name] = [float(number) if type(number) is int else number for number in value]
    return fields


def _not_negative(rope: ForeignConfig, key: str) -> float:
    """The number of a key, which transformers takes for none where it is 0."""
    value: float = rope.take(key, float, 0.0)
    if value < 0:
        raise rope.fault(key, "a positive number", value)
    return value


def _fill(fields: dict[str, Any], name: str, default: Any) -> Any:
    fields[name] = default if fields[name] is None else fields[name]
    return fields[name]


def _yarn_size(factor: float, mscale: float, mscale_all: float) -> float:
    if factor <= 1:
        return 1.0
    return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all * math.log(factor) + 1)


def longrope_size(factor: float, original: int) -> float:
    """LongRoPE's attention_factor where a file has none, for a text that is longer by this factor."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _scaling_keys(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    # transformers takes max_position_embeddings for dynamic's original length, wherever else that may stand.
    names = [name for name in READ[scaling.kind] if (scaling.kind, name) != ("dynamic", "original_length")]
    values = {_KEYS[name]: getattr(scaling, name) for name in names}
    return {"rope_type": scaling.kind} | {
        key: list(value) if type(value) is tuple else value for key, value in values.items()
    }


def _factor(config: DecoderConfig) -> float:
    """The rotated part of a head, such that a reader who rounds down gets the width again."""
    factor = config.rotated / config.d_head
    return factor if int(config.d_head * factor) == config.rotated else math.nextafter(factor, 1)
