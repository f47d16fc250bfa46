"""What comes after one forward pass: rows alone, decoding, log-probabilities, loss, gradients and training."""

import sys
from dataclasses import replace

import mistaken
import numpy as np
import pytest
from ladder import cpu, load
from mistaken import GPT, LLAMA, POST, Port, check, probe_of, stage

from samelogits.checking import later
from samelogits.checking.later import BY_LENGTH, STEPS, TEMPERATURE
from samelogits.checking.measures import log_softmax
from samelogits.checking.probe import make_probe
from samelogits.checking.rounding import round_bfloat16
from samelogits.errors import CandidateError
from samelogits.report import junit_text
from samelogits.rotary import RopeScaling

# Rows alone


class Leaking(Port):
    """A port that is right on the batch it was made for, and mixes rows on any other, as a batch norm would."""

    def __init__(self, config, wrong, **options):
        super().__init__(config, **options)
        self.wrong = wrong

    def run(self, probe):
        output = super().run(probe)
        if probe.tokens_BT.shape != (2, 16):
            output.logits = output.taps["logits"] = self.wrong(output.logits)
        return output


def test_rows_alone_are_compared():
    port = Port(LLAMA)
    report = check(LLAMA, port)
    alone = stage(report, "row alone")
    assert (alone.verdict, alone.compared) == ("same", 1)
    assert [probe.tokens_BT.shape for probe in port.seen] == [(2, 16), (1, 16), (1, 13)]
    assert all(probe.mask_BT.all() for probe in port.seen[1:])
    report = check(LLAMA, Leaking(LLAMA, lambda x: x - x.mean(axis=(0, 1), keepdims=True)))
    assert stage(report, "logits").verdict == "same"
    assert stage(report, "row alone").verdict == "different"
    assert report.verdict == "different function"


def test_padding_that_leaks_into_rows_is_seen():
    """Positions that count padding are a mistake that the batch and its rows don't share."""
    report = check(GPT, Port(GPT, "SL334", taps=["logits"]), diagnose=False)
    assert stage(report, "logits").verdict == "different"
    assert stage(report, "row alone").verdict == "same"


def test_a_candidate_of_another_shape_on_one_row_is_one_error():
    def squeeze(x):
        return x[0]

    with pytest.raises(CandidateError, match=r"row alone|expected shape"):
        check(LLAMA, Leaking(LLAMA, squeeze), diagnose=False)


def test_a_row_of_nothing_but_padding_is_left_out():
    mask = np.ones((3, 16), bool)
    mask[1] = False
    probe = make_probe(LLAMA.vocab_size, None, np.arange(48).reshape(3, 16) % 41, mask)
    port = Port(LLAMA)
    report = check(LLAMA, port, probe=probe, diagnose=False)
    assert report.verdict == "same function"
    assert all(seen.tokens_BT.size for seen in port.seen)


# Decoding


class Decoding(Port):
    """A port that decodes one token after the other; `late` hides the newest key from each step after the first."""

    def __init__(self, config, late=False, answer=None):
        super().__init__(config)
        self.late, self.answer = late, answer

    def decode(self, probe):
        if self.answer is not None:
            return self.answer(probe)
        logits = mistaken.run(self.config, probe, precision="float32")[0]
        if self.late:
            wrong = mistaken.run(self.config, probe, mistaken.find("SL423").plant, precision="float32")[0]
            logits[:, 8:] = wrong[:, 8:]
        return logits


def test_decoding_is_compared():
    report = check(LLAMA, Decoding(LLAMA))
    assert stage(report, "decoding").verdict == "same"
    assert report.verdict == "same function"
    report = check(LLAMA, Decoding(LLAMA, late=True), diagnose=False)
    assert stage(report, "logits").verdict == "same"
    assert stage(report, "decoding").verdict == "different"
    assert report.verdict == "different function"
    assert stage(check(LLAMA, Port(LLAMA), diagnose=False), "decoding") is None


