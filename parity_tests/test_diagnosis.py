"""Naming the mistake: the right name comes first, in the right place, and no wrong name is said to explain."""

from dataclasses import replace

import mistaken
import numpy as np
import pytest
from mistaken import GPT, LLAMA, POST, Port, check, probe_of, stage

from samelogits.checking import rehearsal
from samelogits.checking.catalogue import CATALOGUE
from samelogits.checking.diagnosis import Diagnosis
from samelogits.checking.later import STEPS, TRAINING
from samelogits.checking.variant import Variant
from samelogits.taps import tap_names

EVERYWHERE = {
    "SL101": (GPT, "layers.0.mlp.activated"),
    "SL121": (LLAMA, "layers.0.mlp.gate"),
    "SL207": (LLAMA, "layers.0.input_layernorm"),
    "SL222": (POST, "layers.0.self_attn.q"),
    "SL301": (LLAMA, "layers.0.self_attn.q_rotated"),
    "SL332": (GPT, "embed_positions"),
    "SL401": (LLAMA, "layers.0.self_attn.scores"),
    "SL411": (LLAMA, "layers.0.self_attn.scores"),
    "SL421": (GPT, "layers.0.self_attn.weights"),
    "SL521": (GPT, "layers.0.self_attn.q"),
    "SL611": (LLAMA, "logits"),
    "SL703": (LLAMA, "layers.1.input_layernorm"),
    "SL711": (GPT, "layers.0.residual_mid"),
    "SL801": (LLAMA, "layers.0.self_attn.q"),
}
LOCAL = {"SL103": GPT, "SL205": GPT, "SL411": LLAMA, "SL531": LLAMA, "SL431": LLAMA, "SL712": POST}
LOGITS_ONLY = ["SL301", "SL207", "SL411"]


def codes_of(cause):
    return (cause.code, *cause.same_as)


def assert_named(report, *codes):
    causes = report.candidate.causes
    assert report.verdict == "different function"
    assert causes, "nothing is named"
    assert " + ".join(sorted(codes)) in codes_of(causes[0]), [(c.code, c.share) for c in causes]
    assert causes[0].explains
    return causes[0]


@pytest.mark.parametrize("code", EVERYWHERE)
def test_the_cause_is_first(code):
    config, tap = EVERYWHERE[code]
    report = check(config, Port(config, code))
    cause = assert_named(report, code)
    assert cause.places == "all layers"
    assert report.first_divergence == tap
    assert report.diverging == "port in float32"
    assert report.candidate.interval is None
    assert report.candidate.missing == []
    assert cause.title == CATALOGUE[code].title
    assert set(cause.reruns) <= set(tap_names(config))
    assert cause.share == pytest.approx(max(cause.reruns.values()))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("code", LOCAL)
def test_the_place_is_right_in_one_layer(code, layer):
    config = LOCAL[code]
    report = check(config, Port(config, code, places=[layer]))
    cause = assert_named(report, code)
    assert cause.places == f"layer {layer}"
    assert report.candidate.spread == f"layer {layer}"
    assert report.first_divergence.startswith(f"layers.{layer}.")


@pytest.mark.parametrize(("config", "codes"), [(LLAMA, ("SL121", "SL411")), (GPT, ("SL207", "SL421"))])
def test_a_pair_is_named(config, codes):
    report = check(config, Port(config, *codes))
    cause = assert_named(report, *codes)
    assert cause.title == "; and ".join(CATALOGUE[code].title for code in codes)
    assert not any(c.explains for c in report.candidate.causes if "+" not in c.code)


@pytest.mark.parametrize("code", LOGITS_ONLY)
def test_logits_alone_name_it(code):
    report = check(LLAMA, Port(LLAMA, code, taps=["logits"]))
    assert_named(report, code)
    assert report.candidate.interval == ("tokens", "logits")
    assert report.candidate.spread == ""
    assert len(report.candidate.missing) == len(tap_names(LLAMA)) - 1


def test_logits_alone_name_a_mistake_of_one_layer():
    report = check(LLAMA, Port(LLAMA, "SL121", places=[1], taps=["logits"]))
    assert assert_named(report, "SL121").places == "layer 1"


@pytest.mark.parametrize(
    "codes",
    [
        ("SL104", "SL601"),
        ("SL121", "SL401"),
        ("SL207", "SL421"),
    ],
)
def test_logits_alone_name_a_pair(codes):
    assert_named(check(LLAMA, Port(LLAMA, *codes, taps=["logits"])), *codes)


def test_few_taps_give_an_interval():
    given = ["embedded", "layers.0.residual_out", "layers.1.residual_out", "logits"]
    report = check(LLAMA, Port(LLAMA, "SL411", places=[1], taps=given))
    assert_named(report, "SL411")
    assert report.first_divergence == "layers.1.residual_out"
    assert report.candidate.interval == ("layers.0.residual_out", "layers.1.residual_out")
    assert report.candidate.causes[0].places == "layer 1"
    assert [tap.name for tap in report.candidate.taps] == given


def test_a_mistake_in_bfloat16_is_named():
    for code in ("SL121", "SL301"):
        assert_named(check(LLAMA, Port(LLAMA, code, precision="bfloat16")), code)


# What is not in the catalogue


def stretched(factor):
    def plant(variant):
        variant.exchange("attention_mix", lambda right: lambda *given: right(*given) * factor)

    return plant


@pytest.mark.parametrize("places", [[1], None], ids=["one layer", "all layers"])
def test_an_unknown_mistake_is_given_no_wrong_name(places):
    report = check(LLAMA, Port(LLAMA, plant=stretched(1.01), places=places))
    assert report.verdict == "different function"
    assert report.first_divergence == f"layers.{1 if places else 0}.self_attn.mixed"
    assert not any(cause.explains for cause in report.candidate.causes)


