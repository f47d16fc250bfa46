"""The bound: honest runs are inside, small wrongs outside, and the noise of products is that of real ones."""

from dataclasses import replace

import ladder
import mistaken
import numpy as np
import pytest
from ladder import get_backend
from mistaken import GPT, LLAMA, POST, judge_of, probe_of

from samelogits.checking.catalogue import find
from samelogits.checking.noise import PRECISIONS, disturb
from samelogits.checking.rounding import ROUND, round_bfloat16, round_float16, round_tf32
from samelogits.checking.scores import ELEMENT_LIMIT, ROW_LIMIT, ROW_SIZE, WHOLE_LIMIT, Score, Spread
from samelogits.checking.variant import Variant
from samelogits.rotary import RopeScaling, rotary_frequencies, rotary_powers

ODD = replace(
    LLAMA, n_heads=6, n_kv_heads=3, d_head=10, d_model=26, d_ff=70, activation="gelu_tanh", attention_bias=False,
    norm="layer_norm", rope_theta=10000.0, tie_embeddings=True,
)  # fmt: skip
NARROW = replace(POST, d_model=18, norm="rms_norm", activation="gelu", gated=True, final_norm=True, n_layers=3)
HONEST = {"gpt": GPT, "llama": LLAMA, "post": POST, "odd": ODD, "narrow": NARROW}


def scores_of(config, taps, precision="float32", probe=None, seed=3):
    """Scores of all taps, cumulative and local."""
    probe = probe or probe_of(config)
    judge = mistaken.Judge(config, mistaken.wide(config, seed), probe, taps, precision)
    return [judge.scores(judge.spreads(local=local)) for local in (False, True)]


def worst(scores):
    return max((score.share, name) for name, score in scores.items())


# Honest runs


RUNS = [("numpy", "float32"), *((name, dtype) for name in ("torch", "jax") for dtype in ("float32", "bfloat16"))]


@pytest.mark.slow(when=lambda given: given["backend"] == "jax" and given["name"] not in list(HONEST)[:3])
@pytest.mark.parametrize(
    ("backend", "precision"),
    [pytest.param(*run, marks=ladder.needs(run[0]), id="-".join(run)) for run in RUNS],
)
@pytest.mark.parametrize("name", HONEST)
def test_honest_runs_are_inside(name, backend, precision):
    found = get_backend(backend)
    config, seed = HONEST[name], 11 + list(HONEST).index(name)
    probe = probe_of(config, 24)
    arrays = {key: array.astype(np.float32) for key, array in mistaken.wide(config, seed).items()}
    taps = found.load(config, arrays, precision, "cpu").activations(probe.tokens_BT, probe.mask_BT)
    for scores in scores_of(config, taps, precision, probe, seed):
        assert set(scores) == set(taps)
        assert worst(scores)[0] < 1
        # Nor is the bound so wide that all of it is empty: some tap uses a twentieth of it.
        assert worst(scores)[0] > 0.05


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", HONEST)
def test_the_reference_rounded_everywhere_is_inside(name, precision):
    config = HONEST[name]
    taps = mistaken.run(config, probe_of(config), precision=precision)[1]
    for scores in scores_of(config, taps, precision):
        assert worst(scores)[0] < 1


def test_another_seed_s_noise_is_inside():
    """Of the bound's own noise nothing is outside, cumulative and local."""
    taps = {}
    variant = Variant(LLAMA, mistaken.wide(LLAMA), probe_of(LLAMA))
    disturb(variant, PRECISIONS["float32"], seed=99)
    variant.run(lambda name, value: taps.setdefault(name, value))
    for scores in scores_of(LLAMA, taps):
        whole = [score.whole for name, score in scores.items() if not name.endswith("weights")]
        assert worst(scores)[0] < 1
        assert 0.6 < np.median(whole) < 1.4  # this is what the unit means


def test_noise_is_repeatable_and_leaves_places():
    runs = []
    for seed in (5, 5, 6):
        variant = Variant(GPT, mistaken.wide(GPT), probe_of(GPT), [1])
        disturb(variant, PRECISIONS["float32"], seed)
        assert variant.places == [1]
        runs.append(variant.run())
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