def test_a_text_that_turns_otherwise_by_its_length_is_left_out(monkeypatch):
    """LongRoPE: rows of 16 tokens take the long factors; one of 13, and the first tokens of any, the short ones."""
    ones = (1.0,) * (LLAMA.d_head // 2)
    scaling = RopeScaling(
        kind="longrope", original_length=14, short_factors=ones, long_factors=(*ones[1:], 3.0), attention_factor=1.0
    )
    config = replace(LLAMA, rope_scaling=scaling)
    port = Decoding(config)
    report = check(config, port, diagnose=False)
    assert report.verdict == "same function"
    assert [probe.tokens_BT.shape for probe in port.seen] == [(2, 16), (1, 16)]
    assert f"1 of 2 rows were not compared alone: {BY_LENGTH}" in report.candidate.notes
    assert (stage(report, "decoding").verdict, stage(report, "decoding").reason) == ("skipped", BY_LENGTH)
    monkeypatch.setattr(later._Stages, "_turns_alike", lambda self, length: True)
    assert stage(check(config, Port(config), diagnose=False), "row alone").verdict == "different"


def test_a_decoding_that_fails_is_one_error(capsys):
    with pytest.raises(CandidateError, match=r"decoding: expected logits of shape \[2, 16, 41\], found \[2, 41\]"):
        check(LLAMA, Decoding(LLAMA, answer=lambda probe: np.zeros((2, 41))), diagnose=False)
    nan = Decoding(LLAMA, answer=lambda probe: np.full((2, 16, 41), np.nan))
    assert stage(check(LLAMA, nan, diagnose=False), "decoding").verdict == "different"
    with pytest.raises(CandidateError):
        check(LLAMA, Decoding(LLAMA, answer=lambda probe: print("noise") or 1 / 0), diagnose=False)
    assert capsys.readouterr().out == ""


def test_of_a_failing_decoding_no_cause_is_sought():
    report = check(LLAMA, Decoding(LLAMA, late=True))
    text = report.to_text()
    assert "the stage decoding" in text
    assert "The whole text at once is right: the cache, or the positions read with it, are not." in text
    assert "No mistake of the catalogue comes near" not in text
    assert "0 ulps" not in junit_text(report)


# Log-probabilities


def log_probabilities(config, temperature=1.0, top_p=None):
    probe = probe_of(config)
    logits = mistaken.run(config, probe, precision="float32")[0] / temperature
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    if top_p:
        order = np.argsort(-p, axis=-1)
        ranked = np.take_along_axis(p, order, -1)
        kept = np.where(np.cumsum(ranked, -1) - ranked < top_p, ranked, 0)
        np.put_along_axis(p, order, kept / kept.sum(-1, keepdims=True), -1)
    with np.errstate(divide="ignore"):
        chosen = np.take_along_axis(np.log(p), np.maximum(probe.targets_BT, 0)[..., None], -1)
    return chosen[..., 0].astype(np.float32)


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, None), ({"temperature": TEMPERATURE}, f"at temperature {TEMPERATURE}"), ({"top_p": 0.9}, "top-p 0.9")],
)
def test_log_probabilities_of_samplers_are_said_to_be_so(options, words):
    report = check(LLAMA, Port(LLAMA, log_probabilities=log_probabilities(LLAMA, **options)), diagnose=False)
    found = stage(report, "log-probabilities")
    assert stage(report, "logits").verdict == "same"
    assert found.verdict == ("same" if words is None else "different")
    assert found.where == (f"these are log-probabilities {words}" if words else "")
    assert report.verdict == ("same function" if words is None else "different function")


@pytest.mark.parametrize("change", [round_bfloat16, lambda x: x + np.float32(3e-5), lambda x: x + np.float32(0.03)])
def test_log_probabilities_may_be_rounded_as_the_candidate_is(change):
    """In bfloat16 by 0.01 or so, in float32 not; of 262,144 equal logits some libraries are 1e-4 off, of 41 none is."""
    logits = mistaken.run(LLAMA, probe_of(LLAMA), precision="bfloat16")[0]
    right = np.take_along_axis(log_softmax(logits), np.maximum(probe_of(LLAMA).targets_BT, 0)[..., None], -1)[..., 0]
    port = Port(LLAMA, precision="bfloat16", taps=["logits"], log_probabilities=change(right.astype(np.float32)))
    assert stage(check(LLAMA, port), "log-probabilities").verdict == "same"
    wrong = right.astype(np.float32) + np.float32(0.5)
    port = Port(LLAMA, precision="bfloat16", taps=["logits"], log_probabilities=wrong)
    assert stage(check(LLAMA, port), "log-probabilities").verdict == "different"


