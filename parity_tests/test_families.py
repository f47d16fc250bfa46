"""Every family that is read from Hugging Face folders, against transformers: logits, caches, folders and configs."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import cases_gpt
import cases_llama
import cases_moe
import cases_other
import ladder
import numpy as np
import pytest

from samelogits.backend import get_backend
from samelogits.checkpoints import open_checkpoint, save_checkpoint
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.families import Family
from samelogits.checkpoints.families.foreign_config import ACTIVATIONS
from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.checkpoints.safetensors_file import SafetensorsFile

ladder.skip_module_unless_present("torch", "transformers")

import torch  # noqa: E402
import transformers  # noqa: E402

CASES = cases_llama.CASES | cases_moe.CASES | cases_other.CASES | cases_gpt.CASES
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
B, T = 2, 24
# The cached run in pieces: longer and shorter than the windows and the original lengths of the cases.
CHUNKS = (9, 2, 1, 7, 1, 4)
MASK = np.array([[0] * 3 + [1] * (T - 3), [0] * 11 + [1] * (T - 11)])
# Of the largest logit. The cases are off by 4e-6 at most, as transformers works in float32, the MISTAKES by 0.1.
TOLERANCE = 3e-5


@dataclass(frozen=True)
class Theirs:
    """A model of transformers, and the folder that it has saved."""

    model: Any
    folder: Path
    case: dict[str, Any]

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.folder)

    def run(self, tokens: np.ndarray, mask: np.ndarray | None = None, chunks: tuple[int, ...] = ()) -> np.ndarray:
        """Logits of the model, in one piece or by its cache."""
        return run(self.model, tokens, mask, chunks)


def run(model: Any, tokens: np.ndarray, mask: np.ndarray | None, chunks: tuple[int, ...]) -> np.ndarray:
    # A copy, since some rotary positions remember the longest text. Its weights lie as torch lays them: products of
    # those in a mapped file have other last bits.
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    names = inspect.signature(model.forward).parameters
    mask = np.ones_like(tokens) if mask is None else mask
    whole = {"input_ids": tokens, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
    cache = {}
    if chunks:
        name = "cache" if "cache" in names else "past_key_values"
        cache = {name: transformers.DynamicCache(config=model.config), "use_cache": True}
    pieces, end = [], 0
    for size in chunks or (T,):
        begin, end = end, end + size
        given = {key: torch.tensor(value[:, begin:end]) for key, value in whole.items() if key in names}
        with torch.no_grad():
            output = model(**given, attention_mask=torch.tensor(mask[:, :end]), **cache)
        pieces.append(output.logits.numpy())
    return np.concatenate(pieces, axis=1)


def make(family: str, case: dict[str, Any], folder: Path) -> Theirs:
    """A model of this config.json as transformers reads it, with unkind parameters."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(IDS | case | {"model_type": family}))
    torch.manual_seed(11)
    config = transformers.AutoConfig.from_pretrained(folder)
    attention = attention_of(case)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                parameter.copy_(unkind(module, name, parameter))
    model.eval().save_pretrained(folder / "saved")
    return Theirs(model, folder / "saved", case)


def attention_of(case: dict[str, Any]) -> str:
    """transformers' implementation of it. Its eager one adds Falcon's ALiBi twice, as of 5.24."""
    return "sdpa" if case.get("alibi") else "eager"


def unkind(module: Any, name: str, parameter: Any) -> Any:
    """Nothing zero and nothing one; activations of unit scale. A norm's weight is about 1, or about 0 if 1 is added."""
    noise = torch.randn(parameter.shape)
    kind = type(module).__name__
    if "norm" in kind.lower():
        return 0.5 * noise + (parameter.flatten()[0].round() if name == "weight" else 0)
    if name == "bias":
        return 0.5 * noise
    if isinstance(module, torch.nn.Embedding):
        return noise
    return noise / parameter.shape[0 if kind == "Conv1D" else 1] ** 0.5


