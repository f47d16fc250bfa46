"""The model that comes with the package: small, trained, and the same in every framework."""

import numpy as np
import pytest

import samelogits
from samelogits.backend import installed_backends
from samelogits.checkpoints import MODELS, shipped_models
from samelogits.presets import preset
from samelogits.training import mean_loss

TEXT = b"""BRUTUS:
I would not, Cassius; yet I love him well.
But wherefore do you hold me here so long?
What is it that you would impart to me?
"""


def test_every_shipped_model_is_small():
    assert shipped_models() == ["shakespeare"]
    for name in shipped_models():
        assert sum(path.stat().st_size for path in (MODELS / name).iterdir()) < 2_000_000


def test_its_architecture_is_a_preset():
    assert samelogits.open_checkpoint("shakespeare").config == preset("llama-tiny")


@pytest.mark.parametrize("backend", installed_backends())
def test_it_has_learned_to_spell(backend):
    """Nats a byte on lines that it was not trained on; the guess of all 256 bytes alike is 5.5."""
    ids = np.frombuffer(TEXT, np.uint8).astype(np.int64)
    assert mean_loss(samelogits.load("shakespeare", backend), ids, len(ids) - 1) < 1.9
    assert mean_loss(samelogits.load("random:llama-tiny", backend), ids, len(ids) - 1) > 5


def test_all_generate_the_same_text():
    prompt = [list(b"ROMEO:")]
    texts = {
        backend: bytes(samelogits.load("shakespeare", backend).generate(prompt, 24)[0].tolist())
        for backend in installed_backends()
    }
    assert len(set(texts.values())) == 1, texts
    assert next(iter(texts.values())).isascii()
