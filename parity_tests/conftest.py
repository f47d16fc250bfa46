"""Parameters shared by the ladder's tests, and the summary of the negative controls."""

import ladder
import pytest


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also the tests that are marked slow, as nox -s slow does")


def pytest_configure(config):
    if unmet := ladder.unmet():
        raise pytest.UsageError(f"SAMELOGITS_REQUIRE: {', '.join(unmet)}")
    if ladder.absent("torch") is None:
        import torch

        torch.set_num_threads(1)  # these products are so small that threads wait longer for each other than they work
    if ladder.absent("jax") is None:
        import jax

        jax.config.update("jax_numpy_rank_promotion", "raise")  # no array is broadcast by luck


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if any(mark.kwargs.get("when", lambda given: True)(given) for mark in item.iter_markers("slow")):
            item.add_marker(pytest.mark.skip(reason="slow: python -m nox -s slow"))


@pytest.fixture(params=ladder.place_params())
def place(request):
    """A framework on one of its devices: the CPU, and every accelerator found."""
    return request.param


@pytest.fixture(params=ladder.CONFIGS)
def config(request):
    """Three unkind configs: GPT-like, Llama-like, post-norm."""
    return ladder.CONFIGS[request.param]


def pytest_terminal_summary(terminalreporter):
    controls = [
        value for report in terminalreporter.stats.get("passed", []) for key, value in report.user_properties
        if key == "negative control"
    ]  # fmt: skip
    if controls:
        terminalreporter.section("wrong variants, each caught")
        for line in controls:
            terminalreporter.write_line(line)
