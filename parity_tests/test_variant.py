"""A variant without changes is the NumPy backend, bit for bit; changes act where they were told to."""

import ladder
import mistaken
import numpy as np
import pytest
from ladder import CONFIGS, MASKS, cpu, load
from mistaken import GPT, LLAMA, POST, probe_of

from samelogits.checking.catalogue import find
from samelogits.checking.probe import make_probe
from samelogits.checking.variant import OPERATIONS, Variant
from samelogits.taps import tap_names


def variant_of(config, probe=None, places=None):
    return Variant(config, mistaken.wide(config), probe or probe_of(config), places)


def taps_of(variant, change=lambda name, value: value):
    """What each tap was given, and the logits."""
    found = {}

    def tap(name, value):
        found[name] = value
        return change(name, value)

    return found, variant.run(tap)


def moved(before, after):
    """Taps that differ, in order."""
    assert before.keys() == after.keys()
    return [name for name in before if not np.array_equal(before[name], after[name])]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", [*CONFIGS, *mistaken.CONFIGS])
def test_no_change_is_the_backend(name, mask):
    config = CONFIGS.get(name) or mistaken.CONFIGS[name]
    probe = make_probe(config.vocab_size, config.position_limit, ladder.tokens(config), MASKS[mask])
    expected = load(config, cpu("numpy")).activations(probe.tokens_BT, probe.mask_BT)
    variant = Variant(config, ladder.wide(ladder.parameters(config)), probe)
    found, logits = taps_of(variant)
    assert list(found) == list(expected) == tap_names(config)
    for tap, array in expected.items():
        assert found[tap].dtype == np.float64
        np.testing.assert_array_equal(found[tap], array, err_msg=tap)
    np.testing.assert_array_equal(logits, expected["logits"])


@pytest.mark.parametrize("config", [GPT, LLAMA, POST], ids=["gpt", "llama", "post"])
def test_the_loss_is_the_backend_s(config):
    probe = probe_of(config)
    model = load(config, cpu("numpy"), arrays=mistaken.wide(config))
    loss, _ = model.loss_and_gradients(probe.tokens_BT, probe.targets_BT, attention_mask=probe.mask_BT)
    variant = variant_of(config)
    assert float(variant.loss(variant.run())) == loss


@pytest.mark.parametrize("place", [0, 1, "stack", "head"])
def test_exchange_acts_in_its_places(place):
    before, _ = taps_of(variant_of(GPT))
    variant = variant_of(GPT, places=[place])
    variant.exchange(("linear", "embed"), lambda right: lambda *given: right(*given) + 1.0)
    after, _ = taps_of(variant)
    first = {0: "layers.0.self_attn.q", 1: "layers.1.self_attn.q", "stack": "embed_tokens", "head": "logits"}[place]
    assert moved(before, after)[0] == first
    assert variant.operation("linear") is OPERATIONS["linear"]
    again, _ = taps_of(variant_of(GPT))
    assert moved(before, again) == []


def test_exchanges_nest_and_keep_their_state_apart():
    variant = variant_of(GPT, places=[0, 1])
    seen = []

    def counting(right):
        calls = []
        seen.append(calls)
        return lambda *given: calls.append(0) or right(*given)

    variant.exchange("attention_scores", counting)
    variant.exchange("attention_scores", lambda right: lambda *a: 2 * right(*a))
    variant.exchange("attention_scores", lambda right: lambda *a: right(*a) + 1)
    found, _ = taps_of(variant)
    assert [len(calls) for calls in seen] == [1, 1]
    expected = 2 * taps_of(variant_of(GPT))[0]["layers.0.self_attn.scores"] + 1
    np.testing.assert_allclose(found["layers.0.self_attn.scores"], expected, atol=1e-12)


