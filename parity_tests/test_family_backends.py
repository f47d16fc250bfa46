"""One model of every family in all three implementations: float64 to the last digits, exact arithmetic to the bit."""

from __future__ import annotations

from pathlib import Path

import ladder
import numpy as np
import pytest

from samelogits.backend import get_backend
from samelogits.checking.against import check_candidate
from samelogits.checking.candidates.huggingface import open_huggingface
from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.parameters import random_parameters

ladder.skip_module_unless_present("torch", "transformers", "jax")

from test_families import CASES, IDS, MASK, make, tokens_of  # noqa: E402


@pytest.mark.parametrize("family", FAMILIES)
def test_the_three_agree(family: str) -> None:
    config = FAMILIES[family].read_config(IDS | CASES[family][0], "case")
    parameters = random_parameters(config, 7)
    logits = {
        (name, arithmetic): get_backend(name)
        .load(config, parameters, dtype, "cpu", arithmetic)
        .logits(tokens_of(config), MASK)
        for name in ("numpy", "torch", "jax")
        for arithmetic, dtype in (("native", "float64"), ("exact", "float32"))
    }
    real = MASK.astype(bool)
    for name in ("torch", "jax"):
        ladder.assert_close(logits[name, "native"][real], logits["numpy", "native"][real], 1e-12, name)
        assert logits[name, "exact"][real].tobytes() == logits["numpy", "exact"][real].tobytes(), name
    scale = np.abs(logits["numpy", "native"][real]).max()
    assert np.abs(logits["numpy", "exact"] - logits["numpy", "native"])[real].max() < 3e-6 * scale


# transformers' attention shows its scores where it is "eager" and the common function; elsewhere these stay unseen.
UNSEEN = {"q_rotated", "k_rotated", "scores", "weights"}
# Rows that are scaled within the module, and what fused experts don't show.
HIDDEN = {"embed_tokens", "router", "routing"}
OWN_ATTENTION = {"gpt2", "gpt_neo", "bloom", "mpt", "falcon"}  # GPT-2's in the case that reorders and upcasts
POSITIONS = {"gptj", "codegen", "mpt"}  # transformers has a table of max_seq_len rows, shorter than the probe


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_in_bfloat16(family: str, tmp_path: Path) -> None:
    """Inside the bounds that are derived for it, at all taps that its modules show."""
    theirs = make(family, CASES[family][-1], tmp_path / family)
    # Its eager attention adds Falcon's ALiBi twice.
    spec = "hf:?dtype=bfloat16" + ("&attn=sdpa" if family == "falcon" else "")
    candidate = open_huggingface(spec, theirs.checkpoint)
    tokens = tokens_of(theirs.checkpoint.config) if family in POSITIONS else None
    report = check_candidate(theirs.checkpoint, candidate, tokens, catalogue={}, diagnose=False)
    assert report.verdict == "same function", report.to_text()
    missing = {tap.rpartition(".")[2] for tap in report.candidate.missing}
    assert missing <= UNSEEN | HIDDEN | ({"output"} if family == "mixtral" else set())
    assert not missing & UNSEEN or family in OWN_ATTENTION
