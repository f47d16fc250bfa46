"""Every field of the config changes the function, and none takes a value that means nothing."""

import dataclasses
import json
from dataclasses import replace

import ladder
import numpy as np
import pytest
from ladder import FAMILIES, LLAMA, UNKIND

from samelogits.config import DecoderConfig
from samelogits.errors import ConfigError, InputError
from samelogits.parameters import parameter_shapes, random_parameters
from samelogits.presets import PRESETS, preset
from samelogits.rotary import RopeScaling

PARALLEL = replace(UNKIND, parallel_residual=True)
WINDOW = replace(LLAMA, sliding_window=3, sliding_layers=(0,))
LINEAR = RopeScaling(kind="linear", factor=2.0)
# Field to a config and one that differs in this field alone.
OTHERS = {
    "vocab_size": (UNKIND, 17),
    "d_model": (UNKIND, 12),
    "n_layers": (UNKIND, 3),
    "n_heads": (UNKIND, 4),
    "n_kv_heads": (UNKIND, 4),
    "d_head": (UNKIND, 8),
    "d_ff": (UNKIND, 15),
    "max_seq_len": (UNKIND, 6),
    "norm": (UNKIND, "rms_norm"),
    "norm_eps": (UNKIND, 1e-3),
    "norm_placement": (UNKIND, "post"),
    "final_norm": (UNKIND, False),
    "activation": (UNKIND, "gelu_tanh"),
    "gated": (UNKIND, True),
    "position": (replace(UNKIND, position="none"), "sinusoidal"),
    "rope_theta": (LLAMA, 101.0),
    "attention_bias": (UNKIND, False),
    "attention_output_bias": (UNKIND, False),
    "mlp_bias": (UNKIND, False),
    "tie_embeddings": (UNKIND, True),
    "dropout": (UNKIND, 0.5),
    "norm_weight": (UNKIND, "plus_one"),
    "norm_bias": (UNKIND, False),
    "norm_wide": (LLAMA, True),
    "parallel_residual": (UNKIND, True),
    "shared_norm": (PARALLEL, True),
    "residual_scale": (UNKIND, 0.7),
    "qk_norm": (UNKIND, "head"),
    "qk_norm_bias": (replace(UNKIND, qk_norm="head"), True),
    "clip_qkv": (UNKIND, 1.0),
    "attention_scale": (UNKIND, 0.3),
    "scale_by_layer": (UNKIND, True),
    "attention_softcap": (UNKIND, 2.0),
    "sliding_window": (WINDOW, 4),
    "sliding_layers": (WINDOW, (1,)),
    "rotary_width": (LLAMA, 4),
    "rope_scaling": (LLAMA, LINEAR),
    "local_rope_theta": (WINDOW, 30.0),
    "local_rope_scaling": (replace(WINDOW, local_rope_theta=30.0), LINEAR),
    "no_rope_layers": (LLAMA, (1,)),
    "alibi_max": (FAMILIES["bloom"], 4.0),
    "alibi_rounded": (FAMILIES["bloom"], True),
    "position_offset": (UNKIND, 2),
    "embedding_width": (UNKIND, 7),
    "embedding_scale": (UNKIND, 3.0),
    "embedding_norm": (UNKIND, True),
    "head_bias": (UNKIND, True),
    "logit_scale": (UNKIND, 0.3),
    "logit_softcap": (UNKIND, 2.0),
    "n_experts": (FAMILIES["olmo"], 5),
    "n_active_experts": (FAMILIES["olmo"], 3),
    "expert_width": (FAMILIES["olmo"], 6),
    "normalize_experts": (FAMILIES["olmo"], False),
    "dense_layers": (FAMILIES["olmo"], ()),
}
# Those that leave the parameters' number and sizes alone must show in a number: the others can't be loaded unchanged.
IN_NUMBERS = {
    "norm_eps", "norm_placement", "activation", "position", "rope_theta", "dropout", "norm_weight", "norm_wide",
    "parallel_residual", "residual_scale", "clip_qkv", "attention_scale", "scale_by_layer", "attention_softcap",
    "sliding_window", "sliding_layers", "rotary_width", "rope_scaling", "local_rope_theta", "local_rope_scaling",
    "no_rope_layers", "alibi_max", "alibi_rounded", "embedding_scale", "logit_scale", "logit_softcap",
    "n_active_experts", "normalize_experts",
}  # fmt: skip


