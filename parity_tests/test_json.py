"""Strict JSON: whatever a stranger writes is read as meant, or refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from checkpoint_files import assert_one_line
from hypothesis import given, settings
from hypothesis import strategies as st

from samelogits.checkpoints.json_file import SIZE_LIMIT, parse_json, read_json, write_json
from samelogits.errors import CheckpointError

BAD = {
    "empty": b"",
    "blank": b"  \n",
    "cut": b'{"a": [1, 2',
    "trailing text": b'{"a": 1} {"b": 2}',
    "trailing comma": b'{"a": 1,}',
    "nan": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
    "infinite float": b'{"a": 1e999}',
    "long integer": b'{"a": ' + b"9" * 5000 + b"}",
    "long float": b'{"a": 1.' + b"0" * 5000 + b"}",
    "duplicate key": b'{"a": 1, "b": 2, "a": 1}',
    "duplicate key below": b'{"a": {"b": 1, "b": 1}}',
    "duplicate key by escape": b'{"a": 1, "\\u0061": 1}',
    "deep list": b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
    "bottomless list": b'{"a": ' + b"[" * 1_000_000,
    "bottomless objects": b'{"a":' * 300_000,
    "lone surrogate value": b'{"a": ["\\ud800"]}',
    "lone surrogate key": b'{"\\udfff": 1}',
    "byte-order mark": b'\xef\xbb\xbf{"a": 1}',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "bad utf-8": b'{"a": "\xff"}',
    "utf-8 surrogate": b'{"a": "\xed\xa0\x80"}',
    "control character": b'{"a": "\n"}',
    "no object": b"[1, 2]",
    "number": b"7",
    "web page": b"\n<!DOCTYPE html><html><body>404</body></html>",
    "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_refused_in_one_line(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        read_json(path)
    assert_one_line(error.value, "config.json", "expected", "found")


def test_impostors_are_named() -> None:
    for kind in ("web page", "git-lfs pointer"):
        with pytest.raises(CheckpointError, match=kind):
            parse_json(BAD[kind], "config.json")


def test_size_cap_and_kinds_of_file(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    large.write_bytes(b" " * (SIZE_LIMIT + 1))
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    for name in ("large", "pipe", "folder", "absent"):
        with pytest.raises(CheckpointError) as error:
            read_json(tmp_path / f"{name}.json")
        assert_one_line(error.value, f"{name}.json")


def test_good_text_passes() -> None:
    text = '\n {"a": [1, -2, 0.5, 1e-05, true, null, "\\ud83d\\ude00 é"], "b": {"c": {}}} \n'
    assert parse_json(text.encode(), "x") == json.loads(text)
    nested: object = 0
    for _ in range(30):
        nested = [nested]
    assert parse_json(json.dumps({"a": nested}).encode(), "x") == {"a": nested}


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=4), st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=2))))
def test_mutated_text_never_raises_another_error(value: dict[str, object], edits: list[tuple[int, bytes]]) -> None:
    data = json.dumps(value).encode()
    assert parse_json(data, "x") == value
    for at, piece in edits:
        data = data[: at % (len(data) + 1)] + piece + data[at % (len(data) + 1) + 1 :]
    try:
        assert parse_json(data, "x") == json.loads(data)
    except CheckpointError as error:
        assert_one_line(error)


def test_written_text_is_read_back_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": [1, None], "é": "\n"})
    assert read_json(path) == {"a": [1, None], "é": "\n"}
    with pytest.raises(CheckpointError, match="destroy"):
        write_json(path, {})
    assert read_json(path)