# Small wrongs


def small_inputs(config):
    """Embeddings scaled by 0.01: the first norm reads a mean square near eps."""
    arrays = dict(mistaken.wide(config))
    for name in arrays:
        if "embed" in name:
            arrays[name] = (arrays[name] * 0.01).astype(np.float32).astype(np.float64)
    return arrays


WRONGS = {
    "eps a tenth": (LLAMA, "SL201", small_inputs),
    "eps outside the root": (LLAMA, "SL204", small_inputs),
    "eps a tenth in LayerNorm": (GPT, "SL201", small_inputs),
    "unbiased variance": (GPT, "SL205", mistaken.wide),
    "tanh for erf": (GPT, "SL101", mistaken.wide),
    "erf for tanh": (POST, "SL102", mistaken.wide),
    "softmax in bfloat16": (LLAMA, "SL431", mistaken.wide),
    "TF32 products": (LLAMA, "SL801", mistaken.wide),
    "rotary tables in bfloat16": (LLAMA, "SL311", mistaken.wide),
    "norms in bfloat16": (GPT, "SL214", mistaken.wide),
    "weights in bfloat16": (GPT, "SL811", mistaken.wide),
    "a quick GELU": (GPT, "SL107", mistaken.wide),
}


@pytest.mark.parametrize("name", WRONGS)
def test_small_wrongs_are_outside_in_float32(name):
    config, code, make = WRONGS[name]
    arrays, probe = make(config), probe_of(config)
    for plant, outside in ((find(code).plant, True), (None, False)):
        taps = mistaken.run(config, probe, plant, precision="float32", arrays=arrays)[1]
        judge = mistaken.Judge(config, arrays, probe, taps, "float32")
        shares = [worst(judge.scores(judge.spreads(local=local)))[0] for local in (False, True)]
        if outside:
            assert shares[1] > 2
            assert shares[0] > 2
        else:
            assert max(shares) < 1


def test_one_percent_in_one_layer_is_outside_in_bfloat16_where_it_is_added():
    def plant(variant):
        variant.exchange("attention_mix", lambda right: lambda *given: right(*given) * 1.03)

    taps = mistaken.run(GPT, probe_of(GPT), plant, [1], "bfloat16")[1]
    local = scores_of(GPT, taps, "bfloat16")[1]
    assert worst(local)[1] == "layers.1.self_attn.mixed"
    assert [name for name, score in local.items() if score.share > 1] == ["layers.1.self_attn.mixed"]


# Products


def orders(x, y):
    """float32 dot products along the last axis: by NumPy, one by one, backwards, pairwise, in 8 lanes."""
    x, y = x.astype(np.float32), y.astype(np.float32)
    terms = x * y

    def running(terms):
        total = np.zeros(terms.shape[:-1], np.float32)
        for i in range(terms.shape[-1]):
            total = total + terms[..., i]
        return total

    lanes = terms.reshape(*terms.shape[:-1], -1, 8)
    yield "numpy", np.stack([a @ b for a, b in zip(x, y, strict=True)])
    yield "one by one", running(terms)
    yield "backwards", running(terms[..., ::-1])
    yield "lanes", running(np.stack([running(lanes[..., i]) for i in range(8)], -1))


def predicted(x, y, precision="float32"):
    """Root mean square of what the noise formula does to the products of rows x and y."""
    config = replace(GPT, n_layers=1)
    variant = Variant(config, mistaken.wide(config), probe_of(config))
    disturb(variant, PRECISIONS[precision], 0)
    exact = (x * y).sum(-1)
    runs = []
    for _ in range(8):
        linear = variant._ops[0].linear
        made = np.stack([linear(a[None, None], b[None], None)[0, 0, 0] for a, b in zip(x, y, strict=True)])
        runs.append(made - exact)
    return np.sqrt(np.mean(np.square(runs)))


