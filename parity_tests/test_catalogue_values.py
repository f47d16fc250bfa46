"""Right and wrong values as people reported them: the reference gives the one, the planted mistake the other."""

from dataclasses import replace
from types import SimpleNamespace

import mistaken
import numpy as np
import pytest
from mistaken import GPT, LLAMA, POST, RELU, probe_of

from samelogits.checking import rehearsal
from samelogits.checking.catalogue import find, layout
from samelogits.checking.probe import make_probe
from samelogits.checking.rounding import round_bfloat16, round_float16, round_float32, round_tf32
from samelogits.checking.variant import Variant
from samelogits.schedule import AdamWSettings


def op(code, config, name, place=0, probe=None, arrays=None):
    """An operation as the reference has it, and as it is with the mistake."""
    found = []
    for planted in (None, code):
        variant = Variant(config, arrays or mistaken.wide(config), probe or probe_of(config))
        if planted:
            find(planted).plant(variant)
        found.append(getattr(variant._ops[place], name))
    return found


def assert_values(operations, arguments, right, wrong, tolerance=1e-5):
    for operation, expected in zip(operations, (right, wrong), strict=True):
        np.testing.assert_allclose(np.ravel(operation(*arguments)), expected, rtol=tolerance, atol=1e-12)


def test_gelu_forms():
    x = np.array([1.0, -3.0])
    erf, tanh = [0.84134475, -0.00404969], [0.84119199, -0.00363739]
    assert_values(op("SL101", GPT, "gelu"), [x], erf, tanh)
    assert_values(op("SL102", POST, "gelu_tanh"), [x], tanh, erf)
    for at, difference in ((2.7, 4.73e-4), (0.02, 5e-11)):
        right, wrong = (f(np.array([at]))[0] for f in op("SL101", GPT, "gelu"))
        assert abs(abs(right - wrong) / difference - 1) < 0.1


def test_norms():
    small = np.array([[[1, -1, 2, -2]]]) * 1e-3
    ones, zeros = np.ones(4), np.zeros(4)
    assert_values(
        [lambda *a, f=f: f(*a)[..., :1] for f in op("SL201", GPT, "layer_norm")],
        [small, ones, zeros, 1e-5], 0.28284273, 0.5345225,
    )  # fmt: skip
    flat = np.full((1, 1, 8), 1e-3)
    assert_values(op("SL204", LLAMA, "rms_norm"), [flat, np.ones(8), 1e-5], [0.30151] * 8, [0.99010] * 8, 2e-5)
    unit = np.array([[[1.0, -1.0, 1.0, -1.0]]])
    stored = np.array([15.8125, 0.0, 0.0, 0.0])  # one plus it is 16.8125, and 16.75 in bfloat16
    right, wrong = (f(unit, stored, 0.0)[0, 0, 0] for f in op("SL207", LLAMA, "rms_norm"))
    assert (right, wrong) == (15.8125, 16.8125)
    assert round_bfloat16(np.array([16.8125]))[0] == 16.75
    large = 100 + np.arange(16)[None, None] * 1e-3
    right, wrong = (f(large, np.ones(16), np.zeros(16), 1e-5)[0, 0, 0] for f in op("SL206", GPT, "layer_norm"))
    assert abs(right + 1.3416) < 1e-4
    assert abs(wrong - right) > 0.5, "the variance is lost to cancellation"
    unbiased = op("SL205", GPT, "layer_norm")
    x = np.array([[[-1.0, 1.0, -1.0, 1.0]]])
    assert_values(unbiased, [x, ones, zeros, 0.0], x.ravel(), x.ravel() * np.sqrt(3 / 4))


def test_fused_projections():
    config = replace(GPT, d_model=2, n_heads=2, n_kv_heads=2, d_head=2, attention_bias=False)
    names = [f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qkv"]
    by_head = ([0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11])
    flat = ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11])
    for code, right, wrong in (("SL521", flat, by_head), ("SL522", by_head, flat)):
        arrays = dict(mistaken.wide(config))
        for name, rows in zip(names, right, strict=True):
            arrays[name] = np.repeat(np.array(rows, float)[:, None], 2, axis=1)
        variant = Variant(config, arrays, probe_of(config), [0])
        find(code).plant(variant)
        assert [variant.parameters[name][:, 1].tolist() for name in names] == [*map(list, wrong)]


