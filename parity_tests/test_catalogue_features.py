"""Right and wrong values of what families of decoders add: windows, scalings, norms of queries, fused layouts, ..."""

from dataclasses import replace

import mistaken
import numpy as np
import pytest
from mistaken import GPT, LLAMA, POST, probe_of
from test_catalogue import FEATURES
from test_catalogue_values import assert_values, op

from samelogits.checking.catalogue import find
from samelogits.checking.probe import make_probe
from samelogits.checking.variant import Variant
from samelogits.rotary import RopeScaling


def planted(config, *codes, probe=None, arrays=None):
    """The reference with these mistakes."""
    variant = Variant(config, arrays or mistaken.wide(config), probe or probe_of(config))
    mistaken.together(*codes)(variant)
    return variant


def taps_of(variant):
    found = {}
    variant.run(lambda name, value: found.setdefault(name, value))
    return found


def test_squares_of_relu():
    config, x = FEATURES["bloom"], np.array([-2.0, 3.0])
    assert_values(op("SL111", config, "relu_squared"), [x], [0, 9], [0, 3])
    assert_values(op("SL113", config, "relu_squared"), [x], [0, 9], [4, 9])
    assert_values(op("SL112", config, "relu_squared"), [np.array([1.0, -3.0])], [1, 0], [0.84134475, -0.00404969])


def test_one_plus_weight():
    config = FEATURES["gemma 2"]
    weights = np.array([15.8125, 0.0035])
    assert_values(op("SL224", config, "plus_one"), [weights], [16.8125, 1.0035], weights)
    assert_values(op("SL225", config, "plus_one"), [weights], [16.8125, 1.0035], [16.75, 1.0], 1e-12)
    assert not find("SL207").applies(config)
    assert not find("SL224").applies(LLAMA)


def test_sliding_windows():
    """With equal scores and values 0, 1, 2, ... each query gives the mean of what it sees; two keys in layer 1."""
    config = replace(GPT, sliding_window=2, sliding_layers=(1,))
    probe = make_probe(41, None, np.zeros((1, 5), int))
    near = Variant(config, mistaken.wide(config), probe).batch.near_BTS
    whole = np.tril(np.ones((1, 5, 5), bool))

    def means(operation, seen):
        return lambda: operation(np.zeros((1, 1, 5, 5)), seen)[0, 0] @ np.arange(5.0)

    all_keys, two, one, three = [0, 0.5, 1, 1.5, 2], [0, 0.5, 1.5, 2.5, 3.5], [0, 1, 2, 3, 4], [0, 0.5, 1, 2, 3]
    for code, wrong in {
        "SL451": (all_keys, all_keys),
        "SL452": (all_keys, three),
        "SL453": (all_keys, one),
        "SL454": (two, two),
        "SL455": (two, all_keys),
        "SL421": ([2, 2, 2, 2, 2], [2, 2, 2.5, 3, 3.5]),
    }.items():
        for layer, seen, right in ((0, whole, all_keys), (1, near, two)):
            operations = op(code, config, "attention_weights", place=layer, probe=probe)
            assert_values([means(operation, seen) for operation in operations], [], right, wrong[layer])


def test_soft_caps():
    config = replace(GPT, attention_softcap=2.0)
    q, k = np.full((1, 1, 4, 6), 1.0), np.full((1, 1, 4, 6), 1.0)
    scores = op("SL434", config, "attention_scores")
    assert_values(scores, [q, k, 0.5], [3.0] * 4, [np.tanh(3)] * 4)
    assert_values(op("SL434", config, "soft_cap"), [np.array([3.0]), 2.0], [2 * np.tanh(1.5)], [3.0])
    assert_values(op("SL433", config, "soft_cap"), [np.array([3.0]), 2.0], [2 * np.tanh(1.5)], [3.0])
    weights = op("SL435", config, "attention_weights")
    seen = np.array([[[True, False]]])
    assert_values(weights, [np.zeros((1, 1, 1, 2)), seen], [1, 0], np.array([1, np.exp(-2)]) / (1 + np.exp(-2)))


def test_norms_of_queries():
    """Two heads (3, 4) and (0.3, 0.4): one by one, and as one vector."""
    one_by_one, whole = [0.848528, 1.131371, 0.848528, 1.131371], [1.194045, 1.592060, 0.119404, 0.159206]
    for kind, code, right, wrong in (("head", "SL462", one_by_one, whole), ("projection", "SL463", whole, one_by_one)):
        config = replace(LLAMA, qk_norm=kind, n_heads=2, n_kv_heads=2, d_head=2, norm_eps=1e-12)
        arrays = dict(mistaken.wide(config))
        for name in arrays:
            if "q_norm" in name:
                arrays[name] = np.ones_like(arrays[name])
        for codes, expected in (((), right), ((code,), wrong), (("SL461",), [3, 4, 0.3, 0.4])):
            attention = planted(config, *codes, arrays=arrays).decoder().model.layers[0].self_attn
            found = attention.normed(attention.q_norm, np.array([[[[3, 4], [0.3, 0.4]]]]))
            np.testing.assert_allclose(found.ravel(), expected, rtol=1e-5)


