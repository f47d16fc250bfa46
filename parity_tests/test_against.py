"""Verdicts on candidates: what passes, what fails, what proves nothing, and what a report says of it."""

from functools import partial

import mistaken
import numpy as np
import pytest
from mistaken import GPT, LLAMA, POST, Port, check, probe_of, stage

import samelogits
from samelogits.backend import get_backend
from samelogits.batch import make_batch
from samelogits.checking import against
from samelogits.checking.against import FEWEST, check_candidate, operation_of, shown_precision
from samelogits.checking.candidates import FunctionCandidate, Output, read_recording, record
from samelogits.checking.catalogue import find
from samelogits.checking.measures import compare
from samelogits.checking.probe import make_probe
from samelogits.checking.rounding import round_bfloat16, round_float16
from samelogits.checking.scores import ELEMENT_LIMIT
from samelogits.errors import CandidateError, CheckpointError, SamelogitsError
from samelogits.taps import tap_names


class Silent:
    """A candidate that doesn't say what it computes in."""

    precision, probe, takes_mask = None, None, True

    def __init__(self, port):
        self.port, self.name = port, port.name

    def run(self, probe):
        return self.port.run(probe)

    def source_of(self, tap):
        return "", ""


class Changed(Port):
    """A port whose output is changed at the end."""

    def __init__(self, config, change, codes=(), **options):
        super().__init__(config, *codes, **options)
        self.change = change

    def run(self, probe):
        return self.change(super().run(probe), probe)


def doubts(report):
    return "; ".join(report.doubts)


# Verdicts