def test_edit_acts_in_its_places():
    for places, ending, expected in (
        ([1], "q_proj.weight", ["model.layers.1.self_attn.q_proj.weight"]),
        (["stack"], ".weight", ["model.embed_tokens.weight", "model.embed_positions.weight", "model.norm.weight"]),
        (["head"], ".weight", ["lm_head.weight"]),
        ([], ".weight", []),
        ([0], ("q_proj.bias", "k_proj.bias"), [f"model.layers.0.self_attn.{p}_proj.bias" for p in "qk"]),
    ):
        variant = variant_of(GPT, places=places)
        before = dict(variant.parameters)
        variant.edit(ending, lambda array: -array)
        changed = [name for name in before if variant.parameters[name] is not before[name]]
        assert changed == expected
        assert mistaken.wide(GPT).keys() == variant.parameters.keys()
    assert sorted(variant_of(GPT).names()) == sorted(mistaken.wide(GPT))


@pytest.mark.parametrize("layer", [0, 1])
def test_rewire_acts_in_its_places(layer):
    before, _ = taps_of(variant_of(GPT))
    variant = variant_of(GPT, places=[layer])
    find("SL711").plant(variant)
    changed = moved(before, taps_of(variant)[0])
    assert changed[0] == f"layers.{layer}.residual_mid"


@pytest.mark.parametrize("config", [GPT, LLAMA, POST], ids=["gpt", "llama", "post"])
def test_a_window_gives_what_a_full_run_gives(config):
    full, logits = taps_of(variant_of(config))
    last = "post_feedforward_layernorm" if config.norm_placement == "post" else "residual_out"
    outputs = {i: full[f"layers.{i}.{last}"] for i in range(config.n_layers)}
    for window in (["stack", 0, 1, "head"], [0], [1], ["head"], [1, "head"], []):
        found = {}
        keep = lambda name, value, found=found: found.setdefault(name, value)  # noqa: E731
        variant_of(config).run_window(window, outputs, keep)
        for name, array in found.items():
            np.testing.assert_array_equal(array, full[name], err_msg=name)
        for i in range(config.n_layers):
            assert (f"layers.{i}.mlp.up" in found) == (i in window)
        assert ("logits" in found) == ("head" in window)
    found = {}
    variant_of(config).run_window(["head"], {0: None}, lambda name, value: found.setdefault(name, value))
    np.testing.assert_array_equal(found["logits"], logits)  # a layer without an output is run all the same
    assert "layers.1.mlp.up" in found


def test_a_window_reads_the_outputs_that_it_was_given():
    full, _ = taps_of(variant_of(GPT))
    found = {}
    variant_of(GPT).run_window([1], {0: full["layers.0.residual_out"] + 1}, lambda n, v: found.setdefault(n, v))
    assert not np.array_equal(found["layers.1.residual_mid"], full["layers.1.residual_mid"])


def test_a_tap_s_return_value_is_what_follows_reads():
    before, logits = taps_of(variant_of(LLAMA))
    changed, other = taps_of(
        variant_of(LLAMA), lambda name, value: value * 0 if name == "layers.0.mlp.output" else value
    )
    assert moved(before, changed)[0] == "layers.0.residual_out"
    np.testing.assert_array_equal(changed["layers.0.residual_out"], changed["layers.0.residual_mid"])
    assert not np.array_equal(other, logits)
    kept, other = taps_of(variant_of(LLAMA), lambda name, value: logits * 2 if name == "logits" else value)
    np.testing.assert_array_equal(kept["logits"], logits)
    np.testing.assert_array_equal(other, 2 * logits)


def test_local_values_are_one_step_from_the_candidate_s():
    """Where the candidate's own value is put in, what follows is right, and only the wrong operation is off."""
    probe = probe_of(LLAMA)
    taps = mistaken.run(LLAMA, probe, find("SL711").plant, [0])[1]
    judge = mistaken.judge_of(LLAMA, taps, "float64", probe)
    local = judge.values(judge.variant(), True)
    full = judge.values(judge.variant(), False)
    off = [name for name in taps if not np.array_equal(local[name], taps[name])]
    assert off == ["layers.0.residual_mid"]
    assert len([name for name in taps if not np.array_equal(full[name], taps[name])]) > 20
    window = judge.values(judge.variant(), True, [1, "head"])
    assert all(np.array_equal(window[name], taps[name]) for name in window)
    assert "layers.0.mlp.up" not in window
    assert judge.boundary(1) == "layers.1.residual_out"
