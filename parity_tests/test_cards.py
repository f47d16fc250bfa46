"""Verification cards: the repository's are reproduced, and a card says so where something is wrong or missing."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import ladder
import make_cards
import numpy as np
import pytest
from test_cli import assert_one_line, run  # noqa: F401

import samelogits
from samelogits import cards
from samelogits.backend import installed_backends
from samelogits.cards import Card, Comparison, Row, hash_tensors, make_card, without_paths, write_card
from samelogits.checkpoints import open_checkpoint, save_checkpoint
from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.info import distinct_fields
from samelogits.report import json_schema

ALL = all(ladder.absent(name) is None for name in ("torch", "jax", "transformers"))
needs_all = pytest.mark.skipif(not ALL, reason="needs torch, JAX and transformers")
REPRODUCED = ("shakespeare", "arcee", "gemma2", "gpt_neox")
PATHS = {path.stem: path for path in sorted(make_cards.CARDS.glob("*.json"))}
NO_JAX = "backend jax: expected its framework installed, found: No module named 'jax'"
CARD = Card(
    model="a model", format="canonical", family=None, parameters=3, dtypes="F32 x 1", files={"a.safetensors": "ab"},
    tensors="cd", config=distinct_fields(open_checkpoint("shakespeare").config),
    comparisons=[Comparison("torch", "float64", "same function", 1e-15, 0.1, "logits", "5 arrays")],
    fingerprint="exact-1:ef", tokens=[Row(2, (1, 2))], versions={"numpy": "2"}, machine={"system": "Linux"},
    date="2026-11-30",
)  # fmt: skip


def changed(*comparisons: Comparison, **changes: Any) -> Card:
    """The card above with further comparisons."""
    return dataclasses.replace(CARD, comparisons=[*CARD.comparisons, *comparisons], **changes)


def promises(card: Card) -> dict[str, Any]:
    """What a card says wherever and whenever it is made: what the model is, and every verdict."""
    kept = ("model", "format", "family", "parameters", "files", "tensors", "fingerprint", "tokens", "verdict")
    verdicts = [(c.name, c.arithmetic, c.verdict) for c in card.comparisons]
    return {name: getattr(card, name) for name in kept} | {"verdicts": verdicts}


# the cards of the repository


def test_every_model_has_its_card() -> None:
    later = set(make_cards.GGUF)  # made where their package is installed
    assert set(make_cards.names()) - later <= set(PATHS) <= set(make_cards.names())
    assert {name for name, path in PATHS.items() if not path.with_suffix(".md").is_file()} == set()


@pytest.mark.parametrize("name", PATHS)
def test_the_page_is_that_of_the_values(name: str) -> None:
    card = make_cards.read_card(PATHS[name])
    assert card.to_json() == PATHS[name].read_text(encoding="utf-8")
    assert card.to_markdown() == PATHS[name].with_suffix(".md").read_text(encoding="utf-8")
    assert card.verdict == "same function"
    assert {c.name for c in card.comparisons} == {"numpy", "torch", "jax", "transformers"}
    assert "not compared" not in {c.verdict for c in card.comparisons}


@pytest.mark.parametrize("name", PATHS)
def test_rows_are_shorter_where_the_vocabulary_is_large(name: str) -> None:
    card = make_cards.read_card(PATHS[name])
    longest = {"gemma-3-270m": 12}.get(name, 48)  # of the first, a row has three million logits
    expected = min(longest, max(1, card.config["max_seq_len"] - 8))
    assert [row.padding + len(row.ids) for row in card.tokens] == [expected, expected]


def test_the_list_is_that_of_the_cards() -> None:
    listed = {name: make_cards.read_card(PATHS[name]) for name in make_cards.names() if name in PATHS}
    text = (make_cards.CARDS / "README.md").read_text(encoding="utf-8")
    assert text == make_cards.page(listed), "python -m nox -s cards writes it anew"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_weights_and_the_fingerprint_of_its_card(family: str, tmp_path: Path) -> None:
    card = make_cards.read_card(PATHS[family])
    checkpoint = open_checkpoint(make_cards.write_family(family, tmp_path))
    assert hash_tensors(checkpoint) == card.tensors
    assert samelogits.fingerprint(checkpoint, "numpy") == card.fingerprint


@needs_all
@pytest.mark.slow(when=lambda given: given["name"] != "arcee")
@pytest.mark.parametrize("name", REPRODUCED)
def test_reproduced(name: str) -> None:
    made = make_cards.make(name)
    assert made is not None
    assert promises(made) == promises(make_cards.read_card(PATHS[name]))


# what a card says of another function, and of what isn't there


@pytest.fixture
def without_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if JAX were not installed, which takes long to compile for every shape."""
    monkeypatch.setattr("samelogits.checking.check.absent_backends", lambda: {"jax": NO_JAX})


def another(folder: Path, place: Path) -> Path:
    """A copy of the folder in which one bit of the last weight's exponent is another."""
    shutil.copytree(folder, place)
    path = place / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return place