@pytest.mark.parametrize("factor", [1.01, 1.3])
def test_an_unknown_mistake_is_given_no_wrong_name_from_logits_alone(factor):
    """A factor on every value is no rounding, whatever its size."""
    report = check(LLAMA, Port(LLAMA, plant=stretched(factor), taps=["logits"]))
    assert report.verdict == "different function"
    explaining = [cause.code for cause in report.candidate.causes if cause.explains]
    assert explaining == []


@pytest.mark.parametrize("code", ["SL411", "SL711"])
def test_without_its_entry_a_mistake_has_no_name(code):
    rest = {key: m for key, m in CATALOGUE.items() if key != code}
    report = check(LLAMA, Port(LLAMA, code, places=[0]), catalogue=rest)
    assert report.verdict == "different function"
    assert not any(cause.explains for cause in report.candidate.causes)
    assert report.candidate.spread == "layer 0"


# Behind a norm of attention that sees nothing, 0/0 without eps, padding spreads to every token that comes after it.
SPREADING = replace(LLAMA, norm_placement="sandwich", attention_bias=False, attention_output_bias=False, mlp_bias=False)


def changed(change, *codes):
    """A port whose output is changed at the end."""
    port = Port(SPREADING, *codes)
    run = port.run
    port.run = lambda probe: change(run(probe), probe)
    return port


@pytest.mark.parametrize("taps", [None, ["logits"]])
@pytest.mark.parametrize("zero", [False, True])
def test_a_mistake_that_makes_nan_is_named(taps, zero):
    """Whether a softmax makes NaN of NaN or 0 is each implementation's own."""

    def fill(output, probe):
        assert len(probe.tokens_BT) == 1 or not np.isfinite(output.logits[1, 4:]).any()
        if zero:
            array = output.taps["layers.1.self_attn.weights"]
            array[...] = np.nan_to_num(array)
        output.taps = output.taps if taps is None else {"logits": output.logits}
        return output

    cause = check(SPREADING, changed(fill, "SL203")).candidate.causes[0]
    assert (cause.code, cause.explains) == ("SL203", True)


def test_nan_of_unknown_origin_has_no_name():
    def spoil(output, probe):
        output.taps["layers.1.self_attn.mixed"][0, 5] = np.nan
        return output

    report = check(SPREADING, changed(spoil))
    assert report.first_divergence == "layers.1.self_attn.mixed"
    assert not [cause for cause in report.candidate.causes if cause.explains]


def test_an_honest_candidate_has_no_cause():
    for config in (GPT, LLAMA, POST):
        report = check(config, Port(config))
        assert report.verdict == "same function"
        assert report.candidate.causes == []


def test_the_search_ends_in_time():
    taps = {
        k: a.astype(np.float32) for k, a in mistaken.run(LLAMA, probe_of(LLAMA), mistaken.together("SL301"))[1].items()
    }
    judge = mistaken.judge_of(LLAMA, taps)
    spreads = judge.spreads(local=True)
    said = []
    causes = Diagnosis(judge, spreads, judge.scores(spreads), True, seconds=-1.0, progress=said.append).run()
    assert causes == []
    assert said == []


# Loss and training


def loss_of(config, *codes):
    """The port with a loss of its own logits that has these mistakes."""
    probe = probe_of(config)
    logits = mistaken.run(config, probe, precision="float32")[0]
    variant = Variant(config, mistaken.wide(config), probe)
    mistaken.together(*codes)(variant)
    return float(np.float32(variant.loss(logits)))


LOSSES = ["SL901", "SL902", "SL903", "SL904", "SL905", "SL906", "SL907", "SL908", "SL909", "SL910"]


@pytest.mark.parametrize("code", [None, *LOSSES])
def test_a_mistaken_loss_is_named(code):
    report = check(GPT, Port(GPT, loss=loss_of(GPT, *([code] if code else []))), diagnose=False)
    found = stage(report, "loss")
    if code is None:
        assert (found.verdict, report.verdict, report.candidate.causes) == ("same", "same function", [])
        return
    assert found.verdict == "different"
    assert stage(report, "logits").verdict == "same"
    assert report.candidate.causes[0].code == code
    assert report.candidate.causes[0].explains
    assert not any(cause.explains for cause in report.candidate.causes[1:])


def test_a_loss_that_is_no_number():
    for value in (np.nan, np.inf):
        found = stage(check(GPT, Port(GPT, loss=value), diagnose=False), "loss")
        assert (found.verdict, found.relative) == ("different", np.inf)


def trained(config, *codes):
    """Losses of the steps that the checker asks for, with these mistakes."""
    variant = Variant(config, mistaken.wide(config), probe_of(config))
    mistaken.together(*codes)(variant)
    losses = rehearsal.train(variant, TRAINING, STEPS)
    return np.array(losses, np.float32).astype(float).tolist()


@pytest.mark.parametrize("code", [None, "SL953", "SL954", "SL958", "SL961", "SL963", "SL965"])
def test_mistaken_training_is_named(code):
    losses = trained(POST, *([code] if code else []))
    report = check(POST, Port(POST, losses=losses), diagnose=False)
    found = stage(report, "training")
    assert found.compared == STEPS
    if code is None:
        assert (found.verdict, report.verdict) == ("same", "same function")
        return
    assert found.verdict == "different"
    assert code in codes_of(report.candidate.causes[0])
    assert report.candidate.causes[0].explains


def test_after_a_wrong_forward_pass_nothing_is_trained():
    report = check(POST, Port(POST, "SL103", losses=[1.0, 2.0]), diagnose=False)
    found = stage(report, "training")
    assert (found.verdict, found.reason) == ("skipped", "the forward pass is different")