def test_norms_after_rotation():
    """A rotation keeps lengths, so that only the weight's place tells."""
    config = replace(LLAMA, qk_norm="head")
    ones = {name: np.ones_like(a) if "_norm." in name else a for name, a in mistaken.wide(config).items()}
    right, same = (taps_of(planted(config, *codes, arrays=ones)) for codes in ((), ("SL464",)))
    np.testing.assert_allclose(same["logits"], right["logits"], atol=1e-6)
    late = taps_of(planted(config, "SL464"))
    np.testing.assert_array_equal(late["layers.0.self_attn.q_normed"], late["layers.0.self_attn.q"])
    assert np.abs(late["logits"] - taps_of(planted(config))["logits"]).max() > 0.01


def frequencies_of(config, code=None):
    """Radians a position by which layer 0 rotates, and the factor of its cosines and sines."""
    probe = make_probe(config.vocab_size, None, np.zeros((1, 2), int))
    ones = np.ones((1, 2, 1, config.d_head))
    variant = planted(config, *([code] if code else []), probe=probe)
    first, second = np.split(variant._ops[0].rotate(ones, *variant.batch.rotary)[0, 1, 0, : config.rotated], 2)
    return np.arctan2(second, first) - np.pi / 4, np.hypot(first, second) / np.sqrt(2)


def check_frequencies(config, code, expected, factor=1.0):
    found, factors = frequencies_of(config, code)
    np.testing.assert_allclose(found, expected, rtol=2e-6, err_msg=str(code))
    np.testing.assert_allclose(factors, factor, rtol=2e-6, err_msg=str(code))


def test_llama3_frequencies():
    """Keep, blend, divide, divide."""
    scaling = RopeScaling(
        kind="llama3", factor=8.0, original_length=64, low_frequency_factor=1.0, high_frequency_factor=4.0
    )
    config = replace(LLAMA, rope_theta=10000.0, rope_scaling=scaling)
    plain = [1, 0.1, 0.01, 0.001]
    check_frequencies(config, None, [1.0, 0.01304226, 0.00125, 0.000125])
    check_frequencies(config, "SL341", plain)
    check_frequencies(config, "SL344", np.array(plain) / 8)
    kept = (20 * np.pi - 64) / (16 - 64)  # of the wave 20 pi between 64 and 16
    check_frequencies(config, "SL346", [1.0, 0.1 * (kept + (1 - kept) / 8), 0.00125, 0.000125])
    assert find("SL319").applies(LLAMA)
    assert not find("SL319").applies(config)


def test_yarn_frequencies():
    scaling = RopeScaling(
        kind="yarn", factor=4.0, original_length=64, beta_fast=32.0, beta_slow=1.0, truncate=True,
        attention_factor=1.13862944,
    )  # fmt: skip
    config = replace(LLAMA, d_head=16, rope_theta=10000.0, rope_scaling=scaling)
    expected = np.array([1, 0.23717083, 0.05, 0.00790569, 0.0025, 7.90569e-4, 2.5e-4, 7.90569e-5])
    check_frequencies(config, None, expected, 1.13862944)
    check_frequencies(config, "SL342", expected)
    untruncated = expected.copy()
    untruncated[1:3] = 0.19858352, 0.02559525
    check_frequencies(config, "SL345", untruncated, 1.13862944)
    assert not find("SL343").applies(config)
    given = replace(config, rope_scaling=replace(scaling, attention_factor=1.0))
    check_frequencies(given, "SL343", expected, 1.13862944)


def test_parts_of_heads():
    """Of four elements the first two turn; at position 1 by one radian."""
    config = replace(LLAMA, n_heads=1, n_kv_heads=1, d_head=4, rotary_width=2, rope_theta=10000.0)
    probe = make_probe(41, None, np.zeros((1, 2), int))
    tables = Variant(config, mistaken.wide(config), probe).batch.rotary
    x = np.broadcast_to(np.array([1.0, 0.0, 1.0, 0.0]), (1, 2, 1, 4))
    cos, sin = np.cos(1), np.sin(1)
    for code, wrong in (("SL325", [1, 0, cos, sin]), ("SL324", [cos - sin, 0, cos + sin, 0])):
        operations = [lambda x, f=f: f(x, *tables)[0, 1] for f in op(code, config, "rotate", probe=probe)]
        assert_values(operations, [x], [cos, sin, 1, 0], wrong, 1e-6)
    assert not find("SL326").applies(config), "one frequency is 1 for any width"
    assert not find("SL301").applies(config), "one pair is neighbours and halves"