def test_rotary_layouts():
    config = replace(LLAMA, n_heads=1, n_kv_heads=1, d_head=4, rope_theta=10000.0)
    q = np.array([[[[1.0, 2, 3, 4]]]])
    angles = np.array([[[1.0, 0.01]]])
    right, wrong = [-1.98411, 1.95990, 2.46238, 4.01980], [-1.14264, 1.92208, 2.95985, 4.02980]
    assert_values(op("SL301", config, "rotate"), [q, np.cos(angles), np.sin(angles)], right, wrong)
    rows = np.arange(8)
    assert layout._to_halves(rows, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert layout._to_halves(rows, 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    np.testing.assert_array_equal(layout._to_neighbours(layout._to_halves(rows, 2), 2), rows)
    two = replace(LLAMA, n_heads=4, n_kv_heads=2, d_head=4, d_model=3, attention_bias=False)
    variant = Variant(two, mistaken.wide(two), probe_of(two))
    key = "model.layers.0.self_attn.k_proj.weight"
    before = variant.parameters[key]
    find("SL513").plant(variant)
    after = variant.parameters[key]
    assert not np.array_equal(after, before)
    np.testing.assert_array_equal(np.sort(after, axis=0), np.sort(before, axis=0))


def test_reordering_both_sides_alike_changes_no_score_where_nothing_is_turned():
    config = replace(GPT, position="none")
    right = mistaken.run(config, probe_of(config))[1]
    both = mistaken.run(config, probe_of(config), find("SL511").plant)[1]
    one = mistaken.run(config, probe_of(config), find("SL514").plant)[1]
    scores = "layers.0.self_attn.scores"
    np.testing.assert_allclose(both[scores], right[scores], atol=1e-12)
    assert np.abs(one[scores] - right[scores]).max() > 0.1


def test_key_heads_are_repeated_not_tiled():
    config = replace(LLAMA, n_heads=4)
    weights, values = np.ones((1, 4, 1, 1)), np.array([10.0, 20.0]).reshape(1, 1, 2, 1)
    assert_values(op("SL411", config, "attention_mix"), [weights, values], [10, 10, 20, 20], [10, 20, 10, 20])
    assert_values(op("SL412", config, "attention_mix"), [weights, values], [10, 10, 20, 20], [10, 10, 10, 10])
    assert_values(op("SL413", config, "attention_mix"), [weights, values], [10, 10, 20, 20], [20, 20, 10, 10])
    for kv in (1, 4):
        assert not find("SL411").applies(replace(config, n_kv_heads=kv))


def test_masks():
    """With equal scores and values 0, 1, 2, ... each query gives the mean of what it sees."""
    probe = make_probe(41, None, np.zeros((1, 5), int))
    scores, visible = np.zeros((1, 1, 5, 5)), np.tril(np.ones((1, 5, 5), bool))

    def means(operation):
        return lambda *given: operation(*given)[0, 0] @ np.arange(5.0)

    right = [0, 0.5, 1, 1.5, 2]
    for code, wrong in {
        "SL421": [2, 2, 2, 2, 2],
        "SL422": [0.5, 1, 1.5, 2, 2],
        "SL423": [0, 0, 0.5, 1, 1.5],
        "SL425": [0, 0.5, 1.5, 2.5, 3.5],
        "SL426": [2, 2, 2, 2, 2],
        "SL427": [0, 1 / 5, 3 / 5, 6 / 5, 10 / 5],
        "SL429": [0, 1 / 3, 3 / 4, 6 / 5, 10 / 6],
    }.items():
        assert_values(map(means, op(code, GPT, "attention_weights", probe=probe)), [scores, visible], right, wrong)
    padded = make_probe(41, None, np.zeros((1, 2), int), [[0, 1]])
    seen = Variant(GPT, mistaken.wide(GPT), padded).batch.visible_BTS
    for operation, expected in zip(op("SL424", GPT, "attention_weights", probe=padded), (3.0, 2.0), strict=True):
        assert (operation(np.zeros((1, 1, 2, 2)), seen)[0, 0] @ [1.0, 3.0])[1] == expected


def test_scales_and_orders():
    config = replace(GPT, d_model=12, d_head=4)
    ones = np.ones((1, 1, 4, 4))
    assert_values(op("SL403", config, "attention_scores"), [ones, ones, 0.5], [2.0] * 4, [4 / np.sqrt(3)] * 4)
    assert_values(op("SL401", config, "attention_scores"), [ones, ones, 0.5], [2.0] * 4, [4.0] * 4)
    wide, ids_, table = replace(GPT, d_model=48), np.array([[0]]), np.ones((1, 48))
    probe = replace(probe_of(wide), tokens_BT=ids_, mask_BT=ids_ == 0)
    operations = [lambda ids, table, code=code: _embedded(code, wide, probe, table) for code in (None, "SL601")]
    assert_values(operations, [ids_, table], [1.0] * 48, [6.92820323] * 48, 1e-8)
    square = replace(GPT, d_model=6, n_heads=1, n_kv_heads=1)
    weight = np.tril(np.ones((6, 6)), -1)
    variant = Variant(square, mistaken.wide(square), probe_of(square))
    variant.parameters["model.layers.0.self_attn.o_proj.weight"] = weight
    assert (np.eye(6)[0] @ weight.T).tolist() == [0, 1, 1, 1, 1, 1]
    find("SL501").plant(variant)
    assert not (np.eye(6)[0] @ variant.parameters["model.layers.0.self_attn.o_proj.weight"].T).any()


def _embedded(code, config, probe, table):
    variant = Variant(config, mistaken.wide(config), probe)
    if code:
        find(code).plant(variant)
    return variant._ops["stack"].embed(variant.batch.tokens_BT, table)


def test_llama3_scaling():
    """Keep, blend, divide, divide: the table for head_dim 8 and a context of 64, whose waves are 128 times shorter."""
    config = replace(LLAMA, n_heads=1, n_kv_heads=1, rope_theta=10000.0)
    probe = make_probe(41, None, np.zeros((1, 2), int))
    turned = op("SL319", config, "rotate", probe=probe)[1](np.ones((1, 2, 1, 8)), None, None)[0, 1, 0]
    angles = np.arctan2(turned[4:], turned[:4]) - np.pi / 4
    frequencies = np.array([1, 0.1, 0.01, 0.001])
    smooth = np.clip((8192 * frequencies / (2 * np.pi) - 1) / 3, 0, 1)
    # The tables are float32: a frequency, an angle, its cosine and its sine are each rounded once.
    np.testing.assert_allclose(angles, frequencies * (smooth + (1 - smooth) / 8), rtol=4 * 2.0**-24)
    assert smooth.tolist()[:3] == [1, 1, 1]
    assert 0 < smooth[3] < 1


def test_formats():
    positions = np.arange(255.0, 261.0)
    assert round_bfloat16(positions).tolist() == [255, 256, 256, 258, 260, 260]
    a = np.array([[1.1111111, 2.2222222], [3.3333333, 4.4444444]])
    read = round_tf32(a)
    np.testing.assert_allclose((read @ read.T).ravel()[[0, 1, 3]], [6.175251, 13.585552, 30.876255], rtol=1e-7)
    assert round_bfloat16(np.array([10.01, 10.02, 10.03])).tolist() == [10.0, 10.0, 10.0]
    assert round_float16(np.array([1e6, -70000.0, 65504.0])).tolist() == [np.inf, -np.inf, 65504]
    for round_ in (round_bfloat16, round_tf32, round_float32):
        out = round_(np.array([np.inf, -np.inf, np.nan, 0.0, 3.4e38]))
        assert out[:2].tolist() == [np.inf, -np.inf]
        assert np.isnan(out[2])
        assert out[3] == 0
    torch = pytest.importorskip("torch", reason="compares with torch's bfloat16")
    x = np.random.default_rng(0).standard_normal(4000).astype(np.float32) * np.float32(10.0) ** np.arange(-20, 20, 0.01)
    x = x.astype(np.float32)
    np.testing.assert_array_equal(round_bfloat16(x), torch.tensor(x).bfloat16().double().numpy())


def test_missing_biases():
    arrays = {name: np.zeros_like(array) for name, array in mistaken.wide(GPT).items()}
    for name in ("v_proj.bias", "o_proj.weight"):
        arrays[f"model.layers.0.self_attn.{name}"] += 1
    probe = probe_of(GPT)
    right = mistaken.run(GPT, probe, arrays=arrays)[1]["layers.0.residual_mid"]
    np.testing.assert_allclose(right[probe.mask_BT], GPT.n_heads * GPT.d_head)
    for code in ("SL531", "SL534"):
        without = mistaken.run(GPT, probe, find(code).plant, arrays=arrays)[1]
        assert not without["layers.0.residual_mid"].any()


def test_losses():
    logits = np.array([[[2.0, 1, 0], [0, 1, 2]]])
    probe = replace(make_probe(3, None, [[0, 0]]), targets_BT=np.array([[0, -100]]))
    config = replace(GPT, vocab_size=3)
    found = {}
    for code in (None, "SL903", "SL904", "SL905", "SL908"):
        variant = Variant(config, mistaken.wide(config), probe)
        if code:
            find(code).plant(variant)
        found[code] = float(variant.loss(logits))
    expected = {None: 0.40760595, "SL903": 0.20380297, "SL904": 1.40760595, "SL905": 0.40760595, "SL908": 0.58805110}
    assert found == pytest.approx(expected, abs=1e-7)


def steps_of(monkeypatch, code, gradient, settings, steps, start=1.0):
    """One weight before each step, the gradient being given."""
    seen = []

    def gradients(variant):
        seen.append(float(variant.parameters["w"][0, 0]))
        return 0.0, {"w": np.full((1, 1), gradient)}

    monkeypatch.setattr(rehearsal, "gradients", gradients)
    variant = Variant(RELU, mistaken.wide(RELU), probe_of(RELU))
    variant = SimpleNamespace(rules=variant.rules, parameters={"w": np.full((1, 1), start)})
    if code:
        find(code).plant(variant)
    rehearsal.train(variant, settings, steps + 1)
    return np.array(seen)


def test_adam_eps(monkeypatch):
    settings = AdamWSettings(learning_rate=0.1, beta2=0.999, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
    for code, expected in ((None, 0.95), ("SL952", 0.9969347), ("SL951", 0.9999900)):
        assert steps_of(monkeypatch, code, 1e-8, settings, 1)[1] == pytest.approx(expected, abs=5e-8)
    decay = replace(settings, weight_decay=0.01, total_steps=10**9)
    for code, expected in ((None, 0.904793), ("SL955", 0.99**100), ("SL956", 1.0)):
        assert steps_of(monkeypatch, code, 0.0, decay, 100)[100] == pytest.approx(expected, abs=1e-6)


def test_adam_schedule(monkeypatch):
    settings = AdamWSettings(
        learning_rate=1.0, weight_decay=0.0, max_grad_norm=9.0, warmup_steps=4, total_steps=10, final_fraction=0.0
    )
    rates = [0, 0.25, 0.5, 0.75, 1, 0.933, 0.75, 0.5, 0.25, 0.067, 0]
    for code, expected in (
        (None, rates),
        ("SL961", [*rates[1:], 0]),
        ("SL962", [0, *rates[:-1]]),
        ("SL963", [1] * 11),
    ):
        moved = -np.diff(steps_of(monkeypatch, code, 1.0, settings, 11))
        np.testing.assert_allclose(moved, expected, atol=5e-4, err_msg=str(code))
