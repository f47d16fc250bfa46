"""The checker itself: it passes the three, and fails when one of them is broken on purpose."""

import dataclasses
import json

import numpy as np
import pytest

import numpy_reference.native
from samelogits.backend import get_backend, installed_backends
from samelogits.checking.check import check, count_top1
from samelogits.checking.measures import compare, expected_noise, layer_scales
from samelogits.checking.precision import LIMIT, find_doubts, product_error
from samelogits.checking.probe import make_probe
from samelogits.checkpoints import open_checkpoint
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.config import DecoderConfig
from samelogits.errors import BackendError, InputError
from samelogits.parameters import parameter_shapes, random_parameters
from samelogits.presets import preset

OTHERS = [name for name in installed_backends() if name != "numpy"]
needs_another = pytest.mark.skipif(not OTHERS, reason="needs a second framework to compare with NumPy")


def tiny_checkpoint(**changes):
    config = dataclasses.replace(
        preset("llama-tiny"), d_model=20, n_layers=2, d_head=6, d_ff=28, vocab_size=37, **changes
    )
    base = open_checkpoint("random:llama-tiny")
    parameters = random_parameters(config, 3)
    tensors = {
        name: dataclasses.replace(base.tensors[next(iter(base.tensors))], array=parameters[name])
        for name in parameter_shapes(config)
    }
    return dataclasses.replace(base, source="tiny", config=config, tensors=tensors)


@needs_another
def test_passes_the_implementations():
    report = check(tiny_checkpoint(), steps=3)
    assert report.verdict == "same function", report.to_text()
    assert report.passed
    assert report.first_divergence is None
    assert {stage.backend for stage in report.stages} == set(installed_backends())
    assert all(stage.verdict == "same" for stage in report.stages)
    values = json.loads(report.to_json())
    assert values["verdict"] == "same function"
    assert len(values["stages"]) == len(report.stages)
    text = report.to_text()
    assert "Verdict: same function" in text
    assert "\x1b" not in text


@needs_another
@pytest.mark.parametrize(
    ("function", "wrong", "stage"),
    [
        ("silu", lambda x: np.maximum(x, 0), "taps"),
        ("rms_norm", lambda x, w, eps: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1.01 * eps) * w, "logits"),
    ],
    ids=["relu for silu", "eps one percent off"],
)
def test_fails_a_broken_reference(monkeypatch, function, wrong, stage):
    honest = getattr(numpy_reference.native, function)

    def planted(*arguments):
        honest(*arguments)
        return numpy_reference.native.record(wrong(*arguments), (arguments[0],), lambda d: (d,))

    monkeypatch.setattr(numpy_reference.native, function, planted)
    report = check(tiny_checkpoint(), backends=["numpy", OTHERS[0]], dtypes=["float64"], steps=1)
    assert report.verdict == "different function"
    assert not report.passed
    assert next(s for s in report.stages if s.stage == stage).verdict == "different"
    expected = {"silu": "layers.0.mlp.activated", "rms_norm": "layers.0.input_layernorm"}[function]
    assert report.first_divergence == expected
    assert report.diverging == f"{OTHERS[0]} in float64"


def test_only_numpy_proves_nothing():
    report = check(tiny_checkpoint(), backends=["numpy"], steps=1)
    assert report.verdict == "not proven"
    assert not report.passed
    assert any("only NumPy" in doubt for doubt in report.doubts)


def test_constant_logits_prove_nothing():
    checkpoint = tiny_checkpoint()
    zero = {
        name: dataclasses.replace(tensor, array=np.zeros_like(tensor.array))
        for name, tensor in checkpoint.tensors.items()
    }
    report = check(dataclasses.replace(checkpoint, tensors=zero), steps=1)
    assert report.verdict == "not proven"


def test_unknown_backend_is_one_error():
    with pytest.raises(BackendError, match="expected one of numpy, torch, jax"):
        check(tiny_checkpoint(), backends=["tensorflow"])


def test_probe_pads_and_shifts():
    probe = make_probe(37, limit=19)
    assert probe.tokens_BT.shape == (2, 11)
    assert probe.mask_BT.sum(1).tolist() == [11, 9]
    assert probe.targets_BT[0, :-1].tolist() == probe.tokens_BT[0, 1:].tolist()
    assert (probe.targets_BT[:, -1] == -100).all()
    assert (probe.targets_BT[1, :2] == -100).all()
    with pytest.raises(InputError):
        make_probe(37, None, tokens=[[1, 40]])


def test_compare_names_the_worst_element():
    reference = np.array([[1.0, 2.0], [4.0, -8.0]])
    candidate = reference.copy()
    candidate[1, 0] += 3 * 2.0**-50
    found = compare("x", candidate, reference, "float64")
    assert found.place == (1, 0)
    assert found.absolute == 3 * 2.0**-50
    assert found.ulps == 3  # 4.0 is followed by 4.0 + 2^-50
    assert found.relative == 3 * 2.0**-53
    for wrong in (np.nan, np.inf):
        candidate[0, 1] = wrong
        assert compare("x", candidate, reference, "float64").relative == np.inf
    assert compare("x", candidate[:1], reference, "float64").relative == np.inf


def test_a_bias_has_the_scale_of_its_layer():
    scales = layer_scales({"a.weight": np.array([3.0]), "a.bias": np.array([1e-17]), "b.weight": np.array([-5.0])})
    assert scales == {"a.weight": 3.0, "a.bias": 3.0, "b.weight": 5.0}