def test_log_probabilities_of_another_shape_are_one_error():
    with pytest.raises(CandidateError, match="log-probabilities"):
        check(LLAMA, Port(LLAMA, log_probabilities=np.zeros((2, 15))), diagnose=False)


# Loss, gradients, training


def test_later_stages_take_odd_output():
    """One token has no target; a recording may claim any number of steps; a gradient may have another shape."""
    one = make_probe(GPT.vocab_size, None, [[7]])
    assert stage(check(GPT, Port(GPT, loss=1.0), probe=one, diagnose=False), "loss").verdict != "same"
    many = stage(check(GPT, Port(GPT, losses=[3.0] * 60), diagnose=False), "training")
    assert many.verdict == "different"
    assert many.compared <= STEPS
    shapes = {name: np.zeros((1, 1)) for name in mistaken.wide(GPT)}
    found = stage(check(GPT, Port(GPT, precision="float64", gradients=shapes), diagnose=False), "gradients")
    assert found.verdict == "different"
    assert "expected shape" in found.where
    found = stage(check(GPT, Port(GPT, precision="float64", gradients={"x": np.zeros(1)}), diagnose=False), "gradients")
    assert "is missing" in found.where


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (lambda *given: 1 / 0, "raised ZeroDivisionError"),
        (lambda *given: [], "training: expected 6 losses, found none"),
        (lambda *given: None, "training: expected numbers, found None"),
        (lambda *given: sys.exit(0), "raised SystemExit"),
    ],
)
def test_a_training_that_fails_is_one_error(answer, fault):
    port = Port(POST)
    port.train = answer
    with pytest.raises(CandidateError, match=fault):
        check(POST, port)


def test_without_targets_nothing_of_the_loss_is_compared():
    probe = make_probe(GPT.vocab_size, None, np.arange(16)[:, None])
    port = Port(GPT, precision="float64", loss=1.0, losses=[1.0], gradients=mistaken.wide(GPT))
    report = check(GPT, port, probe=probe)
    for name in ("loss", "gradients", "training"):
        assert (stage(report, name).verdict, stage(report, name).reason) == ("skipped", later.NO_TARGET)


def test_log_probabilities_without_targets_are_not_compared():
    probe = make_probe(GPT.vocab_size, None, np.arange(16)[:, None])
    report = check(GPT, Port(GPT, log_probabilities=np.full((16, 1), 99.0)), probe=probe, diagnose=False)
    assert stage(report, "log-probabilities").reason == later.NO_TARGET


def test_gradients_that_are_not_finite_differ_in_any_precision():
    arrays = {name: np.full_like(array, np.nan) for name, array in mistaken.wide(GPT).items()}
    found = stage(check(GPT, Port(GPT, gradients=arrays), diagnose=False), "gradients")
    assert found.verdict == "different"
    assert "is not finite" in found.where


def test_a_loss_alone_is_no_training():
    probe = probe_of(GPT)
    loss = load(GPT, cpu("numpy"), "float64", mistaken.wide(GPT)).loss(
        probe.tokens_BT, probe.targets_BT, attention_mask=probe.mask_BT
    )
    report = check(GPT, Port(GPT, losses=[loss]), diagnose=False)
    assert report.verdict == "not proven"
    assert any("the loss before the first step alone can't show" in doubt for doubt in report.doubts)


@pytest.mark.parametrize("factor", [1.0, 1.00001])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_gradients_are_compared(config, factor):
    probe = probe_of(config)
    model = load(config, cpu("numpy"), "float64", mistaken.wide(config))
    loss, found = model.loss_and_gradients(probe.tokens_BT, probe.targets_BT, attention_mask=probe.mask_BT)
    wrong = "model.layers.1.mlp.up_proj"
    found[f"{wrong}.weight"] = found[f"{wrong}.weight"] * factor
    report = check(config, Port(config, precision="float64", loss=loss, gradients=found), diagnose=False)
    gradients = stage(report, "gradients")
    assert stage(report, "loss").verdict == "same"
    assert gradients.compared == len({name.rpartition(".")[0] for name in found})
    assert (gradients.verdict == "same") == (factor == 1)
    assert factor == 1 or gradients.where == wrong
    skipped = stage(check(config, Port(config, gradients=found), diagnose=False), "gradients")
    assert (skipped.verdict, skipped.reason) == ("skipped", "their bound is close enough in float64 alone")