@pytest.fixture(scope="module", params=[(family, i) for family in CASES for i in range(len(CASES[family]))],
                ids=lambda case: f"{case[0]}-{case[1]}")  # fmt: skip
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    family, i = request.param
    transformers.utils.logging.disable_progress_bar()
    return make(family, CASES[family][i], tmp_path_factory.mktemp("theirs") / family)


def check_logits(
    checkpoint: Checkpoint, expected: np.ndarray, mask: np.ndarray | None = None, chunks: tuple[int, ...] = ()
) -> None:
    """Ours in float32 and float64 are theirs, at every real token."""
    real = np.ones((B, T), bool) if mask is None else mask.astype(bool)
    for dtype in ("float32", "float64"):
        model = get_backend("numpy").load(checkpoint.config, checkpoint.parameters(), dtype, None)
        found = run_ours(model, mask, chunks)
        ladder.assert_close(found[real], expected[real], TOLERANCE, f"logits in {dtype}")


def run_ours(model: Any, mask: np.ndarray | None, chunks: tuple[int, ...]) -> np.ndarray:
    tokens = tokens_of(model.config)
    if not chunks:
        return model.logits(tokens, mask)
    cache, pieces, end = model.new_cache(B, T), [], 0
    for size in chunks:
        begin, end = end, end + size
        pieces.append(model.extend(cache, tokens[:, begin:end], None if mask is None else mask[:, :end]))
    return np.concatenate(pieces, axis=1)


def tokens_of(config: Any) -> np.ndarray:
    return ladder.tokens(config, (B, T))