@pytest.mark.parametrize("config", [GPT, LLAMA, POST], ids=["gpt", "llama", "post"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_honest_candidates_are_the_same_function(config, precision):
    report = check(config, Port(config, precision=precision, plant=_last_bit if precision == "float64" else None))
    assert report.verdict == "same function", (report.doubts, report.first_divergence)
    assert report.passed
    assert report.first_divergence is report.candidate.interval is report.candidate.card is None
    assert [tap.name for tap in report.candidate.taps] == tap_names(config)
    assert report.candidate.tried > 90
    assert f"{len(tap_names(config))} of {len(tap_names(config))} taps compared" in report.coverage
    assert stage(report, "row alone").verdict == "same"
    assert report.candidate.logits.positions == probe_of(config).mask_BT.sum()


def _last_bit(variant):
    """Another order of additions: honest, and not the same bits."""
    variant.exchange("linear", lambda right: lambda x, w, *rest: right(x[..., ::-1], w[:, ::-1], *rest))


def test_different_is_said_with_its_place():
    report = check(LLAMA, Port(LLAMA, "SL711", places=[1]))
    result = report.candidate
    assert report.verdict == "different function"
    assert not report.passed
    assert result.card.operation == "add"
    assert "def add" in result.card.reference_source
    first = next(tap for tap in result.taps if not tap.inside)
    assert first.name == report.first_divergence == "layers.1.residual_mid"
    assert first.local.share > 1
    assert abs(first.found - first.expected) > 0.01
    assert first.ulps > 1000
    assert all(tap.inside for tap in result.taps[: result.taps.index(first)])
    assert result.logits.smallest_tolerance > 1e-3
    assert result.logits.kl > 0
    assert stage(report, "logits").verdict == stage(report, "taps").verdict == "different"
    assert len(result.logits.flips) <= 20
    found = result.logits.positions - result.logits.top1
    assert len(result.logits.flips) == min(found, 20)


def test_nan_comes_first():
    def spoil(output, probe):
        output.taps["layers.0.mlp.output"][0, 5, 3] = np.nan
        output.taps["layers.1.mlp.up"] *= 2
        return output

    report = check(LLAMA, Changed(LLAMA, spoil))
    assert report.verdict == "different function"
    assert report.first_divergence == "layers.0.mlp.output"
    first = next(tap for tap in report.candidate.taps if not tap.inside)
    assert first.place == (0, 5, 3)
    assert np.isnan(first.found)
    assert first.share == np.inf
    assert not any(cause.explains for cause in report.candidate.causes)
    assert report.to_json()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_differ(value):
    def spoil(output, probe):
        output.logits[0, 3, 1] = value
        return output

    report = check(LLAMA, Changed(LLAMA, spoil, taps=["logits"]), diagnose=False)
    assert report.verdict == "different function"
    assert report.candidate.logits.smallest_tolerance == np.inf
    report = check(LLAMA, Changed(LLAMA, _inf_in_a_tap(value)), diagnose=False)
    assert report.first_divergence == "layers.1.self_attn.scores"


def _inf_in_a_tap(value):
    def spoil(output, probe):
        output.taps["layers.1.self_attn.scores"][0, 0, 4, 2] = value
        return output

    return spoil


def test_padding_may_hold_anything():
    def fill(output, probe):
        hidden = ~make_batch(LLAMA, probe.tokens_BT, probe.mask_BT).visible_BTS | ~probe.mask_BT[:, :, None]
        for name, array in output.taps.items():
            if name.endswith(("scores", "weights")):
                array[np.broadcast_to(hidden[:, None], array.shape)] = np.nan
            else:
                array[~probe.mask_BT] = np.nan
        output.logits = output.taps["logits"]
        return output

    report = check(LLAMA, Changed(LLAMA, fill))
    assert report.verdict == "same function", (report.first_divergence, report.doubts)


# What proves nothing


def test_one_program_on_both_sides_proves_nothing():
    report = check(LLAMA, Port(LLAMA, precision="float64"), diagnose=False)
    assert report.verdict == "not proven"
    assert "one program" in doubts(report)


def test_constant_logits_prove_nothing():
    arrays = {name: np.zeros_like(array) for name, array in mistaken.wide(GPT).items()}

    def zeros(tokens, attention_mask):
        return np.zeros((*tokens.shape, GPT.vocab_size), np.float32)

    report = check(GPT, FunctionCandidate(zeros), arrays=arrays)
    assert report.verdict == "not proven"
    assert "the reference's logits are all equal" in doubts(report)
    report = check(GPT, FunctionCandidate(zeros), diagnose=False)
    assert report.verdict == "different function"
    assert "the candidate's logits are all equal" in doubts(report)


@pytest.mark.parametrize("count", [1, FEWEST - 1, FEWEST])
def test_few_tokens_prove_nothing(count):
    probe = make_probe(GPT.vocab_size, None, np.arange(count)[None])
    report = check(GPT, Port(GPT), probe=probe, diagnose=False)
    assert ("fewer than" in doubts(report)) == (count < FEWEST)
    assert report.verdict == ("not proven" if count < FEWEST else "same function")


def test_one_token_is_diagnosed():
    probe = make_probe(GPT.vocab_size, None, [[7]])
    assert check(GPT, Port(GPT), probe=probe).verdict == "not proven"
    assert check(GPT, Port(GPT, "SL711"), probe=probe).verdict == "different function"


def test_what_was_not_exercised_is_said():
    """Without padding some mistakes can't be seen; each says what would show it."""
    tokens = probe_of(LLAMA).tokens_BT[:1]
    report = check(LLAMA, Port(LLAMA, mask=False), tokens=tokens)
    undecided = {item.code: item for item in report.candidate.undecided}
    for code in ("SL424", "SL315"):
        assert undecided[code].reason == "not exercised by this input"
        assert "padded" in undecided[code].decided_by
    padded = check(LLAMA, Port(LLAMA))
    assert "SL424" not in [item.code for item in padded.candidate.undecided]
    shown = report.candidate.tried - len(undecided)
    assert f"{shown} of {report.candidate.tried} known mistakes would have shown" in report.coverage


def test_logits_alone_in_bfloat16_leave_more_undecided_and_say_what_decides():
    report = check(GPT, Port(GPT, precision="bfloat16", taps=["logits"]))
    undecided = {item.code: item for item in report.candidate.undecided}
    assert "SL201" in undecided
    assert undecided["SL201"].reason.startswith("within rounding in bfloat16 (signal to noise")
    assert "a run in float32" in undecided["SL201"].decided_by
    taps = check(GPT, Port(GPT, precision="bfloat16"))
    assert len(undecided) > len(taps.candidate.undecided)
    assert "SL533" in undecided
    assert undecided["SL533"].reason == "the same function here"


def test_below_the_bound_a_mistake_is_seen_in_bfloat16():
    """Its effect is inside the bound, and lies along the mistake's."""
    for config, code in ((GPT, "SL621"), (POST, "SL621"), (LLAMA, "SL310")):
        report = check(config, Port(config, code, precision="bfloat16"), probe=probe_of(config, 32))
        assert report.first_divergence is None
        assert report.verdict == "not proven"
        assert f"below the bound it looks as if it had {code}" in doubts(report)
    for config in (GPT, POST, LLAMA):
        honest = check(config, Port(config, precision="bfloat16"), probe=probe_of(config, 32))
        assert "below the bound" not in doubts(honest)
    # Too near to the noise of scores that a compiler may leave unrounded: that is said.
    report = check(GPT, Port(GPT, "SL430", precision="bfloat16"), probe=probe_of(GPT, 32))
    assert "SL430" in [item.code for item in report.candidate.undecided]


# Input


def test_a_candidate_without_a_mask_gets_no_padding():
    port = Port(GPT, mask=False)
    report = check_candidate(mistaken.checkpoint_of(GPT), port, diagnose=False)
    assert all(probe.mask_BT.all() for probe in port.seen)
    assert report.verdict == "same function"
    padded = probe_of(GPT)
    with pytest.raises(CandidateError, match="takes no attention_mask, found tokens with padding"):
        check(GPT, Port(GPT, mask=False), tokens=padded.tokens_BT, attention_mask=padded.mask_BT)


def test_a_recording_brings_its_own_input(tmp_path):
    probe = probe_of(LLAMA, 13)
    record(Port(LLAMA), LLAMA, probe, tmp_path / "a.npz")
    candidate = read_recording(tmp_path / "a.npz", LLAMA)
    report = check(LLAMA, candidate)
    assert report.verdict == "same function"
    assert report.tokens_shape == (2, 13)
    assert stage(report, "row alone") is None
    with pytest.raises(CandidateError, match="expected no tokens beside a recording's own"):
        check(LLAMA, candidate, tokens=[[1, 2]])
    record(Port(LLAMA, "SL421"), LLAMA, probe, tmp_path / "b.npz")
    report = check(LLAMA, read_recording(tmp_path / "b.npz", LLAMA))
    assert report.candidate.causes[0].code == "SL421"


def test_a_pass_without_diagnosis_is_earned_too():
    """Rows of one token show nothing of positions, and longer ones would."""
    probe = make_probe(LLAMA.vocab_size, None, np.arange(12)[:, None])
    report = check(LLAMA, Port(LLAMA, "SL306", taps=["logits"]), probe=probe, diagnose=False)
    assert report.verdict == "not proven"
    assert "known mistakes would not have shown: a longer input would show more of them" in doubts(report)
    reasons = {item.code: (item.reason, item.decided_by) for item in report.candidate.undecided}
    assert reasons["SL306"] == ("not exercised by this input", "a longer input")


def test_input_without_a_real_token_is_refused():
    with pytest.raises(SamelogitsError, match="real token"):
        check(GPT, Port(GPT), tokens=[[1, 2, 3]], attention_mask=[[0, 0, 0]])
    with pytest.raises(SamelogitsError, match="attention_mask: expected tokens beside it"):
        check_candidate(mistaken.checkpoint_of(GPT), Port(GPT), None, np.ones((2, 5), int))


def test_float16_that_overflows_is_different():
    arrays = {name: (array * 3e4 if "embed" in name else array) for name, array in mistaken.wide(GPT).items()}

    def overflow(output, probe):
        taps = mistaken.run(GPT, probe, precision="float16", arrays=arrays)[1]
        return Output(taps["logits"], taps)

    report = check(GPT, Changed(GPT, overflow, precision="float16"), arrays=arrays)
    assert report.verdict == "different function"
    assert report.first_divergence == "embed_tokens"
    assert np.isinf(report.candidate.taps[0].found)


def test_a_precision_that_is_not_known_is_refused():
    with pytest.raises(CandidateError, match="precision: expected one of float64, float32"):
        check(GPT, Port(GPT), precision="int8")


@pytest.mark.parametrize(
    ("change", "dtype", "expected"),
    [
        (lambda x: x, np.float32, "float32"),
        (round_bfloat16, np.float32, "bfloat16"),
        (round_float16, np.float32, "float16"),
        (lambda x: x, np.float64, "float64"),
        (lambda x: x.astype(np.float32), np.float64, "float32"),  # as a list gives them, or a cast
        (round_bfloat16, np.float64, "bfloat16"),
    ],
)
def test_the_precision_that_arrays_show(change, dtype, expected):
    x = np.random.default_rng(0).standard_normal((1, 4, 5))
    array = np.asarray(change(x), dtype)
    assert shown_precision(Output(array, {"logits": array})) == expected
    padded = np.concatenate([np.full_like(array[:, :1], np.nan), array], axis=1)
    assert shown_precision(Output(padded, {"logits": padded})) == expected


def test_a_float16_step_is_float16_s():
    found = compare("x", np.array([1 + 2.0**-10]), np.array([1.0]), "float16")
    assert found.ulps == 1


@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (-np.inf, "infinity")])
def test_weights_that_are_not_finite_are_refused(value, word):
    name = "model.layers.1.mlp.down_proj.weight"
    arrays = {key: array.copy() for key, array in mistaken.wide(GPT).items()}
    arrays[name][3, 2] = value
    with pytest.raises(CheckpointError, match=f"memory: {name}: expected finite weights, .* found {word}"):
        check(GPT, Port(GPT), arrays=arrays)
    with pytest.raises(CheckpointError, match=f"{name}: expected finite weights"):
        samelogits.check(mistaken.checkpoint_of(GPT, arrays), backends=["numpy"])