def test_alibi():
    """Scores of the second token for the first: a head's slope, times minus 1."""
    config = replace(FEATURES["bloom"], n_heads=6, n_kv_heads=6)
    slopes = np.array([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    table = np.broadcast_to(-slopes[None, :, None, None], (1, 6, 1, 1))
    added = [np.zeros((1, 6, 1, 1)), table]
    for code, wrong in {
        "SL351": 0 * slopes,
        "SL352": -slopes[::-1],
        "SL353": -slopes * np.array([4, 4, 4, 4, 2, 2]),
        "SL354": -(2.0 ** (-8 * np.arange(1, 7) / 6)),
        "SL355": slopes,
        "SL357": -slopes / np.sqrt(6),
    }.items():
        assert_values(op(code, config, "add"), added, -slopes, wrong, 1e-6)
    falcon = FEATURES["falcon"]
    assert_values(op("SL356", falcon, "add"), [added[0][:, :4], table[:, :4]], -slopes[:4], -slopes[:4] * np.sqrt(8))
    assert not find("SL354").applies(falcon)


def test_embedding_scale():
    config = replace(FEATURES["granite"], embedding_scale=48**0.5)
    one = np.ones((1, 1, 1))
    for code, wrong in (("SL606", 1.0), ("SL607", 6.9375), ("SL608", 48**-0.5)):
        assert_values(op(code, config, "scale_rounded", place="stack"), [one, 48**0.5], [48**0.5], [wrong], 1e-12)
    assert find("SL607").applies(config)
    for exact in (8.0, 48.0):
        assert not find("SL607").applies(replace(config, embedding_scale=exact))


@pytest.mark.parametrize(
    ("code", "sides"), [(None, (1, 1)), ("SL725", (0, 0)), ("SL726", (0, 1)), ("SL727", (1, 0)), ("SL728", (0, 0))]
)
def test_residual_multiplier(code, sides):
    """What each side adds, times 0.7 where the multiplier is not missing; SL728 multiplies the sum."""
    config = FEATURES["granite"]
    taps = taps_of(planted(config, *([code] if code else [])))
    factors, whole = [0.7 if side else 1.0 for side in sides], 0.7 if code == "SL728" else 1.0
    x, mid = taps["embedded"], taps["layers.0.residual_mid"]
    np.testing.assert_allclose(mid, whole * (x + factors[0] * taps["layers.0.self_attn.output"]))
    out = whole * (mid + factors[1] * taps["layers.0.mlp.output"])
    np.testing.assert_allclose(taps["layers.0.residual_out"], out)


def test_parallel_blocks():
    config = FEATURES["phi"]
    for code in (None, "SL721", "SL722", "SL724"):
        variant = planted(config, *([code] if code else []))
        taps, block = taps_of(variant), variant.decoder().model.layers[0]
        x, attended, fed = taps["embedded"], taps["layers.0.self_attn.output"], taps["layers.0.mlp.output"]
        total = attended + fed if code == "SL724" else x + attended + fed
        np.testing.assert_allclose(taps["layers.0.residual_out"], total, atol=1e-12)
        norm = block.input_layernorm if code == "SL722" else block.post_attention_layernorm
        read = norm(x + attended if code == "SL721" else x)
        up = read @ block.mlp.up_proj.weight.T + block.mlp.up_proj.bias
        np.testing.assert_allclose(taps["layers.0.mlp.up"], up, atol=1e-12)


def test_fused_groups():
    """Two key heads of width 1, each with two queries; and CodeGen's four parts of one head each."""
    grouped = ([0, 1, 4, 5], [2, 6], [3, 7])
    flat = ([0, 1, 2, 3], [4, 5], [6, 7])
    quarters = ([0, 3, 6, 9], [2, 5, 8, 11], [1, 4, 7, 10])
    three = ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11])
    for kv, code, right, wrong in (
        (2, "SL523", flat, grouped), (2, "SL524", grouped, flat), (4, "SL525", quarters, three)
    ):  # fmt: skip
        config = replace(GPT, d_model=2, n_heads=4, n_kv_heads=kv, d_head=1, attention_bias=False)
        names = [f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qkv"]
        arrays = dict(mistaken.wide(config))
        for name, rows in zip(names, right, strict=True):
            arrays[name] = np.repeat(np.array(rows, float)[:, None], 2, axis=1)
        variant = planted(config, code, arrays=arrays)
        assert [variant.parameters[name][:, 1].tolist() for name in names] == [*map(list, wrong)]


def test_blocks_and_attention_change_together():
    """What rewires a block leaves what another mistake put into it."""
    config = FEATURES["gemma 3"]
    taps = taps_of(planted(config, "SL461", "SL711"))
    np.testing.assert_array_equal(taps["layers.0.self_attn.q_normed"], taps["layers.0.self_attn.q"])
    np.testing.assert_array_equal(taps["layers.0.residual_mid"], taps["layers.0.post_attention_layernorm"])


FOUR = {"pre": replace(LLAMA, n_layers=4), "post": replace(POST, n_layers=4)}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("pre", "SL221"), ("post", "SL222"), ("post", "SL714"), ("gemma 2", "SL433"), ("gemma 3", "SL228"),
        ("gemma 3", "SL329"), ("cohere", "SL327"), ("cohere", "SL721"), ("olmo 2", "SL463"), ("falcon", "SL356"),
        ("granite", "SL728"), ("opt", "SL614"), ("yarn", "SL342"), ("mixtral", "SL151"),
    ],
)  # fmt: skip
def test_it_is_named(name, code):
    config = (FEATURES | FOUR)[name]
    found = mistaken.check(config, mistaken.Port(config, code)).candidate.causes[0]
    assert found.explains
    assert code in (found.code, *found.same_as)