@pytest.mark.parametrize("chunks", [(), CHUNKS], ids=["whole", "cached"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["unpadded", "padded"])
def test_logits(theirs: Theirs, mask: np.ndarray | None, chunks: tuple[int, ...]) -> None:
    expected = theirs.run(tokens_of(theirs.checkpoint.config), mask, chunks)
    check_logits(theirs.checkpoint, expected, mask, chunks)


def test_saved_by_us(theirs: Theirs, tmp_path: Path) -> None:
    """transformers loads what we write: the same names, bits and logits."""
    save_checkpoint(theirs.checkpoint, tmp_path / "ours", "huggingface")
    original = SafetensorsFile(theirs.folder / "model.safetensors")
    written = SafetensorsFile(tmp_path / "ours" / "model.safetensors")
    assert set(written) == set(original)
    for name, stored in original.items():
        assert written[name].dtype == stored.dtype
        assert written[name].array.tobytes() == stored.array.tobytes(), name
    config = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    spell_alike(config, theirs.model.config)
    load = transformers.AutoModelForCausalLM.from_pretrained
    attention = attention_of(theirs.case)
    loaded, report = load(tmp_path / "ours", config=config, output_loading_info=True, attn_implementation=attention)
    assert not any(report.values()), report
    tokens = tokens_of(theirs.checkpoint.config)
    np.testing.assert_array_equal(run(loaded.eval(), tokens, None, ()), theirs.run(tokens))


def spell_alike(ours: Any, theirs: Any) -> None:
    """The activation as theirs spells it, if ours means the same: each spelling has last bits of its own."""
    for key in ("hidden_act", "activation_function", "hidden_activation"):
        if ACTIVATIONS.get(getattr(ours, key, None)) == ACTIVATIONS.get(getattr(theirs, key, None)) is not None:
            setattr(ours, key, getattr(theirs, key))


def test_config(theirs: Theirs) -> None:
    """The keys that the case has, those that transformers makes of them, and ours: one config."""
    config = theirs.checkpoint.config
    family = FAMILIES[theirs.model.config.model_type]
    assert family.read_config(IDS | theirs.case, "case") == config
    assert family.obstacles(config) == []
    assert family.read_config(json.loads(json.dumps(family.write_config(config))), "ours") == config


def test_every_family_has_cases() -> None:
    assert set(CASES) == set(FAMILIES)
    assert all(len(cases) >= 3 for cases in CASES.values())


def config_of(**fields: Any) -> Callable[[Theirs], Checkpoint]:
    """Their weights under another config."""
    return lambda theirs: replace(theirs.checkpoint, config=replace(theirs.checkpoint.config, **fields))


def rope_scaling_of(**fields: Any) -> Callable[[Theirs], Checkpoint]:
    return lambda theirs: config_of(rope_scaling=replace(theirs.checkpoint.config.rope_scaling, **fields))(theirs)


def table_of(change: Callable[[Family], dict[str, Any]]) -> Callable[[Theirs], Checkpoint]:
    """Their folder read by another table."""

    def read(theirs: Theirs) -> Checkpoint:
        values = json.loads((theirs.folder / "config.json").read_text())
        family = FAMILIES[values["model_type"]]
        family = replace(family, **change(family))
        config = family.read_config(values, "config.json")
        entries = SafetensorsFile(theirs.folder / "model.safetensors").entries
        return replace(theirs.checkpoint, config=config, tensors=family.read_tensors(config, entries, "weights"))

    return read


def without_groups(family: Family) -> dict[str, Any]:
    return {"rules": tuple(replace(rule, groups=1) for rule in family.rules)}


def backwards(family: Family) -> dict[str, Any]:
    """Fused feed-forward layers taken apart in the other order."""
    return {"rules": tuple(replace(rule, canonical=rule.canonical[::-1] if "mlp" in rule.foreign else rule.canonical)
                           for rule in family.rules)}  # fmt: skip


# What each changes, the case that shows it, and the change.
MISTAKES: dict[str, tuple[str, int, Callable[[Theirs], Checkpoint]]] = {
    "rotary pairs side by side taken as halves": ("helium", 0, table_of(lambda family: {"interleaved": False})),
    "rotary halves taken as pairs side by side": ("llama", 0, table_of(lambda family: {"interleaved": True})),
    "queries, keys and values taken apart without groups": ("bloom", 0, table_of(without_groups)),
    "gate and up exchanged": ("phi3", 0, table_of(backwards)),
    "norms without the 1 that is added to their weights": ("gemma", 0, config_of(norm_weight="plain")),
    "no factor on the embedding": ("gemma", 1, config_of(embedding_scale=None)),
    "a window that is one short": ("mistral", 0, config_of(sliding_window=4)),
    "a window that is one long": ("mistral", 0, config_of(sliding_window=6)),
    "windows in the other layers": ("gemma2", 0, config_of(sliding_layers=(1, 3))),
    "scores without their cap": ("gemma2", 2, config_of(attention_softcap=None)),
    "logits without their cap": ("gemma2", 1, config_of(logit_softcap=None)),
    "scores scaled by the head's width": ("gemma2", 0, config_of(attention_scale=None)),
    "one rotary base for all layers": (
        "gemma3_text", 0, config_of(local_rope_theta=None, local_rope_scaling=None)
    ),
    "all of a head rotated": ("phi3", 3, config_of(rotary_width=None)),
    "short factors in a long text": ("phi3", 1, rope_scaling_of(original_length=24)),
    "no scaling of rotary positions": ("llama", 2, config_of(rope_scaling=None)),
    "cosines and sines without YaRN's factor": ("llama", 6, rope_scaling_of(attention_factor=1.0)),
    "YaRN's bounds rounded": ("llama", 5, rope_scaling_of(truncate=True)),
    "rotary positions in every layer": ("smollm3", 0, config_of(no_rope_layers=())),
    "no factor on what is added to the residual stream": ("granite", 0, config_of(residual_scale=None)),
    "logits multiplied where they are divided": ("granite", 0, config_of(logit_scale=49.0)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_table_is_seen(mistake: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    family, i, change = MISTAKES[mistake]
    theirs = make(family, CASES[family][i], tmp_path / family)
    expected = theirs.run(tokens_of(theirs.checkpoint.config))
    check_logits(theirs.checkpoint, expected)
    with pytest.raises(AssertionError, match="logits in float32: apart by"):
        check_logits(change(theirs), expected)
    record_property("negative control", f"families: {family}: {mistake}")
