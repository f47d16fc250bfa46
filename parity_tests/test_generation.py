"""Generation: the same tokens in every framework, by the written-out rules."""

import ladder
import numpy as np
import pytest
from ladder import GENERATION, LLAMA, UNKIND

from samelogits.errors import InputError
from samelogits.sampling import SamplingSettings, choose


@pytest.mark.slow(when=lambda given: given["place"].backend == "jax" and not given["use_cache"])
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("settings", GENERATION)
def test_same_tokens(place, config, settings, use_cache):
    ladder.check_generation(place, config, settings, use_cache)


def test_the_settings_matter():
    """Each row of the table gives other tokens than greedy: no setting is ignored unnoticed."""
    model = ladder.load(LLAMA, ladder.cpu("numpy"))
    texts = [model.generate(ladder.tokens(LLAMA, (5, 4)), 6, **settings).tobytes() for settings in GENERATION.values()]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.7}, {"temperature": 1, "top_k": 3}, {"temperature": 1, "top_p": 0.6},
     {"temperature": 2, "top_p": 1.0}, {"repetition_penalty": 3.0}, {"temperature": 1, "repetition_penalty": 0.5},
     {"temperature": 1.3, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.2}],
    ids=str,
)  # fmt: skip
def test_sampling(settings):
    ladder.check_sampling(**settings)


def test_ties_go_to_the_lowest_id():
    """N03."""
    ladder.check_choice([0, 1, 1, 1], 1)


@pytest.mark.parametrize("place", ladder.place_params(["torch", "jax"]))
def test_ties_of_bfloat16(place):
    """N03: 10.01, 10.02 and 10.03 are one number in bfloat16, so the first of them is chosen."""
    head = np.array([[10.01], [10.02], [10.03]])
    for dtype, expected in (("bfloat16", 0), ("float32", 2)):
        logits = ladder.apply(place, "linear", np.ones((1, 1, 1)), head, None, dtype=dtype)
        ladder.check_choice(logits[0, 0], expected)


def test_penalty_makes_seen_tokens_less_likely():
    """N04: (2, -2, 0), seen 0, 1, 1, penalty 2 become (1, -4, 0); once for each distinct token."""
    ladder.check_choice([2, -2, 1.5], 2, seen=[0, 1, 1], repetition_penalty=2.0)
    ladder.check_choice([-5, -2, -3.9], 2, seen=[1, 1], repetition_penalty=2.0)  # dividing: -1 wins
    ladder.check_choice([-5, -2, -4.1], 1, seen=[1, 1], repetition_penalty=2.0)  # twice: -8 loses


def test_top_p_keeps_the_crossing_token():
    """Probabilities 0.5, 0.3, 0.2: top_p 0.6 keeps two, 0.4 keeps one."""
    logits = np.log([[0.5, 0.3, 0.2]])
    for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2})):
        settings = SamplingSettings(temperature=1.0, top_p=top_p)
        assert {int(choose(logits, [np.array([], int)], settings, step)[0]) for step in range(100)} == kept


def test_draws_follow_the_probabilities():
    """2000 draws of probabilities 0.5, 0.3, 0.2: five standard deviations are 5 sqrt(0.25 / 2000) = 0.056."""
    settings = SamplingSettings(temperature=1.0)
    logits = np.log([[0.5, 0.3, 0.2]])
    drawn = [choose(logits, [np.array([], int)], settings, step)[0] for step in range(2000)]
    assert np.bincount(drawn) / 2000 == pytest.approx([0.5, 0.3, 0.2], abs=0.056)


def test_rows_end_alone_and_are_padded(place):
    model = ladder.load(UNKIND, place)
    prompt = ladder.tokens(UNKIND, (5, 4))
    free = model.generate(prompt, 6)
    end = int(free[0, 5])  # row 0's second new token, for one
    found = model.generate(prompt, 6, eos_token_id=end)
    for before, after in zip(free[:, 4:].tolist(), found[:, 4:].tolist(), strict=True):
        kept = before.index(end) + 1 if end in before else len(before)
        assert after == (before[:kept] + [end] * 6)[: len(after)]
    assert model.generate(prompt[:1], 6, eos_token_id=[end], pad_token_id=2).tolist() == free[:1, :6].tolist()


