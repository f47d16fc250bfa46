"""The catalogue: every entry is well-formed, changes what it says, and gives the wrong value that was reported."""

import functools
import re
from dataclasses import replace

import mistaken
import numpy as np
import pytest
from mistaken import CONFIGS, GPT, LLAMA, probe_of

from samelogits.checking import rehearsal
from samelogits.checking.catalogue import CATALOGUE, fields, find
from samelogits.checking.variant import Variant
from samelogits.errors import InputError
from samelogits.schedule import AdamWSettings

FORWARD = mistaken.mistakes("forward")
# Nothing to see in float64 beyond what a table of float32 rounds: only queries, keys and scores' inputs move.
SHIFTS = "scores depend on differences of positions"
SAME_LOGITS = {
    "SL314": SHIFTS,
    "SL315": SHIFTS,
}
# One config in which an entry applies is the same function.
SAME_THERE = {
    ("SL533", "gpt"): "a key bias moves all scores of a query alike, where nothing is turned",
    ("SL533", "post"): "as in gpt",
    ("SL533", "relu"): "as in gpt",
    ("SL319", "llama"): "its heads are too narrow for a frequency slow enough to be scaled",
    ("SL319", "turned"): "as in llama",
    ("SL338", "llama"): "16 tokens are too few for a float32 angle to be far off",
    ("SL338", "turned"): "as in llama",
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
        with pytest.raises(InputError, match="expected one from SL101 to SL9"):
            find(wrong)


@functools.cache
def reference(name):
    config = CONFIGS[name]
    return mistaken.run(config, probe_of(config))


@functools.cache
def effects(code):
    """Config to the largest relative change of the logits, and of any tap, where they mean something."""
    found = {}
    for name, config in CONFIGS.items():
        if not find(code).applies(config):
            continue
        _, taps = reference(name)
        moved = mistaken.run(config, probe_of(config), find(code).plant)[1]
        judge = mistaken.judge_of(config, taps, "float64")
        largest = {}
        for tap, right in taps.items():
            real = judge.real(tap, right)
            if tap not in moved or moved[tap].shape != right.shape:
                largest[tap] = np.inf
                continue
            wrong = np.where(real, moved[tap] - right, 0)
            largest[tap] = np.abs(wrong).max() / np.abs(np.where(real, right, 0)).max()
        found[name] = (largest["logits"], max(largest.values()))
    return found


@pytest.mark.parametrize("m", FORWARD, ids=ids(FORWARD))
def test_every_forward_mistake_changes_the_function(m):
    found = effects(m.code)
    assert found, "it applies to no config"
    for name, (logits, tap) in found.items():
        if (m.code, name) in SAME_THERE:
            assert logits < 2e-7
            continue
        assert tap > 1e-8, name
        assert logits < 1e-6 if m.code in SAME_LOGITS else logits > 2e-8, name


def test_what_is_the_same_function_is_listed_for_a_reason():
    for code in SAME_LOGITS:
        assert max(tap for _, tap in effects(code).values()) > 1e-2
    for code, name in SAME_THERE:
        if code != "SL319":  # which changes nothing there: test_llama3_scaling has its values
            assert effects(code)[name][1] > 1e-9


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
    config = CONFIGS[name]
    given = {key: array.copy() for key, array in mistaken.wide(config).items()}
    before = {key: array.copy() for key, array in given.items()}
    for array in given.values():
        array.flags.writeable = False  # a write in place raises
    probe = probe_of(config)
    for field in (probe.tokens_BT, probe.mask_BT, probe.targets_BT):
        field.flags.writeable = False
    held = dict(given)
    for m in CATALOGUE.values():
        if m.applies(config):
            variant = Variant(config, given, probe)
            with np.errstate(all="ignore"):
                m.plant(variant)
                variant.loss(variant.run())
    assert given.keys() == before.keys()
    assert all(given[key] is held[key] for key in given)
    for key, array in before.items():
        np.testing.assert_array_equal(given[key], array, err_msg=key)
    again = mistaken.run(config, probe, arrays=given)[0]
    np.testing.assert_array_equal(again, reference(name)[0])


def test_training_leaves_what_it_was_given():
    given = {key: array.copy() for key, array in mistaken.wide(GPT).items()}
    for array in given.values():
        array.flags.writeable = False
    variant = Variant(GPT, given, probe_of(GPT))
    losses = rehearsal.train(variant, AdamWSettings(learning_rate=1e-2, total_steps=4), 2)
    assert losses[0] != losses[1]
    assert all(variant.parameters[key] is given[key] for key in given)
