"""Models of every family in all three implementations, float64 to the last digits and exact arithmetic to the bit, and
transformers in bfloat16 inside the derived bounds; a few are quick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ladder
import numpy as np
import pytest

from samelogits.backend import get_backend
from samelogits.checking.against import check_candidate
from samelogits.checking.candidates.huggingface import open_huggingface
from samelogits.checking.later import BY_LENGTH
from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.parameters import random_parameters

ladder.skip_module_unless_present("torch", "transformers", "jax")

from test_families import CASES, CHUNKS, IDS, MASK, attention_of, make, run_ours, tokens_of  # noqa: E402

ALL = [(family, i) for family in FAMILIES for i in range(len(CASES[family]))]
NAMES = [f"{family}-{i}" for family, i in ALL]
DISTINCT = ("gpt2", "bloom", "falcon", "opt", "llama", "gemma3_text", "cohere2", "olmo2", "phi3", "mixtral")


@pytest.mark.slow(when=lambda given: given["case"][1] > 0 or given["case"][0] not in DISTINCT)
@pytest.mark.parametrize("case", ALL, ids=NAMES)
def test_the_three_agree(case: tuple[str, int]) -> None:
    family, i = case
    config = FAMILIES[family].read_config(IDS | CASES[family][i], "case")
    parameters, real = random_parameters(config, 7), MASK.astype(bool)
    logits = {
        (name, arithmetic, chunks): run_ours(
            get_backend(name).load(config, parameters, dtype, "cpu", arithmetic), MASK, chunks
        )[real]
        for name in ("numpy", "torch", "jax")
        for arithmetic, dtype in (("native", "float64"), ("exact", "float32"))
        for chunks in ((), CHUNKS)
        if not chunks or (name != "jax" and i > 0)  # JAX compiles each piece
    }
    for (name, arithmetic, chunks), found in logits.items():
        expected = logits["numpy", arithmetic, chunks]
        if arithmetic == "exact":
            assert found.tobytes() == expected.tobytes(), f"{name} {chunks}"
        else:
            ladder.assert_close(found, expected, 1e-12, f"{name} {chunks}")
    whole, exact = (logits["numpy", arithmetic, ()] for arithmetic in ("native", "exact"))
    assert np.abs(exact - whole).max() < 3e-6 * np.abs(whole).max()


# transformers' attention shows its scores where it is "eager" and the common function; elsewhere these stay unseen.
UNSEEN = {"q_rotated", "k_rotated", "scores", "weights"}
HIDDEN = {"embed_tokens"}  # whose rows are scaled within the module
WITHIN_EXPERTS = {"routing", "gate", "up", "activated"}  # which are fused
OWN_ATTENTION = {"gpt2", "gpt_neo", "bloom", "mpt", "falcon"}  # GPT-2's in the case that reorders and upcasts
POSITIONS = {"gptj", "codegen", "mpt"}  # transformers has a table of max_seq_len rows, shorter than the probe


@pytest.mark.slow(when=lambda given: given["case"][1] < len(CASES[given["case"][0]]) - 1)
@pytest.mark.parametrize("case", ALL, ids=NAMES)
def test_transformers_in_bfloat16(case: tuple[str, int], tmp_path: Path) -> None:
    """Inside the bounds that are derived for it, at all taps that its modules show, padded, alone and by its cache."""
    family, i = case
    theirs = make(family, CASES[family][i], tmp_path / family)
    candidate = open_huggingface(f"hf:?dtype=bfloat16&attn={attention_of(theirs.case)}", theirs.checkpoint)
    tokens = tokens_of(theirs.checkpoint.config) if family in POSITIONS else None
    report = check_candidate(theirs.checkpoint, candidate, tokens, catalogue={}, diagnose=False)
    if theirs.checkpoint.config.n_experts is not None and report.verdict == "not proven":
        assert all("tokens could be judged" in doubt for doubt in report.doubts)  # unsafe choices: too few were left
    else:
        assert report.verdict == "same function", report.to_text()
    verdicts = {stage.stage: (stage.verdict, stage.reason) for stage in report.stages}
    for stage in ("row alone", "decoding"):
        assert verdicts[stage] in (("same", ""), ("skipped", BY_LENGTH))
    missing = {tap.rpartition(".")[2] for tap in report.candidate.missing}
    assert missing <= UNSEEN | HIDDEN | (set() if theirs.checkpoint.config.n_experts is None else WITHIN_EXPERTS)
    assert not missing & UNSEEN or family in OWN_ATTENTION


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_wrong_cache_is_seen(family: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Positions that begin anew with each piece: right for all tokens at once, and wrong by the cache."""
    theirs = make(family, CASES[family][0], tmp_path / family)
    candidate = open_huggingface("hf:", theirs.checkpoint)
    honest = candidate._forward

    def forgetful(module: Any, inputs: dict[str, Any], **cache: Any) -> Any:
        positions = inputs["position_ids"]
        return honest(module, inputs | {"position_ids": positions - positions[:, :1]} if cache else inputs, **cache)

    candidate._forward = forgetful
    report = check_candidate(theirs.checkpoint, candidate, catalogue={}, diagnose=False)
    verdicts = {stage.stage: stage.verdict for stage in report.stages}
    assert (verdicts["logits"], verdicts["row alone"], verdicts["decoding"]) == ("same", "same", "different")
    record_property("negative control", f"{family}: positions that begin anew with each piece of a cached run")