@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize("kind", ["random", "coherent"])
def test_the_noise_of_a_product_is_that_of_real_ones(kind, length):
    rng = np.random.default_rng(length)
    x, y = rng.standard_normal((2, 300, length))
    if kind == "coherent":
        x, y = np.abs(x), np.abs(y)
    x, y = (ROUND["float32"](each) for each in (x, y))
    expected = predicted(x, y)
    found = {name: np.sqrt(np.mean(np.square(made - (x * y).sum(-1)))) for name, made in orders(x, y)}
    # In order is what the formula describes; lanes and NumPy's own kernels add fewer roundings, never more.
    for name in ("one by one", "backwards"):
        assert 0.2 < found[name] / expected < 1.2, (name, found, expected)
    for name, error in found.items():
        assert error / expected < 1.2, name
        assert error / expected > 0.02, name


def test_tf32_factors_are_in_the_formula():
    rng = np.random.default_rng(1)
    x, y = (ROUND["float32"](each) for each in rng.standard_normal((2, 300, 64)))
    found = np.sqrt(np.mean(np.square((round_tf32(x) * round_tf32(y)).sum(-1) - (x * y).sum(-1))))
    assert 0.2 < found / predicted(x, y, "tf32") < 1.2
    assert found > 100 * predicted(x, y)


def test_a_bfloat16_product_is_rounded_once():
    rng = np.random.default_rng(2)
    x, y = (round_bfloat16(each) for each in rng.standard_normal((2, 300, 64)))
    exact = (x * y).sum(-1)
    found = np.sqrt(np.mean(np.square(round_bfloat16(exact) - exact)))
    assert 0.2 < found / predicted(x, y, "bfloat16") < 1.2


def test_scores_that_a_compiler_leaves_unrounded_are_inside(monkeypatch):
    """It gives rounded ones and reads others. Without noise of what the softmax reads this is 1.5 times the limit."""
    monkeypatch.setattr(mistaken, "UNROUNDED", (*mistaken.UNROUNDED, "attention_scores"))
    config = replace(LLAMA, attention_scale=2.0)
    taps = mistaken.run(config, probe_of(config, 24), precision="bfloat16")[1]
    taps = {name: round_bfloat16(array) for name, array in taps.items()}
    assert np.abs(taps["layers.0.self_attn.scores"]).max() > 50
    for scores in scores_of(config, taps, "bfloat16", probe_of(config, 24)):
        assert worst(scores)[0] < 1


def test_blended_frequencies_written_otherwise_are_inside(monkeypatch):
    """Llama 3's scaling of a short original length blends the fastest frequency too, and there a rounding grows. With
    the one rounding of plain frequencies this is outside."""
    scaling = RopeScaling(
        kind="llama3", factor=8.0, original_length=20, low_frequency_factor=1.0, high_frequency_factor=4.0
    )
    config, probe = replace(LLAMA, rope_scaling=scaling), probe_of(LLAMA, 36)

    def otherwise(width, theta, scaling, length):
        plain = np.float32(1) / rotary_powers(width, theta)
        turns = np.float32(20 / np.pi / 2) * plain
        kept = np.clip(turns * np.float32(1 / 3) - np.float32(1 / 3), 0, 1)
        return kept * plain + (plain - kept * plain) * np.float32(1 / 8)

    with monkeypatch.context() as patch:
        patch.setattr("samelogits.positions.rotary_frequencies", otherwise)
        taps = mistaken.run(config, probe)[1]
    for scores in scores_of(config, taps, probe=probe):
        assert 0.05 < worst(scores)[0] < 1


def test_a_frequency_that_float32_has_not_got_has_noise_of_a_number():
    scaling = RopeScaling(kind="linear", factor=1e37)
    variant = Variant(replace(LLAMA, rope_theta=1e12, rope_scaling=scaling), mistaken.wide(LLAMA), probe_of(LLAMA))
    assert not rotary_frequencies(variant.config.rotated, 1e12, scaling)[-1]
    disturb(variant, PRECISIONS["float32"], seed=1)
    assert np.isfinite(variant.run()).all()