def test_a_tampered_weight_changes_every_hash(tmp_path: Path) -> None:
    folder = make_cards.write_family("arcee", tmp_path)
    tampered = another(folder, tmp_path / "tampered")
    first, second = (open_checkpoint(place) for place in (folder, tampered))
    assert hash_tensors(first) != hash_tensors(second)
    assert cards._hash_files(first) != cards._hash_files(second)
    assert samelogits.fingerprint(first, "numpy") != samelogits.fingerprint(second, "numpy")


def test_a_conversion_keeps_the_hash_of_the_tensors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_cards.write_family("gpt_neox", tmp_path))
    for format in ("canonical", "huggingface"):
        save_checkpoint(checkpoint, tmp_path / format, format)
        assert hash_tensors(open_checkpoint(tmp_path / format)) == hash_tensors(checkpoint)


@needs_all
@pytest.mark.usefixtures("without_jax")
def test_another_function_is_said_to_be_one(tmp_path: Path) -> None:
    """Negative control: transformers on weights of which one is another."""
    folder = make_cards.write_family("arcee", tmp_path)
    card = make_card(open_checkpoint(folder), "arcee", referee=f"hf:{another(folder, tmp_path / 'tampered')}")
    theirs = {c.arithmetic: c for c in card.comparisons if c.name == "transformers"}
    assert card.verdict == "different function"
    assert theirs["float32"].verdict == "different function"
    assert theirs["float32"].share is not None
    assert theirs["float32"].share > 1
    assert theirs["float32"].remark.startswith("first at ")
    assert theirs["float32"].remark in card.to_markdown().replace("\\", "")
    assert {c.verdict for c in card.comparisons if c.name in ("numpy", "torch")} == {"same function", "same bits"}