def test_every_field_is_covered():
    assert set(OTHERS) == {field.name for field in dataclasses.fields(DecoderConfig)}


@pytest.mark.parametrize("field", OTHERS)
def test_field_changes_the_parameters_or_numbers(field):
    config, value = OTHERS[field]
    sizes, changed_sizes = (
        sorted(parameter_shapes(each).values()) for each in (config, replace(config, **{field: value}))
    )
    assert (sizes != changed_sizes) == (field not in IN_NUMBERS)


@pytest.mark.parametrize("field", sorted(IN_NUMBERS))
def test_field_changes_the_numbers(place, field):
    config, value = OTHERS[field]
    changed = replace(config, **{field: value})
    arrays, others = (random_parameters(each, 1) for each in (config, changed))
    if arrays.keys() == others.keys():
        others = arrays  # a weight is drawn to suit what is done with it
    dtype = "float64"
    if field == "norm_wide":  # a matter of rounding alone
        if "bfloat16" not in place.dtypes():
            pytest.skip(f"{place.backend} has no bfloat16")
        dtype = "bfloat16"
    before, after = ladder.load(config, place, dtype, arrays), ladder.load(changed, place, dtype, others)
    ids, wanted = ladder.tokens(config), ladder.targets(config)
    first, second = before.logits(ids), after.logits(ids)
    if field == "dropout":
        assert np.array_equal(first, second), "dropout acts in training only"
        first, second = (model.trainer(ladder.SETTINGS).step(ids, wanted).loss for model in (before, after))
    # A changed field moves the result by far more than the 1e-12 to which the frameworks agree.
    assert np.abs(first - second).max() > 1e-6 * np.abs(first).max()


def test_max_seq_len_ends_the_table(place):
    config, value = OTHERS["max_seq_len"]
    ids = ladder.tokens(config)
    ladder.load(config, place).logits(ids)
    with pytest.raises(InputError, match="max_seq_len 6 positions, found 7"):
        ladder.load(replace(config, max_seq_len=value), place).logits(ids)


@pytest.mark.parametrize("value", ["learned", "rope", "alibi"])
def test_positions_change_the_function(place, value):
    """The other values of position."""
    config = replace(UNKIND, position="none")
    numbers = {"rope": {"rope_theta": 100.0}, "alibi": {"alibi_max": 8.0}}
    changed = replace(config, position=value, **numbers.get(value, {}))
    arrays = ladder.parameters(changed)
    ids = np.zeros((5, 7), int)
    with_positions = ladder.load(changed, place, arrays=arrays).logits(ids)
    bare = {name: array for name, array in arrays.items() if "embed_positions" not in name}
    without = ladder.load(config, place, arrays=bare).logits(ids)
    # One token seven times, without positions: every row of the logits is the same.
    ladder.assert_close(without, without[:, :1].repeat(7, axis=1), ladder.EXACT, "without positions")
    if value == "learned":
        assert np.abs(with_positions - without).max() > 0.1
    else:  # equal values: nothing to tell apart by their weights, so distinct tokens are needed
        ids = ladder.tokens(config)
        first, second = (ladder.load(each, place, arrays=arrays).logits(ids) for each in (changed, config))
        assert np.abs(first - second).max() > 0.1