def test_a_float32_function_that_returns_lists_is_honest():
    def forward(tokens, attention_mask):
        probe = make_probe(GPT.vocab_size, None, tokens, attention_mask)
        return mistaken.run(GPT, probe, precision="float32")[0].tolist()

    report = check(GPT, FunctionCandidate(forward), diagnose=False)
    assert report.verdict == "same function", (report.candidate.precision, report.first_divergence)


def test_operations_have_names():
    for config in (GPT, LLAMA, POST):
        for tap in tap_names(config):
            assert operation_of(tap, config) in mistaken.OPERATIONS


def test_logits_of_exact_arithmetic_are_the_same_bits():
    """The verdict of most: and one bit less is the same function again."""
    parameters = mistaken.checkpoint_of(LLAMA).parameters()
    exact = get_backend("numpy").load(LLAMA, parameters, "float32", None, "exact-compact")

    def run(tokens, attention_mask):
        return exact.logits(tokens, attention_mask)

    def off(tokens, attention_mask):
        logits = run(tokens, attention_mask)
        logits[0, 3, 2] = np.nextafter(logits[0, 3, 2], np.float32(9))
        return logits

    for function, verdict in ((run, "same bits"), (off, "same function")):
        report = check_candidate(mistaken.checkpoint_of(LLAMA), FunctionCandidate(function, "exact", "float32"))
        assert report.verdict == verdict, report.doubts


