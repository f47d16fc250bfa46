"""Every field of the config changes the function, and none takes a value that means nothing."""

import dataclasses
from dataclasses import replace

import ladder
import numpy as np
import pytest
from ladder import LLAMA, UNKIND

from samelogits.config import DecoderConfig
from samelogits.errors import ConfigError, InputError
from samelogits.parameters import parameter_shapes, random_parameters
from samelogits.presets import PRESETS, preset

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
    "mlp_bias": (UNKIND, False),
    "tie_embeddings": (UNKIND, True),
    "dropout": (UNKIND, 0.5),
}
# Those that leave the parameters' number and sizes alone must show in a number: the others can't be loaded unchanged.
IN_NUMBERS = {"norm_eps", "norm_placement", "activation", "position", "rope_theta", "dropout"}


def test_every_field_is_covered():
    assert set(OTHERS) == {field.name for field in dataclasses.fields(DecoderConfig)}


@pytest.mark.parametrize("field", OTHERS)
def test_field_changes_the_parameters_or_numbers(field):
    config, value = OTHERS[field]
    sizes, changed_sizes = (
        list(parameter_shapes(each).values()) for each in (config, replace(config, **{field: value}))
    )
    assert (sizes != changed_sizes) == (field not in IN_NUMBERS)


@pytest.mark.parametrize("field", sorted(IN_NUMBERS))
def test_field_changes_the_numbers(place, field):
    config, value = OTHERS[field]
    before, after = (
        ladder.load(each, place, arrays=random_parameters(each, 1))
        for each in (config, replace(config, **{field: value}))
    )
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


@pytest.mark.parametrize("value", ["learned", "rope"])
def test_positions_change_the_function(place, value):
    """The other two values of position."""
    config = replace(UNKIND, position="none")
    changed = replace(config, position=value, rope_theta=100.0 if value == "rope" else None)
    arrays = ladder.parameters(changed)
    ids = np.zeros((5, 7), int)
    with_positions = ladder.load(changed, place, arrays=arrays).logits(ids)
    without = ladder.load(config, place, arrays=arrays).logits(ids)
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
    ("position", "alibi"), ("rope_theta", 10000.0), ("attention_bias", 0), ("mlp_bias", "yes"),
    ("tie_embeddings", None), ("dropout", 1.0), ("dropout", -0.1), ("dropout", float("nan")), ("dropout", None),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{field}={value}" for field, value in BAD])
def test_bad_values_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"^{field}: expected"):
        replace(UNKIND, **{field: value})


@pytest.mark.parametrize("theta", [None, 0.0, -1.0, float("inf"), "10000"])
def test_bad_thetas_are_refused(theta):
    with pytest.raises(ConfigError, match=r"^rope_theta: expected"):
        replace(LLAMA, rope_theta=theta)


def test_odd_widths_are_refused_where_positions_pair_them():
    with pytest.raises(ConfigError, match=r"^d_head: expected an even width"):
        replace(LLAMA, d_head=5)
    with pytest.raises(ConfigError, match=r"^d_model: expected an even width"):
        replace(UNKIND, position="sinusoidal", d_model=9)
    replace(UNKIND, d_head=5, d_model=9)


def test_every_bad_field_has_a_case():
    assert {field for field, _ in BAD} == set(OTHERS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_dict(name):
    config = preset(name)
    assert DecoderConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="missing d_ff; unknown 'width'"):
        DecoderConfig.from_dict({**{k: v for k, v in config.to_dict().items() if k != "d_ff"}, "width": 3})


def test_unknown_preset():
    with pytest.raises(ConfigError, match=r"seed-relu, .*found 'gpt5'"):
        preset("gpt5")
