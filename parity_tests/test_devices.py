"""Accelerators: found ones run every test of the ladder; one that is not here is a skip that says so."""

import ladder
import numpy as np
import pytest
from ladder import CONFIGS

from samelogits.backend import get_backend


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "kind"), ladder.ACCELERATORS, ids=lambda value: value)
def test_accelerator(name, kind):
    ladder.skip_unless(ladder.absent(name), name)
    found = [device for device in ladder.devices(name) if device.partition(":")[0] == kind]
    ladder.skip_unless(None if found else f"{name} finds no {kind} device here", f"{name}-{kind}")
    covered = [param.values[0].device for param in ladder.place_params([name])]
    for device in found:
        assert device in covered
        place = ladder.Place(name, device)
        ladder.check_product(place)
        for config in ladder.ALL.values():
            found_logits = ladder.load(config, place, "float32").logits(ladder.tokens(config), ladder.LEFT)
            expected = ladder.oracle_taps(config, "left")["logits"]
            ladder.assert_close(found_logits, expected, 30 * 2**-24, f"{place}")  # as in test_logits


def test_every_framework_has_the_cpu(place):
    backend = get_backend(place.backend)
    assert "cpu" in backend.devices()
    assert place.device in backend.devices()
    assert backend.describe()["version"]
    if len(backend.devices()) == 1:
        assert backend.load(CONFIGS["gpt"], ladder.parameters(CONFIGS["gpt"]), "float32", None).device == "cpu"


@ladder.needs("torch")
@pytest.mark.parametrize("kind", [*CONFIGS, "everything"])
def test_torch_settings_of_the_caller_are_no_matter(kind):
    """Gradients within no_grad and inference_mode, and beside another default device."""
    import torch

    config = ladder.ALL[kind]
    ids, targets = ladder.tokens(config), ladder.targets(config)
    expected = ladder.load(config, ladder.cpu("torch")).loss_and_gradients(ids, targets)[1]
    for setting in (torch.no_grad(), torch.inference_mode(), torch.device("meta")):
        with setting:
            found = ladder.load(config, ladder.cpu("torch")).loss_and_gradients(ids, targets)[1]
        assert {name: g.tobytes() for name, g in found.items()} == {name: g.tobytes() for name, g in expected.items()}


@ladder.needs("torch")
def test_torch_modes_of_the_caller_do_not_stay():
    """A model under autocast, and a cache and a trainer that go on outside the inference mode they began in."""
    import torch

    config, place = ladder.LLAMA, ladder.cpu("torch")
    ids, targets = ladder.tokens(config), ladder.targets(config)

    def use(first):
        model = ladder.load(config, place, "float32")
        cache, trainer = model.new_cache(5, 8), model.trainer(ladder.SETTINGS)
        with first:
            pieces = [model.extend(cache, ids[:, :3])]
            trainer.step(ids, targets)
        pieces.append(model.extend(cache, ids[:, 3:]))
        trainer.step(ids, targets)
        return [piece.tobytes() for piece in pieces] + [array.tobytes() for array in model.parameters().values()]

    expected = use(torch.no_grad())
    assert use(torch.autocast("cpu", torch.bfloat16)) == expected
    assert use(torch.inference_mode()) == expected


@ladder.needs("jax")
@pytest.mark.parametrize("arithmetic", ["native", "exact"])
@pytest.mark.parametrize("kind", [*CONFIGS, "everything"])
def test_jax_promotion_of_the_caller_is_no_matter(kind, arithmetic):
    import jax

    config, place = ladder.ALL[kind], ladder.cpu("jax")
    with jax.numpy_dtype_promotion("strict"):
        model = get_backend("jax").load(config, ladder.parameters(config), "float32", place.device, arithmetic)
        assert np.isfinite(model.logits(ladder.tokens(config))).all()
        step = model.trainer(ladder.SETTINGS).step(ladder.tokens(config), ladder.targets(config))
        assert np.isfinite(step.loss)