# What a pass must not hide


def test_one_logit_that_is_wrong_in_16_bits_is_different():
    """Its row, and all logits, are within their limits: one of 97 is lost in them, and one of 32,000 the more."""

    def without_one(output, probe):
        output.logits[..., 5] += 4.0
        return Output(output.logits, {})

    report = check(LLAMA, Changed(LLAMA, without_one, precision="bfloat16", taps=["logits"]), diagnose=False)
    assert report.verdict == "different function"
    logits = next(tap for tap in report.candidate.taps if tap.name == "logits")
    assert logits.cumulative.element > ELEMENT_LIMIT


def test_16_bit_logits_alone_do_not_tell_the_precision():
    """A float32 program with a mistake, whose logits are cast, would be judged by the noise of bfloat16."""

    def cast(output, probe):
        return Output(round_bfloat16(output.logits.astype(np.float64)).astype(np.float32), {})

    for told in (None, "bfloat16"):
        candidate = Silent(Changed(LLAMA, cast, precision="float32", taps=["logits"]))
        report = check(LLAMA, candidate, precision=told, diagnose=False)
        said = "its logits are bfloat16, and nothing says that the rest is: say its precision" in report.doubts
        assert said == (told is None)


FEW = {code: find(code) for code in ("SL101", "SL201", "SL203", "SL303")}


def _ends_in_float64(output, probe):
    """Logits of which the last step alone is done in float64, as NumPy does it from the first float64 number on."""
    return Output(output.logits.astype(np.float64) * (1 + 1e-9), {}, notes=["said once"])


@pytest.mark.parametrize(
    ("told", "verdict"), [(None, "not proven"), ("float32", "same function"), ("float64", "different function")]
)
def test_float64_logits_of_a_float32_decoder(told, verdict):
    report = check(LLAMA, Silent(Changed(LLAMA, _ends_in_float64)), precision=told, catalogue=FEW)
    assert report.verdict == verdict
    said = "its logits are float64, and as far off as float32 rounds: say --precision float32 if a part of it is"
    assert (said in report.doubts) == (told is None)


def test_float64_logits_of_a_float32_decoder_with_a_mistake(monkeypatch):
    def judged(*given):
        found = right(*given)
        found[0].candidate.notes.append(found[0].candidate.precision)
        return found

    right = against._judged
    monkeypatch.setattr(against, "_judged", judged)
    report = check(LLAMA, Silent(Changed(LLAMA, _ends_in_float64, codes=("SL201",))), catalogue=FEW)
    assert (report.verdict, report.candidate.precision) == ("different function", "float32")
    assert report.causes[0].code == "SL201"
    assert report.causes[0].explains
    told = "its logits are float64; judged as float32, a known mistake explains them"
    assert report.candidate.notes == ["said once", "float32", told]  # and nothing of the judgement in float64
    assert [stage.stage for stage in report.stages].count("row alone") == 1