@pytest.mark.parametrize("n_tokens", [2**14, 2**18])
def test_a_sum_of_equal_terms_in_16_lanes_is_inside(n_tokens):
    """Rounded alike, they add up to more than independent roundings would, which four units cover."""
    logits = np.full((1, 1, n_tokens), -2.3)
    logits[..., 0] = 0
    terms = np.exp(logits).astype(np.float32).reshape(-1, 16)
    total = np.cumsum(terms, axis=0, dtype=np.float32)[-1].sum()
    variant = Variant(GPT, mistaken.wide(GPT), probe_of(GPT))
    disturb(variant, PRECISIONS["float32"], 0)
    arguments = logits, np.zeros((1, 1), int), np.ones((1, 1), bool)
    expected = np.log(np.exp(logits).sum())
    noise = np.sqrt(np.mean([(variant._ops["head"].cross_entropy(*arguments) - expected) ** 2 for _ in range(64)]))
    assert 4 * 2.0**-24 * expected < abs(np.log(total) - expected) < ROW_LIMIT * noise


# Scores


def spread_of(shape=(2, 5, 20), real=None, unit=1e-3, by_row=True, runs=8, seed=0):
    rng = np.random.default_rng(seed)
    reference = rng.standard_normal(shape)
    spread = Spread(reference, np.ones(shape, bool) if real is None else real, PRECISIONS["float32"], by_row)
    for _ in range(runs):
        spread.add(reference + unit * rng.standard_normal(shape))
    return spread


def test_scores_are_in_units_of_the_noise():
    spread = spread_of()
    assert spread.judge(spread.reference).share == 0
    for factor in (0.5, 3.0):
        signs = np.random.default_rng(1).choice([-1, 1], spread.reference.shape)
        score = spread.judge(spread.reference + factor * 1e-3 * signs)
        assert score.whole == pytest.approx(factor, rel=0.1)
        assert score.row == pytest.approx(factor, rel=0.35)
        assert score.error == pytest.approx(factor * 1e-3)
        assert (score.share > 1) == (factor == 3.0)
        assert spread.distance(spread.reference + factor * 1e-3 * signs, spread.reference) == pytest.approx(score.whole)


def test_one_row_alone_is_judged():
    spread = spread_of((2, 40, 20))
    found = spread.reference.copy()
    found[1, 7] += 6e-3
    score = spread.judge(found)
    assert score.row_place == (1, 7)
    assert score.row > ROW_LIMIT
    assert score.whole < WHOLE_LIMIT
    assert score.share > 1
    weights = spread_of((2, 40, 20), by_row=False).judge(found)
    assert weights.row == 0
    assert weights.share < 1


def test_one_logit_alone_is_judged():
    """In units of what its row and column make: a quiet column hides nothing, a loud one is allowed its noise."""
    rng = np.random.default_rng(4)
    loudness = np.where(np.arange(5000) == 7, 20.0, 1.0)
    reference = rng.standard_normal((2, 4, 5000))
    spread = Spread(reference, np.ones(reference.shape, bool), PRECISIONS["float32"], by_element=True)
    for _ in range(8):
        spread.add(reference + 1e-3 * loudness * rng.standard_normal(reference.shape))
    honest = spread.judge(reference + 1e-3 * loudness * rng.standard_normal(reference.shape))
    assert 3 < honest.element < 0.5 * ELEMENT_LIMIT
    for column, factor, off in ((8, 15, True), (7, 100, False), (7, 300, True)):
        found = reference.copy()
        found[1, 2, column] += factor * 1e-3
        score = spread.judge(found)
        assert (score.share > 1) == off
        assert score.whole < WHOLE_LIMIT
        assert not off or score.element > ELEMENT_LIMIT


def test_a_logit_is_allowed_what_the_runs_show_there():
    """One place is loud, in a row and a column that are not: 100 times their noise is honest there alone."""
    rng = np.random.default_rng(6)
    loudness = np.ones((2, 100, 5000))
    loudness[1, 2, 30] = 60.0
    reference = rng.standard_normal(loudness.shape)
    spread = Spread(reference, np.ones(reference.shape, bool), PRECISIONS["float32"], by_element=True)
    for _ in range(8):
        spread.add(reference + 1e-3 * loudness * rng.standard_normal(reference.shape))
    for column, off in ((30, False), (31, True)):
        found = reference.copy()
        found[1, 2, column] += 100e-3
        assert (spread.judge(found).share > 1) == off