BAD = [
    *((size, value) for size in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff",
                                 "max_seq_len") for value in (0, -1, 2.0, True, None, 2**40)),
    ("n_layers", 2000), ("n_kv_heads", 3), ("n_kv_heads", 16),
    ("norm", "batch_norm"), ("norm", None), ("norm_eps", 0.0), ("norm_eps", float("nan")), ("norm_eps", "1e-5"),
    ("norm_eps", None), ("norm_placement", "middle"), ("final_norm", 1), ("activation", "gelu_new"), ("gated", None),
    ("position", "absolute"), ("rope_theta", 10000.0), ("attention_bias", 0), ("attention_output_bias", None),
    ("mlp_bias", "yes"), ("tie_embeddings", None), ("dropout", 1.0), ("dropout", -0.1), ("dropout", float("nan")),
    ("dropout", None), ("norm_weight", "one"), ("norm_weight", None), ("norm_bias", 0), ("norm_wide", True),
    ("parallel_residual", 1), ("shared_norm", True), ("residual_scale", 0.0), ("qk_norm", "all"), ("qk_norm", None),
    ("qk_norm_bias", True), ("clip_qkv", -1.0), ("attention_scale", float("inf")), ("scale_by_layer", None),
    ("attention_softcap", True), ("sliding_window", 0), ("sliding_window", 3), ("sliding_window", 3.0),
    ("sliding_layers", [0]), ("sliding_layers", (2,)), ("sliding_layers", (1, 0)), ("sliding_layers", (0, 0)),
    ("sliding_layers", (False,)), ("rotary_width", 4), ("rotary_width", 0), ("rope_scaling", LINEAR),
    ("rope_scaling", {"kind": "linear", "factor": 2.0}), ("local_rope_theta", 30.0), ("local_rope_scaling", LINEAR),
    ("no_rope_layers", (0,)), ("no_rope_layers", (-1,)), ("alibi_max", 8.0), ("alibi_rounded", True),
    ("position_offset", -1), ("position_offset", 2**40), ("position_offset", 1.5), ("embedding_width", 0),
    ("embedding_scale", float("nan")), ("embedding_norm", None), ("head_bias", "no"), ("logit_scale", 0),
    ("logit_softcap", -30.0), ("n_experts", 0), ("n_experts", 4.0), ("n_active_experts", 2), ("expert_width", 5),
    ("normalize_experts", True), ("dense_layers", (0,)), ("dense_layers", (5,)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{field}={value}" for field, value in BAD])
def test_bad_values_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"^{field}: expected"):
        replace(UNKIND, **{field: value})


LONG = RopeScaling(kind="longrope", original_length=5, short_factors=(1.0, 2.0), long_factors=(1.0, 2.0),
                   attention_factor=1.0)  # fmt: skip
DYNAMIC = RopeScaling(kind="dynamic", factor=2.0, original_length=5)
BAD_TOGETHER = [
    (LLAMA, {"norm_bias": False}, "norm_bias: expected true"),
    (UNKIND, {"norm_weight": "none", "norm_bias": False}, "norm_bias: expected true"),
    (LLAMA, {"qk_norm": "head", "qk_norm_bias": True}, "qk_norm_bias: expected false"),
    (UNKIND, {"qk_norm": "head", "qk_norm_bias": True, "norm_weight": "none"}, "qk_norm_bias: expected false"),
    (PARALLEL, {"norm_placement": "sandwich"}, "norm_placement: expected 'pre' in a parallel block"),
    (UNKIND, {"position": "alibi"}, "alibi_max: expected a number exactly when position is 'alibi'"),
    (UNKIND, {"sliding_layers": (0,)}, "sliding_window: expected a number exactly when there are sliding_layers"),
    (LLAMA, {"local_rope_theta": 30.0}, "local_rope_theta: expected nothing without sliding_layers"),
    (LLAMA, {"rotary_width": 3}, "rotary_width: expected an even width"),
    (LLAMA, {"rotary_width": 8}, "rotary_width: expected at most d_head 6, found 8"),
    (LLAMA, {"position_offset": 2}, "position_offset: expected nothing, as position is 'rope'"),
    (LLAMA, {"rope_scaling": LONG}, r"rope_scaling.short_factors: expected 3 numbers, found 2"),
    (WINDOW, {"local_rope_theta": 30.0, "local_rope_scaling": LONG}, r"rope_scaling.short_factors: expected 3 numbers"),
    (LLAMA, {"rotary_width": 2, "rope_scaling": DYNAMIC}, "rope_scaling: expected at least 4 rotated elements"),
    (UNKIND, {"n_experts": 4}, "n_active_experts: expected a number exactly when n_experts is given, found None"),
    (FAMILIES["olmo"], {"n_active_experts": 5}, "n_active_experts: expected at most n_experts 4, found 5"),
]