def test_a_small_mistake_in_float64_is_not_taken_for_float32_s_rounding():
    def shift(output, probe):
        return Output(output.logits * (1 + 1e-10), {})

    report = check(LLAMA, Silent(Changed(LLAMA, shift, precision="float64")), catalogue=FEW)
    assert (report.verdict, report.candidate.precision) == ("different function", "float64")


def test_a_head_of_another_precision_does_not_hide_that_of_the_taps():
    """bfloat16 throughout, but for logits in float32."""

    def head(output, probe):
        return Output(output.logits + np.float32(1e-4), output.taps)

    report = check(LLAMA, Silent(Changed(LLAMA, head, precision="bfloat16")), diagnose=False)
    assert report.candidate.precision == "bfloat16"
    assert report.verdict == "same function"


def test_bfloat16_that_was_not_said_is_named_with_what_to_say():
    def shift(output, probe):
        return Output(output.logits + np.float32(1e-4), {})

    report = check(LLAMA, Silent(Changed(LLAMA, shift, precision="bfloat16", taps=["logits"])))
    assert report.verdict == "different function"
    assert report.causes[0].code == "SL825"
    assert any("say --precision bfloat16" in note for note in report.candidate.notes)


def test_an_error_along_a_mistake_is_a_doubt():
    """Not the mistake itself, but a relative of it, as other groups of 8-bit integers are of SL813."""
    probe = probe_of(GPT, 32)
    right, wrong = (mistaken.run(GPT, probe, plant)[1]["logits"] for plant in (None, find("SL813").plant))

    def moved(output, probe, factor):
        if probe.tokens_BT.shape != right.shape[:2]:  # rows alone, which are right
            return output
        return Output(output.logits + (factor * (wrong - right)).astype(np.float32), {})

    for factor in (0.05, 0.7, -0.7):
        port = Changed(GPT, partial(moved, factor=factor), precision="bfloat16", taps=["logits"])
        report = check(GPT, port, probe=probe, diagnose=False)
        assert report.first_divergence is None
        assert ("its error runs along SL813" in doubts(report)) == (abs(factor) > 0.5)


def test_columns_past_the_vocabulary_that_win_are_a_doubt():
    for value in (-99.0, 99.0):

        def padded(output, probe, value=value):
            more = np.full((*output.logits.shape[:2], 3), np.float32(value))
            return Output(np.concatenate([output.logits, more], axis=-1), {})

        report = check(GPT, Changed(GPT, padded, taps=["logits"]), diagnose=False)
        assert ("in a column past the vocabulary" in doubts(report)) == (value > 0)


def test_taps_that_mean_something_else_are_said_to_be_so():
    """Named by the candidate: a difference, with a note. Under guessed names: a doubt, and the rest is judged."""

    def unscaled(output, probe):
        taps = {n: a * 2 if n.endswith((".q", ".q_rotated")) else a for n, a in output.taps.items()}
        return Output(output.logits, taps)

    port = Changed(LLAMA, unscaled)
    report = check(LLAMA, port, diagnose=False)
    assert report.verdict == "different function"
    assert any("its logits are within their limit" in note for note in report.candidate.notes)
    port = Changed(LLAMA, unscaled)
    port.guessed = True
    report = check(LLAMA, port, diagnose=False)
    assert report.verdict == "not proven"
    assert "its taps q, q_rotated" in doubts(report)
    assert not any(tap.name.endswith((".q", ".q_rotated")) for tap in report.candidate.taps)
    assert len(report.candidate.taps) > 20
    port = Port(LLAMA, "SL421")  # whose logits are off too
    port.guessed = True
    assert check(LLAMA, port, diagnose=False).verdict == "different function"


@pytest.mark.parametrize("size", [2, 16, 48, 49, 256])
def test_the_rows_of_a_probe_differ(size):
    rows = make_probe(size, None, length=48).tokens_BT
    assert not np.array_equal(*rows)
    assert set(np.unique(rows)) <= set(range(size))
    assert size > 16 or len(np.unique(rows)) == size


def test_every_row_of_a_short_table_is_read():
    port = Port(GPT)
    check_candidate(mistaken.checkpoint_of(GPT), port, diagnose=False)
    assert max(probe.tokens_BT.shape[1] for probe in port.seen) == min(48, GPT.max_seq_len)
