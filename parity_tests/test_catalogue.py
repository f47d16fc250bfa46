"""The catalogue: every entry is well-formed, changes what it says, and gives the wrong value that was reported."""

import contextlib
import functools
import random
import re
from dataclasses import replace

import mistaken
import numpy as np
import pytest
from mistaken import GPT, LLAMA, probe_of

from samelogits.checking import rehearsal
from samelogits.checking.catalogue import CATALOGUE, fields, find
from samelogits.checking.variant import Variant
from samelogits.errors import InputError
from samelogits.rotary import RopeScaling
from samelogits.schedule import AdamWSettings

# What families of decoders add: every field of the config that has a default.
SLIDING = {"sliding_window": 5, "sliding_layers": (1,), "n_layers": 3}
LONGROPE = RopeScaling(
    kind="longrope", original_length=8, short_factors=(1.0, 1.1, 1.2, 1.3), long_factors=(1.0, 2.0, 3.0, 4.0),
    attention_factor=1.1,
)  # fmt: skip
FEATURES = {
    "gemma 2": replace(
        LLAMA, norm_placement="sandwich", norm_weight="plus_one", norm_wide=True, activation="gelu_tanh",
        attention_softcap=3.0, logit_softcap=2.0, embedding_scale=3.16, attention_scale=0.3, sliding_window=3,
        sliding_layers=(0,), tie_embeddings=True,
    ),
    "gemma 3": replace(
        LLAMA, norm_placement="sandwich", norm_weight="plus_one", qk_norm="head", local_rope_theta=30.0,
        rope_scaling=RopeScaling(kind="linear", factor=4.0), **SLIDING,
    ),
    "cohere": replace(
        LLAMA, norm="layer_norm", norm_bias=False, parallel_residual=True, shared_norm=True, qk_norm="heads",
        logit_scale=0.3, no_rope_layers=(1,), n_heads=4, tie_embeddings=True, **SLIDING,
    ),
    "olmo 2": replace(
        LLAMA, norm_placement="output", norm_wide=True, qk_norm="projection", clip_qkv=1.1, rope_theta=500000.0
    ),
    "granite": replace(
        LLAMA, residual_scale=0.7, embedding_scale=3.3, logit_scale=0.4, attention_scale=0.2,
        rope_scaling=RopeScaling(
            kind="llama3", factor=8.0, original_length=16, low_frequency_factor=1.0, high_frequency_factor=4.0
        ),
    ),
    "phi": replace(
        GPT, position="rope", rope_theta=100.0, rotary_width=4, parallel_residual=True, qk_norm="head",
        qk_norm_bias=True, head_bias=True, tie_embeddings=True,
    ),
    "bloom": replace(
        GPT, position="alibi", alibi_max=8.0, embedding_norm=True, activation="relu_squared", n_heads=6, n_kv_heads=6,
        attention_output_bias=False,
    ),
    "falcon": replace(
        GPT, position="alibi", alibi_max=5.0, alibi_rounded=True, norm_weight="none", scale_by_layer=True, d_head=8
    ),
    "opt": replace(
        GPT, position_offset=2, embedding_width=7, activation="relu", norm_placement="post", final_norm=False
    ),
    "yarn": replace(
        LLAMA, norm_weight="none", qk_norm="projection", n_kv_heads=8, rotary_width=6,
        rope_scaling=RopeScaling(
            kind="yarn", factor=4.0, original_length=64, beta_fast=2.0, beta_slow=0.5, truncate=False,
            attention_factor=1.2,
        ),
    ),
    "longrope": replace(LLAMA, rope_scaling=LONGROPE),
    "longrope within": replace(LLAMA, rope_scaling=replace(LONGROPE, original_length=16)),
    "mixtral": replace(
        LLAMA, n_experts=4, n_active_experts=2, expert_width=10, normalize_experts=True, dense_layers=(0,)
    ),
    "olmoe": replace(
        LLAMA, qk_norm="projection", n_kv_heads=8, n_experts=5, n_active_experts=3, expert_width=10, mlp_bias=True
    ),
    "dynamic": replace(LLAMA, rope_scaling=RopeScaling(kind="dynamic", factor=2.0, original_length=8)),
}  # fmt: skip
CONFIGS = mistaken.CONFIGS | FEATURES
# Nothing to see in float64 beyond what a table of float32 rounds: only queries, keys and scores' inputs move.
SHIFTS = "scores depend on differences of positions"
SAME_LOGITS = {"SL314": SHIFTS, "SL315": SHIFTS}
# The same function where a config has nothing that would show it, by the code: which configs, and why. Taps may move.
SAME_THERE = {
    "SL319": (
        {"llama", "turned", "gemma 2", "cohere", "phi", "mixtral", "olmoe"},
        "their heads are too narrow for a frequency slow enough to be scaled",
    ),
    "SL338": ({"llama", "turned", "olmo 2", "phi"}, "16 tokens are too few for a float32 angle to be far off"),
    "SL347": ({"longrope within"}, "the text is no longer than what the model was first trained with"),
    "SL348": ({"longrope"}, "the text is longer"),
    "SL533": (
        {"gpt", "post", "relu", "bloom", "falcon", "opt"},
        "a key bias moves all scores of a query alike, where nothing is turned",
    ),
}


def ids(items):
    return [m.code for m in items]


# Every entry