def test_float16_has_a_smallest_number():
    """Next to 0 its roundings are no longer relative."""
    reference = np.full((1, 1, 32), 1e-7)
    spread = Spread(reference, np.ones_like(reference, bool), PRECISIONS["float16"])
    spread.add(reference)
    assert spread.judge(round_float16(reference)).share < 1
    assert spread.judge(reference + 2.0**-22).share > 1


@pytest.mark.parametrize("width", [ROW_SIZE - 1, ROW_SIZE])
def test_short_rows_are_not_judged_alone(width):
    spread = spread_of((2, 40, width))
    found = spread.reference.copy()
    found[1, 7] += 5.5e-3
    assert (spread.judge(found).share > 1) == (width == ROW_SIZE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_infinitely_wrong(value):
    spread = spread_of()
    found = spread.reference.copy()
    found[1, 3, 4] = value
    score = spread.judge(found)
    assert score.share == score.whole == score.row == np.inf
    assert score.row_place == (1, 3)
    assert spread.distance(found, spread.reference) == np.inf


def test_padding_is_ignored():
    real = np.ones((2, 5, 1), bool)
    real[1, :2] = False
    spread = spread_of(real=real)
    found = spread.reference.copy()
    found[1, 0], found[1, 1, 3] = np.nan, 1e30
    assert spread.judge(found).share == 0
    assert spread.distance(found, spread.reference) == 0
    plain, other = spread_of(real=real), spread_of(real=real)
    other.add(np.where(real, plain.reference, 1e9))
    plain.add(plain.reference)
    np.testing.assert_array_equal(plain.noise[real[..., 0]], other.noise[real[..., 0]])
    found[1, 2, 0] = np.nan
    assert spread.judge(found).share == np.inf


def test_nothing_real_is_no_error():
    spread = spread_of((1, 1, 20), real=np.zeros((1, 1, 1), bool))
    assert spread.judge(spread.reference + 1).share == 0


def test_the_noise_is_at_least_that_of_storing():
    reference = np.full((1, 1, 32), 1.0)
    spread = Spread(reference, np.ones_like(reference, bool), PRECISIONS["bfloat16"])
    spread.add(reference)
    assert spread.judge(reference + 2.0**-8).whole == pytest.approx(3**0.5)
    nothing = Spread(reference * 0, np.ones_like(reference, bool), PRECISIONS["float32"])
    nothing.add(reference * 0)
    assert nothing.judge(reference * 0).share == 0
    assert nothing.judge(reference * 1e-30).share == np.inf


def test_widened_adds_another_noise():
    spread = spread_of()
    other = spread.reference + 5e-3
    wide = spread.widened(other)
    assert spread.judge(other).share > 1
    assert wide.judge(other).whole == pytest.approx(1, abs=0.1)
    np.testing.assert_allclose(wide.noise, spread.noise + 25e-6, rtol=1e-9)
    assert wide.reference is spread.reference
    assert spread.judge(other).whole == spread_of().judge(other).whole  # the first is left as it was


def test_few_effective_rows_give_a_wider_limit():
    one, many = Score(3.0, 0.0, 1.0, 1.0, (0,), rows=1.0), Score(3.0, 0.0, 1.0, 1.0, (0,), rows=1e6)
    assert one.share == pytest.approx(3 / ROW_LIMIT)
    assert many.share == pytest.approx(3 / WHOLE_LIMIT, rel=1e-2)


def test_what_is_real():
    """Padding is not, nor what a query can't see."""
    probe = probe_of(GPT, 10)
    judge = judge_of(GPT, {"logits": np.zeros((2, 10, 41))}, probe=probe)
    weights = judge.real("layers.0.self_attn.weights", np.zeros((2, 4, 10, 10)))
    pads = int((~probe.mask_BT[1]).sum())
    assert pads == 2
    for row, padded in ((0, 0), (1, pads)):
        expected = np.tril(np.ones((10, 10), bool))
        expected[:padded] = expected[:, :padded] = False
        for head in range(4):
            np.testing.assert_array_equal(weights[row, head], expected)
    real = judge.real("layers.0.self_attn.q", np.zeros((2, 10, 4, 6)))
    assert real[1, pads:].all()
    assert not real[1, :pads].any()
    assert real[0].all()