def test_near_ties_are_counted_apart():
    reference = np.array([[[1.0, 3.0, 3.0 - 1e-9], [5.0, 0.0, 1.0]]])
    candidate = np.array([[[1.0, 3.0 - 1e-9, 3.0], [0.0, 5.0, 1.0]]])
    both = np.array([[True, True]])
    assert count_top1(candidate, reference, both, 1e-8) == (0, 1, 2)
    assert count_top1(candidate, reference, both, 1e-12) == (0, 0, 2)
    assert count_top1(candidate, reference, np.array([[True, False]]), 1e-8) == (0, 1, 1)


def test_noise_grows_with_depth_and_unit():
    config: DecoderConfig = preset("llama-tiny")
    deep = dataclasses.replace(config, n_layers=4 * config.n_layers)
    assert 1.9 < expected_noise(deep, 32, "float32") / expected_noise(config, 32, "float32") < 2.1
    assert expected_noise(config, 32, "float32") == 2.0**29 * expected_noise(config, 32, "float64")


class Partial:
    """The NumPy backend under another name, with what it claims to do taken away."""

    name = "partial"

    def __init__(self, dtypes=(), forget=None):
        self.dtypes, self.forget = dtypes, forget

    def __getattr__(self, attribute):
        return getattr(get_backend("numpy"), attribute)

    def load(self, *arguments):
        model = get_backend("numpy").load(*arguments)
        model.backend = self.name
        honest = model.activations
        model.activations = lambda *given: {k: v for k, v in honest(*given).items() if k != self.forget}
        return model


def check_partial(monkeypatch, partial, **options):
    def find(name):
        return partial if name == "partial" else get_backend(name)

    monkeypatch.setattr("samelogits.checking.check.get_backend", find)
    return check(tiny_checkpoint(), backends=["numpy", "partial"], steps=1, **options)


@pytest.mark.parametrize("dtypes", [(), ("float32",)])
def test_a_backend_without_float64_is_not_proven(monkeypatch, dtypes):
    report = check_partial(monkeypatch, Partial(dtypes), exact=False)
    assert report.verdict == "not proven"
    assert report.unproven == ["partial"]
    assert "nothing was compared in float64 for partial" in report.to_text()


def test_a_framework_that_fails_to_load_is_named(monkeypatch):
    """Left out of the default comparison, but not in silence."""

    def find(name):
        if name == "jax":
            raise BackendError("backend jax: expected its framework installed, found: a broken one")
        return get_backend(name)

    monkeypatch.setattr("samelogits.backend.get_backend", find)
    report = check(tiny_checkpoint(), dtypes=["float64"], steps=0, exact=False)
    assert "jax" not in report.versions
    assert "a broken one" in report.left_out["jax"]
    assert "jax is left out: backend jax: expected its framework installed" in report.to_text()
    assert "not compared: " in report.coverage
    assert "jax" in report.to_dict()["left_out"]


def test_a_whole_backend_is_proven(monkeypatch):
    assert check_partial(monkeypatch, Partial(("float64", "float32"))).verdict in ("same function", "same bits")


def test_a_missing_tap_is_a_difference(monkeypatch):
    report = check_partial(monkeypatch, Partial(("float64",), forget="layers.1.mlp.output"), exact=False)
    assert report.verdict == "different function"
    assert report.first_divergence == "layers.1.mlp.output"


@pytest.mark.parametrize("options", [{"device": "cuda:99"}, {"dtypes": ["float65"]}, {"backends": []}])
def test_what_is_not_there_is_refused(options):
    with pytest.raises(BackendError):
        check(tiny_checkpoint(), steps=1, **options)


def test_no_tokens_are_refused():
    with pytest.raises(InputError, match="at least one"):
        check(tiny_checkpoint(), tokens=np.zeros((1, 0), int))


@needs_another
def test_weights_beyond_float32_leave_exact_arithmetic_out():
    checkpoint = tiny_checkpoint()
    name = "model.layers.0.mlp.up_proj.weight"
    huge = checkpoint.tensors[name].array.astype(np.float64)
    huge[0, 0] = 1e39
    tensors = {**checkpoint.tensors, name: StoredTensor("F64", huge)}
    report = check(dataclasses.replace(checkpoint, tensors=tensors), dtypes=["float64"], steps=0)
    exact = [stage for stage in report.stages if stage.dtype == "exact"]
    assert {stage.verdict for stage in exact} == {"skipped"}
    assert name in exact[0].reason


@needs_another
def test_bfloat16_is_compared_but_not_trained():
    report = check(tiny_checkpoint(), OTHERS[:1], dtypes=["float64", "bfloat16"], steps=1, exact=False)
    training = [s for s in report.stages if (s.dtype, s.stage, s.backend) == ("bfloat16", "training", OTHERS[0])]
    assert [stage.verdict for stage in training] == ["skipped"]
    assert any(s.dtype == "bfloat16" and s.stage == "logits" and s.verdict == "same" for s in report.stages)


class ReducedPrecision:
    """A backend whose products round their inputs to TF32's ten bits."""

    name = "reduced"

    def devices(self):
        return ["cpu"]

    def matmul(self, a, b, device=None):
        def rounded(x):
            return ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)

        return rounded(a) @ rounded(b)


class NoPrecision(ReducedPrecision):
    """A backend whose products are no numbers."""

    def matmul(self, a, b, device=None):
        return np.full((len(a), b.shape[1]), np.nan, np.float32)


def test_products_that_are_no_numbers_are_a_doubt():
    assert find_doubts(NoPrecision())


def test_reduced_precision_is_a_doubt():
    assert product_error(ReducedPrecision()) > LIMIT
    assert "reduced precision" in find_doubts(ReducedPrecision())[0]


@pytest.mark.parametrize("name", installed_backends())
def test_full_precision_is_none(name):
    assert find_doubts(get_backend(name)) == []