def test_codes_titles_and_fields():
    codes = list(CATALOGUE)
    assert len(codes) > 150
    for code, m in CATALOGUE.items():
        assert re.fullmatch(r"SL[1-9]\d\d", code)
        assert m.code == code
        assert 5 < len(m.title) < 110, code
        assert m.title[-1] not in ".,;", code
        assert len(m.explanation) > 15, code
        assert m.explanation.rstrip()[-1] in ".)`", code
        assert m.stage == ("forward" if code < "SL900" else "loss" if code < "SL950" else "training")
    assert len({m.title for m in CATALOGUE.values()}) == len(codes)
    assert len({m.plant for m in CATALOGUE.values()}) == len(codes)
    assert sorted(code for entries in fields().values() for code in ids(entries)) == sorted(codes)
    assert all(fields())


def test_codes_are_found():
    assert find("sl301").code == "SL301"
    for wrong in ("SL999", "", "301"):
        with pytest.raises(InputError, match="code: expected one that samelogits explain lists"):
            find(wrong)


@functools.cache
def frozen(name):
    """A config's probe and parameters, in which a write raises."""
    probe = probe_of(CONFIGS[name])
    arrays = {key: array.copy() for key, array in mistaken.wide(CONFIGS[name]).items()}
    for array in (*arrays.values(), probe.tokens_BT, probe.mask_BT, probe.targets_BT):
        array.flags.writeable = False
    return probe, arrays


@functools.cache
def effects(name):
    """Code to the largest relative change of the logits, and of any tap, where they mean something."""
    config, (probe, arrays) = CONFIGS[name], frozen(name)
    right = mistaken.run(config, probe, arrays=arrays)[1]
    judge = mistaken.judge_of(config, right, "float64")
    found = {}
    for m in mistaken.mistakes("forward", config):
        moved = mistaken.run(config, probe, m.plant, arrays=arrays)[1]
        largest = {}
        for tap, array in right.items():
            real = judge.real(tap, array)
            if tap not in moved or moved[tap].shape != array.shape:
                largest[tap] = np.inf
                continue
            wrong = np.where(real, moved[tap] - array, 0)
            largest[tap] = np.abs(wrong).max() / np.abs(np.where(real, array, 0)).max()
        found[m.code] = (largest["logits"], max(largest.values()))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_every_forward_mistake_changes_the_function(name):
    for code, (logits, tap) in effects(name).items():
        assert np.isfinite(logits), code
        if name in SAME_THERE.get(code, ((), ""))[0]:
            assert logits < 2e-7, code
            continue
        assert tap > 1e-8, code
        assert logits < 1e-6 if code in SAME_LOGITS else logits > 2e-8, code


def test_every_forward_mistake_applies_somewhere():
    applied = {code for name in CONFIGS for code in effects(name)}
    assert applied == {m.code for m in mistaken.mistakes("forward")}


def test_what_is_the_same_function_is_listed_for_a_reason():
    for code in SAME_LOGITS:
        assert max(effects(name)[code][1] for name in CONFIGS if code in effects(name)) > 1e-2
    for code, (names, _) in SAME_THERE.items():
        applied = {name for name in CONFIGS if code in effects(name)}
        assert names < applied, f"{code} shows nowhere, or doesn't apply where it is said to be the same"


@pytest.mark.parametrize("name", CONFIGS)
def test_two_mistakes_at_once_run(name):
    """Or their shapes don't fit, which the diagnosis passes over."""
    config, (probe, arrays) = CONFIGS[name], frozen(name)
    codes, dice = ids(mistaken.mistakes("forward", config)), random.Random(name)
    for _ in range(60):
        with contextlib.suppress(ValueError):
            mistaken.run(config, probe, mistaken.together(*sorted(dice.sample(codes, 2))), arrays=arrays)


@pytest.mark.parametrize("kind", ["loss", "training"])
def test_every_later_mistake_changes_losses(kind):
    settings = AdamWSettings(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.1, warmup_steps=1, total_steps=4)
    config, probe = replace(LLAMA, n_layers=1), probe_of(LLAMA)
    right = Variant(config, mistaken.wide(config), probe)
    logits = right.run()
    for m in mistaken.mistakes(kind, config):
        wrong = Variant(config, mistaken.wide(config), probe)
        m.plant(wrong)
        if kind == "loss":
            assert abs(float(wrong.loss(logits)) - float(right.loss(logits))) > 1e-4, m.code
            continue
        found, expected = (np.array(rehearsal.train(v, settings, 4)) for v in (wrong, right))
        assert found[0] == expected[0], m.code
        assert np.abs(found - expected).max() > (1e-9 if "eps" in m.title else 1e-6), m.code


@pytest.mark.parametrize("name", CONFIGS)
def test_plants_leave_what_they_were_given(name):
    config, (probe, arrays) = CONFIGS[name], frozen(name)
    right = mistaken.run(config, probe)[0]
    effects(name)
    for m in mistaken.mistakes("loss", config):
        variant = Variant(config, arrays, probe)
        m.plant(variant)
        variant.loss(variant.run())
    for key, array in mistaken.wide(config).items():
        np.testing.assert_array_equal(arrays[key], array, err_msg=key)
    assert arrays.keys() == mistaken.wide(config).keys()
    np.testing.assert_array_equal(mistaken.run(config, probe, arrays=arrays)[0], right)


def test_training_leaves_what_it_was_given():
    given = {key: array.copy() for key, array in mistaken.wide(GPT).items()}
    for array in given.values():
        array.flags.writeable = False
    variant = Variant(GPT, given, probe_of(GPT))
    losses = rehearsal.train(variant, AdamWSettings(learning_rate=1e-2, total_steps=4), 2)
    assert losses[0] != losses[1]
    assert all(variant.parameters[key] is given[key] for key in given)