def test_a_row_does_not_depend_on_its_batch(place, config):
    model, prompt = ladder.load(config, place), ladder.tokens(config, (5, 4))
    together = model.generate(prompt, 6)
    for b in (0, 3):
        assert model.generate(prompt[b : b + 1], 6).tolist() == together[b : b + 1].tolist()
    sampled = model.generate(prompt, 6, temperature=1.0)  # the draw is that of the row's index: row 0 stays row 0
    assert model.generate(prompt[:1], 6, temperature=1.0).tolist() == sampled[:1].tolist()
    padded = np.concatenate([np.full((5, 3), 2), prompt[:, :1]], axis=1)
    mask = np.array([[0, 0, 0, 1]] * 5)
    assert (
        model.generate(padded, 6, attention_mask=mask)[:, 4:].tolist()
        == model.generate(prompt[:, :1], 6)[:, 1:].tolist()
    )


def test_each_new_column_is_reported(place):
    columns = []
    found = ladder.load(LLAMA, place).generate(ladder.tokens(LLAMA, (5, 4)), 6, on_token=columns.append)
    assert np.array_equal(np.stack(columns, axis=1), found[:, 4:])


def test_small_lengths(place, config):
    """N06: no row, no token, nothing new."""
    model = ladder.load(config, place)
    assert model.logits(np.zeros((5, 0), int)).shape == (5, 0, 13)
    assert model.logits(np.zeros((0, 7), int)).shape == (0, 7, 13)
    prompt = ladder.tokens(config, (5, 4))
    assert np.array_equal(model.generate(prompt, 0), prompt)
    assert model.generate(prompt[:, :1], 9).shape == (5, 10)


BAD = {
    "empty prompt": (np.zeros((1, 0), int), {}, "empty prompt"),
    "negative length": ([[1]], {"max_new_tokens": -1}, "max_new_tokens"),
    "past the table": (np.zeros((1, 7), int), {"max_new_tokens": 6}, "max_seq_len 11"),
    "padding on the right": ([[1, 2]], {"attention_mask": [[1, 0]]}, "left"),
    "temperature": ([[1]], {"temperature": -0.5}, "temperature"),
    "temperature nan": ([[1]], {"temperature": float("nan")}, "temperature"),
    "temperature in words": ([[1]], {"temperature": "1"}, "temperature: expected a number, found '1'"),
    "top_k": ([[1]], {"top_k": 0}, "top_k"),
    "top_k of two": ([[1]], {"top_k": [2]}, r"top_k: expected a whole number, found \[2\]"),
    "length in words": ([[1]], {"max_new_tokens": "2"}, "from 0 to [0-9]+, found '2'"),
    "top_p zero": ([[1]], {"top_p": 0.0}, "top_p"),
    "top_p above one": ([[1]], {"top_p": 1.5}, "top_p"),
    "penalty": ([[1]], {"repetition_penalty": 0.0}, "repetition_penalty"),
    "seed": ([[1]], {"seed": -1}, "seed"),
    "end token": ([[1]], {"eos_token_id": 13}, "eos_token_id"),
    "end tokens of two lengths": ([[1]], {"eos_token_id": [[1], [1, 2]]}, "eos_token_id: expected rows of one length"),
    "pad token": ([[1]], {"pad_token_id": 13}, "pad_token_id"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_requests_are_refused(place, fault):
    prompt, settings, message = BAD[fault]
    with pytest.raises(InputError, match=message):
        ladder.load(UNKIND, place).generate(prompt, **{"max_new_tokens": 2, **settings})


def test_the_last_position_is_used(place):
    """I02: eleven tokens can be read, and a twelfth comes out of them; the thirteenth is an error, above."""
    model = ladder.load(UNKIND, place)
    assert model.generate(np.zeros((5, 7), int), 5).shape == (5, 12)
    assert model.generate(np.zeros((5, 11), int), 1, use_cache=False).shape == (5, 12)


@pytest.mark.parametrize(
    ("row", "found"),
    [([0.0, np.nan], "nan"), ([0.0, np.inf], "inf"), ([np.inf, np.nan], "nan"), ([-np.inf, -np.inf], "-inf")],
)
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}])
def test_rows_without_a_largest_are_an_error(row, found, settings):
    with pytest.raises(InputError, match=f"largest is finite, found {found}$"):
        choose(np.array([[0.0, 1.0], row]), [np.array([0])] * 2, SamplingSettings(**settings), 0)


def test_tokens_that_cannot_come_and_tiny_temperatures():
    for temperature in (0.0, 1.0, 1e-310):
        settings = SamplingSettings(temperature=temperature)
        assert choose(np.array([[-np.inf, 2.0, -np.inf]]), [np.array([0])], settings, 0) == 1
