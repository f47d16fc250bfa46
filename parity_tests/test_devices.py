"""Accelerators: found ones run every test of the ladder; one that is not here is a skip that says so."""

import ladder
import pytest
from ladder import CONFIGS


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
        for config in CONFIGS.values():
            found_logits = ladder.load(config, place, "float32").logits(ladder.tokens(config), ladder.LEFT)
            expected = ladder.oracle_taps(config, "left")["logits"]
            ladder.assert_close(found_logits, expected, 30 * 2**-24, f"{place}")  # as in test_logits


def test_every_framework_has_the_cpu(place):
    from samelogits.backend import get_backend

    backend = get_backend(place.backend)
    assert "cpu" in backend.devices()
    assert place.device in backend.devices()
    assert backend.describe()["version"]
    if len(backend.devices()) == 1:
        assert backend.load(CONFIGS["gpt"], ladder.parameters(CONFIGS["gpt"]), "float32", None).device == "cpu"