@pytest.mark.parametrize(("config", "changes", "words"), BAD_TOGETHER, ids=[str(c) for _, c, _ in BAD_TOGETHER])
def test_bad_combinations_are_refused(config, changes, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        replace(config, **changes)


BAD_SCALING = [
    ({"kind": "ntk", "factor": 2.0}, "kind: expected one of linear, dynamic, .*, found 'ntk'"),
    ({"kind": "linear"}, "factor: expected a value with 'linear', found None"),
    ({"kind": "linear", "factor": 2.0, "original_length": 8}, "original_length: expected nothing with 'linear'"),
    *(({"kind": "linear", "factor": value}, "factor: expected positive numbers") for value in (0, -1.0, "2", True)),
    ({"kind": "linear", "factor": 10**400}, "factor: expected positive numbers"),
    ({"kind": "linear", "factor": float("inf")}, "factor: expected positive numbers, found inf"),
    ({"kind": "dynamic", "factor": 2.0, "original_length": 8.0}, "original_length: expected a positive whole number"),
    ({"kind": "longrope", "original_length": 8, "short_factors": (1.0, 0.0), "long_factors": (1.0, 1.0),
      "attention_factor": 1.0}, "short_factors: expected positive numbers"),
    ({"kind": "yarn", "factor": 2.0, "original_length": 8, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": 1,
      "attention_factor": 1.0}, "truncate: expected true or false, found 1"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), BAD_SCALING, ids=[words for _, words in BAD_SCALING])
def test_bad_scalings_are_refused(values, words):
    with pytest.raises(ConfigError, match=rf"^rope_scaling\.{words}"):
        RopeScaling(**values)
    with pytest.raises(ConfigError, match=rf"^rope_scaling\.{words}"):
        DecoderConfig.from_dict({**LLAMA.to_dict(), "rope_scaling": values})


def test_a_scaling_names_all_that_is_wrong_with_its_fields():
    with pytest.raises(ConfigError, match=r"^rope_scaling: missing kind; unknown 'type'"):
        DecoderConfig.from_dict({**LLAMA.to_dict(), "rope_scaling": {"type": "linear", "factor": 2.0}})


@pytest.mark.parametrize("theta", [None, 0.0, -1.0, float("inf"), float("nan"), 10**400, "10000"])
def test_bad_thetas_are_refused(theta):
    with pytest.raises(ConfigError, match=r"^rope_theta: expected"):
        replace(LLAMA, rope_theta=theta)


YARN = RopeScaling(
    kind="yarn", factor=2.0, original_length=8, beta_fast=32.0, beta_slow=1.0, truncate=True, attention_factor=1.1
)  # fmt: skip
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_length=8, low_frequency_factor=1.0, high_frequency_factor=4.0)
BENT = RopeScaling(
    kind="longrope", original_length=8, short_factors=(1.0,) * 3, long_factors=(2.0,) * 3, attention_factor=1.0
)  # fmt: skip
NOT_FINITE = {
    "base 1 of yarn": {"rope_theta": 1.0, "rope_scaling": YARN},
    "beta_fast huge": {"rope_scaling": replace(YARN, beta_fast=1e308)},
    "beta_slow tiny": {"rope_scaling": replace(YARN, beta_slow=5e-324)},
    "attention_factor huge": {"rope_scaling": replace(YARN, attention_factor=1e300)},
    "original_length huge": {"rope_scaling": replace(LLAMA3, original_length=10**300)},
    "dynamic huge": {"d_head": 4, "rope_scaling": replace(DYNAMIC, factor=1e160)},
    "linear tiny": {"rope_scaling": replace(LINEAR, factor=1e-50)},
    "base tiny": {"rope_theta": 1e-300},
    "base small, angles huge": {"rope_theta": 1e-50},
    "base huge": {"rope_theta": 1e300},
    "short factors tiny": {"rope_scaling": replace(BENT, short_factors=(1.0, 1.0, 1e-320))},
    "long factors tiny": {"rope_scaling": replace(BENT, long_factors=(1.0, 1.0, 1e-320))},
    "llama3 without a passage": {"rope_scaling": replace(LLAMA3, high_frequency_factor=1.0)},
}


