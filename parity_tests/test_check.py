"""The checker itself: it passes the three, and fails when one of them is broken on purpose."""

import dataclasses
import json

import numpy as np
import pytest

import numpy_reference.native
from samelogits.backend import installed_backends
from samelogits.checking.check import check, count_top1, make_probe
from samelogits.checking.measures import compare, expected_noise, layer_scales
from samelogits.checking.precision import LIMIT, find_doubts, product_error
from samelogits.checkpoints import open_checkpoint
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
    assert report.first_divergence is not None
    assert report.first_divergence.startswith(expected + " ")


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


class ReducedPrecision:
    """A backend whose products round their inputs to TF32's ten bits."""

    name = "reduced"

    def devices(self):
        return ["cpu"]

    def matmul(self, a, b, device=None):
        def rounded(x):
            return ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)

        return rounded(a) @ rounded(b)


def test_reduced_precision_is_a_doubt():
    assert product_error(ReducedPrecision()) > LIMIT
    assert "reduced precision" in find_doubts(ReducedPrecision())[0]


@pytest.mark.parametrize("name", installed_backends())
def test_full_precision_is_none(name):
    from samelogits.backend import get_backend

    assert find_doubts(get_backend(name)) == []
