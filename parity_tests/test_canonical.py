"""The project's own folder, seeded checkpoints, and what a source may be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import GPT2, LLAMA, LLAMA_JSON, assert_one_line, bfloat16, llama_parameters, write_folder

import samelogits.checkpoints
from samelogits.checkpoints import open_checkpoint, save_checkpoint, shipped_models
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.errors import CheckpointError, ConfigError, InputError, SamelogitsError
from samelogits.parameters import parameter_shapes, random_parameters
from samelogits.presets import PRESETS

POST = replace(GPT2, norm_placement="post", final_norm=False, position="sinusoidal", n_kv_heads=1, d_head=5)
CANONICAL_JSON = {
    "format": "samelogits",
    "version": 1,
    "decoder": LLAMA.to_dict(),
    "tokenizer": None,
    "eos_token_ids": [2],
}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def write(arrays: dict[str, np.ndarray] | None = None, **keys: Any) -> Path:
        return write_folder(tmp_path / "canonical", CANONICAL_JSON | keys, arrays or llama_parameters())

    return write


@pytest.mark.parametrize("config", [LLAMA, GPT2, POST])
def test_round_trip_to_the_bit(config: Any, tmp_path: Path) -> None:
    tensors = {
        name: bfloat16(array) if k % 3 == 0 else StoredTensor("F64", array.astype("f8")) if k % 3 == 1
        else StoredTensor("F32", array)
        for k, (name, array) in enumerate(random_parameters(config).items())
    }  # fmt: skip
    checkpoint = Checkpoint("test", "random", config, tensors, eos_token_ids=(0, 7))
    save_checkpoint(checkpoint, tmp_path / "a", "canonical")
    found = open_checkpoint(tmp_path / "a")
    assert (found.format, found.config, found.eos_token_ids) == ("canonical", config, (0, 7))
    assert list(found.tensors) == list(parameter_shapes(config))
    for name, stored in tensors.items():
        assert found.tensors[name].dtype == stored.dtype
        assert found.tensors[name].array.tobytes() == stored.array.tobytes()


def test_written_files(tmp_path: Path) -> None:
    checkpoint = replace(open_checkpoint("random:llama-tiny"), eos_token_ids=(0,))
    save_checkpoint(checkpoint, tmp_path / "a", "canonical")
    assert sorted(os.listdir(tmp_path / "a")) == ["config.json", "model.safetensors"]
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    assert values == {
        "format": "samelogits",
        "version": 1,
        "decoder": json.loads(json.dumps(checkpoint.config.to_dict())),
        "tokenizer": "bytes",
        "eos_token_ids": [0],
    }
    assert open_checkpoint(tmp_path / "a").load_tokenizer().encode("é") == [0xC3, 0xA9]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": 2}, "expected 'samelogits' 1, found 'samelogits' 2"),
    "version true": ({"version": True}, "version"),
    "unknown key": ({"vocab": 1}, "unknown 'vocab'"),
    "decoder a list": ({"decoder": []}, "decoder: expected an object"),
    "decoder short": ({"decoder": {"d_model": 1}}, "missing vocab_size"),
    "decoder of before rope_scaling": (
        {"decoder": {name: value for name, value in LLAMA.to_dict().items() if name != "rope_scaling"}},
        "decoder: decoder config: missing rope_scaling",
    ),
    "decoder long": ({"decoder": LLAMA.to_dict() | {"windows": 4}}, "unknown 'windows'"),
    "decoder wrong": ({"decoder": LLAMA.to_dict() | {"n_layers": 10**9}}, "n_layers: expected 1 to 1024"),
    "tokenizer unknown": ({"tokenizer": "../tokenizer.json"}, "tokenizer: expected 'bytes'"),
    "tokenizer absent": ({"tokenizer": "tokenizer.json"}, "tokenizer.json: expected"),
    "end of text a string": ({"eos_token_ids": ["2"]}, "eos_token_ids: expected token ids"),
    "tied by config only": ({"decoder": LLAMA.to_dict() | {"tie_embeddings": True}}, "lm_head.weight: not a parameter"),
}


@pytest.mark.parametrize(("keys", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_line(keys: dict[str, Any], words: str, folder: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder(**keys))
    assert_one_line(error.value, "canonical", words)


def test_wrong_tensors_are_one_error(folder: Callable[..., Path]) -> None:
    arrays = llama_parameters()
    del arrays["model.norm.weight"]
    arrays["lm_head.weight"] = arrays["lm_head.weight"].T
    arrays["h.0.attn.bias"] = np.ones(1, np.uint8)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder(arrays))
    assert_one_line(error.value, "model.norm.weight", "lm_head.weight: expected shape (11, 12)", "h.0.attn.bias")


def test_integers_are_no_parameters(folder: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: expected dtype"):
        open_checkpoint(folder(llama_parameters() | {"model.norm.weight": np.ones(12, np.uint8)}))


def test_missing_key(folder: Callable[..., Path]) -> None:
    path = folder() / "config.json"
    path.write_text(json.dumps({"format": "samelogits"}))
    with pytest.raises(CheckpointError, match="missing version"):
        open_checkpoint(path.parent)


def test_a_folder_with_something_in_it_is_kept(folder: Callable[..., Path]) -> None:
    path = folder()
    before = sorted(os.listdir(path))
    for format in ("canonical", "huggingface"):
        with pytest.raises(CheckpointError, match="destroy"):
            save_checkpoint(open_checkpoint(path), path, format)
    assert sorted(os.listdir(path)) == before


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="canonical, huggingface"):
        save_checkpoint(open_checkpoint("random:seed-relu"), tmp_path / "a", "pickle")


# Sources


def test_random_is_seeded_and_made_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: Any) -> dict[str, np.ndarray]:
        calls.append(arguments)
        return random_parameters(*arguments)

    monkeypatch.setattr(samelogits.checkpoints, "random_parameters", counted)
    checkpoint = open_checkpoint("random:llama-tiny:7")
    assert (checkpoint.format, checkpoint.config, calls) == ("random", PRESETS["llama-tiny"], [])
    expected = random_parameters(checkpoint.config, 7)
    for name, stored in checkpoint.tensors.items():
        assert stored.dtype == "F32"
        np.testing.assert_array_equal(stored.array, expected[name])
    assert calls == [(checkpoint.config, 7)]
    assert checkpoint.load_tokenizer().encode("hé") == [104, 195, 169]


def test_random_without_seed_is_seed_zero() -> None:
    first, again = (open_checkpoint(f"random:seed-relu{end}").parameters() for end in ("", ":0"))
    np.testing.assert_array_equal(first["lm_head.weight"], again["lm_head.weight"])
    with pytest.raises(InputError, match="tokenizer"):
        open_checkpoint("random:seed-relu").load_tokenizer()


@pytest.mark.parametrize(
    "source", ["random:", "random:gpt5", "random:gpt2:x", "random:gpt2:-1", "random:gpt2:" + "9" * 99]
)
def test_random_refused(source: str) -> None:
    with pytest.raises((ConfigError, InputError)) as error:
        open_checkpoint(source)
    assert_one_line(error.value, "expected", "found")


def test_shipped_models_by_name(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder()
    monkeypatch.setattr(samelogits.checkpoints, "MODELS", path.parent)
    assert shipped_models() == ["canonical"]
    assert open_checkpoint("canonical").source == "canonical"
    assert open_checkpoint("canonical").config == open_checkpoint(path).config
    monkeypatch.chdir(path.parent)
    (path.parent / "elsewhere").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint("elsewhere")
    with pytest.raises(CheckpointError, match=r"shipped model \(canonical\), found nothing"):
        open_checkpoint("absent")


def test_a_path_is_never_a_name(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samelogits.checkpoints, "MODELS", folder().parent)
    for source in (Path("canonical"), Path("random:gpt2"), "./canonical"):
        with pytest.raises(CheckpointError, match="found nothing"):
            open_checkpoint(source)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "config.json"), ("pytorch_model.bin", "pickle"), ("model.pt", "pickle"),
        ("notes.txt", "another kind"), ("absent.safetensors", "found nothing"), ("a\0b", "found nothing"),
        ("x" * 5000, "found nothing"),
    ],
)  # fmt: skip
def test_lone_files(name: str, words: str, tmp_path: Path) -> None:
    if name in ("model.safetensors", "pytorch_model.bin", "model.pt", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(tmp_path / name))


@pytest.mark.parametrize(
    "config", [b"", b"[]", b'{"format": "other"}', b'{"format": []}', b"\xff", json.dumps(LLAMA_JSON).encode()]
)
def test_folders_of_neither_format(config: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(SamelogitsError) as error:
        open_checkpoint(tmp_path)
    assert_one_line(error.value, "expected", "found")