@pytest.mark.parametrize("changes", NOT_FINITE.values(), ids=NOT_FINITE)
def test_angles_that_are_no_finite_numbers_are_refused(changes):
    with pytest.raises(ConfigError, match=r"^rope_theta: expected finite angles up to position 16777216, found \S+"):
        replace(LLAMA, **changes)


def test_local_angles_are_looked_at_too():
    with pytest.raises(ConfigError, match=r"^local_rope_theta: expected finite angles .* found 1.0 with 'yarn'$"):
        replace(WINDOW, local_rope_theta=1.0, local_rope_scaling=YARN)


def test_a_width_without_end_is_refused_before_it_is_counted():
    with pytest.raises(ConfigError, match=r"^rotary_width: expected at most 65536, found 16777216$"):
        replace(LLAMA, d_head=2**24)


@pytest.mark.parametrize("scaling", [None, YARN, LLAMA3, LINEAR, BENT, DYNAMIC])
def test_usual_angles_are_taken(scaling):
    """Llama 4's base and the smallest of published ones too."""
    for theta in (100.0, 10000.0, 1e8):
        assert replace(LLAMA, rope_theta=theta, rope_scaling=scaling).rope_theta == theta


def test_odd_widths_are_refused_where_positions_pair_them():
    with pytest.raises(ConfigError, match=r"^d_head: expected an even width"):
        replace(LLAMA, d_head=5)
    with pytest.raises(ConfigError, match=r"^d_model: expected an even width"):
        replace(UNKIND, position="sinusoidal", d_model=9)
    replace(UNKIND, d_head=5, d_model=9)


def test_every_bad_field_has_a_case():
    assert {field for field, _ in BAD} == set(OTHERS)


LONGER = replace(LONG, short_factors=(1.0, 2.0, 3.0), long_factors=(4.0, 5.0, 6.0))


@pytest.mark.parametrize("config", [*FAMILIES.values(), replace(LLAMA, rope_scaling=LONGER)], ids=[*FAMILIES, "long"])
def test_every_field_survives_json(config):
    assert DecoderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", OTHERS)
def test_no_field_may_be_left_out(name):
    """Not even one with a default: without its scaling a Llama 3 would be another model."""
    values = {key: value for key, value in UNKIND.to_dict().items() if key != name}
    with pytest.raises(ConfigError, match=f"^decoder config: missing {name}$"):
        DecoderConfig.from_dict(values)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_dict(name):
    config = preset(name)
    assert DecoderConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="missing d_ff; unknown 'width'"):
        DecoderConfig.from_dict({**{k: v for k, v in config.to_dict().items() if k != "d_ff"}, "width": 3})


def test_unknown_preset():
    with pytest.raises(ConfigError, match=r"seed-relu, .*found 'gpt5'"):
        preset("gpt5")