@needs_all
@pytest.mark.usefixtures("without_jax")
def test_a_broken_backend_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: torch with another activation, natively and in exact arithmetic."""
    for name in ("native", "exact"):
        module = importlib.import_module(f"pytorch_impl.{name}")
        monkeypatch.setattr(module, "relu_squared", module.relu)
    folder = make_cards.write_family("arcee", tmp_path)
    card = make_card(open_checkpoint(folder), str(folder))
    verdicts = {(c.name, c.arithmetic): c for c in card.comparisons}
    assert card.verdict == "different function"
    assert verdicts["torch", "float64"].verdict == "different function"
    assert verdicts["torch", "float64"].remark.startswith("first at layers.0.mlp.activated: logits, layers.")
    assert verdicts["torch", "exact"].verdict == "different function"
    assert verdicts["torch", "exact"].remark.startswith("its fingerprint is exact-1:")
    assert verdicts["numpy", "float32"].verdict == "same function"


@ladder.needs("torch")
@pytest.mark.usefixtures("without_jax")
def test_what_is_not_installed_is_named(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setitem(sys.modules, "transformers", None)
    folder = make_cards.write_family("arcee", tmp_path)
    status, out, _ = run("verify", str(folder), "--card", str(tmp_path / "card.json"))
    card = make_cards.read_card(tmp_path / "card.json")
    assert (status, card.verdict, card.model) == (0, "same function", "random-arcee")
    missing = {(c.name, c.arithmetic): c.remark for c in card.comparisons if c.verdict == "not compared"}
    assert list(missing) == [("jax", "all"), ("transformers", "float32"), ("transformers", "bfloat16")]
    assert missing["jax", "all"] == NO_JAX
    assert "expected transformers and torch installed" in missing["transformers", "float32"]
    assert "- jax, all: not compared: backend jax" in out
    assert str(tmp_path) not in card.to_json() + out


@pytest.mark.parametrize(
    ("rows", "option"),
    [([Row(0, (1, 2, 3))], " --tokens 1,2,3"), ([Row(1, (2, 3))], " --tokens tokens.npy"), (None, "")],
)
def test_the_command_of_a_card_has_its_tokens(rows: list[Row] | None, option: str) -> None:
    config = CARD.config
    rows = cards.rows_of(cards.make_card_probe(config["vocab_size"], config["max_seq_len"])) if rows is None else rows
    text = dataclasses.replace(CARD, tokens=rows).to_markdown()
    assert f"`samelogits verify a model --card card.json{option}`" in text


@needs_all
def test_numpy_alone_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = dict.fromkeys([name for name in installed_backends() if name != "numpy"], "not here")
    monkeypatch.setattr("samelogits.checking.check.absent_backends", lambda: others)
    monkeypatch.setitem(sys.modules, "transformers", None)
    folder = make_cards.write_family("arcee", tmp_path)
    card = make_card(open_checkpoint(folder), str(folder))
    assert card.verdict == "not proven"
    assert card.fingerprint == make_cards.read_card(PATHS["arcee"]).fingerprint
    assert any("only NumPy ran" in doubt for doubt in card.doubts)
    assert not [doubt for doubt in card.doubts if "float64 for numpy" in doubt]


def test_verdict_is_the_worst_of_all() -> None:
    """What is not compared, or open in bfloat16, decides nothing; without float64 or with a doubt all is open."""
    assert CARD.verdict == "same function"
    assert changed(Comparison("jax", "all", "not compared")).verdict == "same function"
    assert changed(Comparison("jax", "exact", "same bits")).verdict == "same function"
    assert changed(Comparison("transformers", "bfloat16", "not proven")).verdict == "same function"
    assert changed(Comparison("transformers", "bfloat16", "different function")).verdict == "different function"
    assert changed(Comparison("transformers", "float32", "not proven")).verdict == "not proven"
    assert changed(doubts=["TF32"]).verdict == "not proven"
    assert changed(Comparison("jax", "exact", "different function"), doubts=["x"]).verdict == "different function"
    assert dataclasses.replace(CARD, comparisons=[Comparison("jax", "exact", "same bits")]).verdict == "not proven"


# files and the command


def test_schema_is_that_of_the_types() -> None:
    assert json_schema.schema("card_schema.json") == json_schema.build_card(), (
        "python -m samelogits.report.json_schema card writes it anew"
    )


def test_schema_takes_cards_and_nothing_else() -> None:
    validator_of = pytest.importorskip("jsonschema").Draft202012Validator
    validator_of.check_schema(json_schema.schema("card_schema.json"))
    validator = validator_of(json_schema.schema("card_schema.json"))
    values = json.loads(changed(Comparison("jax", "float32", "different function", np.inf)).to_json())
    validator.validate(values)
    for path in PATHS.values():
        validator.validate(json.loads(path.read_text(encoding="utf-8")))
    spoilt = [values | {"extra": 1}, values | {"verdict": "fine"}, values | {"schema": 0}]
    spoilt += [{key: value for key, value in values.items() if key != "tensors"}]
    assert all(not validator.is_valid(wrong) for wrong in spoilt)


@pytest.mark.parametrize(
    ("comparison", "status"),
    [
        (Comparison("jax", "float64", "same function"), 0),
        (Comparison("jax", "float64", "different function"), 1),
        (Comparison("transformers", "float32", "not proven"), 3),
    ],
)
def test_exit_statuses_and_files(run: Any, monkeypatch: Any, tmp_path: Path, comparison: Any, status: int) -> None:  # noqa: F811
    card = changed(comparison)
    monkeypatch.setattr(cards, "make_card", lambda *arguments, **options: card)
    found, out, err = run("verify", "shakespeare", "--card", str(tmp_path / "card.json"))
    assert (found, out) == (status, card.to_markdown())
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.json", "card.md"]
    assert (tmp_path / "card.md").read_text() == out
    assert make_cards.read_card(tmp_path / "card.json") == card


def test_bad_input_is_one_line_and_leaves_nothing(run: Any, tmp_path: Path) -> None:  # noqa: F811
    assert_one_line(*run("verify", "shakespeare", "--card", str(tmp_path / "card.md")), "ends in .json")
    assert_one_line(*run("verify", "shakespeare", "--card", str(tmp_path / "no" / "card.json")), "existing folder")
    assert_one_line(*run("verify", str(tmp_path / "gone"), "--card", str(tmp_path / "card.json")), "found nothing")
    assert_one_line(*run("verify", "shakespeare", "--tokens", "1,999"), "found 999")
    assert_one_line(*run("verify", "shakespeare", "--device", "abacus:0"), "device: expected")
    assert list(tmp_path.iterdir()) == []
    assert "example: samelogits verify" in run("verify", "--help")[1]


def test_a_card_is_whole_or_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A page that can't be made leaves the older files as they were."""
    write_card(CARD, tmp_path / "card.json")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(card: Card) -> str:
        raise RuntimeError("a fault of the view")

    monkeypatch.setattr(Card, "to_markdown", fail)
    with pytest.raises(RuntimeError):
        write_card(changed(date="2027-01-01"), tmp_path / "card.json")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_rows_of_numbers_stay_on_one_line() -> None:
    text = changed(tokens=[Row(0, (1,)), Row(3, (4, 5, 6)), Row(0, ())]).to_json()
    assert '"ids": [4, 5, 6]' in text
    assert json.loads(text)["tokens"][1] == {"padding": 3, "ids": [4, 5, 6]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("found /home/someone/models/a.gguf: cut short", "found a.gguf: cut short"),
        ("candidate hf:: /tmp/x/y/config.json: wrong", "candidate hf:: config.json: wrong"),
        ("in '../models/b c', ~/d/e and ./f", "in 'b c', e and f"),
        ("hf://owner/name and https://a.b/c stay, as 1/2 does", "hf://owner/name and https://a.b/c stay, as 1/2 does"),
    ],
)
def test_of_a_path_the_last_part_is_left(text: str, expected: str) -> None:
    assert without_paths(text) == expected


def test_names_from_outside_are_no_markup() -> None:
    text = changed(model="a|b`<script>", family="x|y", doubts=["<b>*bold*</b>"]).to_markdown()
    assert "``a\\|b`<script>``" in text
    assert "<b>" not in text
    assert "*bold*" not in text.replace("\\*", "")
    table = [line for line in text.splitlines() if line.startswith("| torch")]
    assert [line.count("|") for line in table] == [8]
