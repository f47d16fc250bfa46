"""Strict JSON: what Python's parser lets through is refused, and every failure is one CheckpointError of one line."""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from samelogits.checkpoints.atomic import atomic_file
from samelogits.errors import CheckpointError, shown

SIZE_LIMIT = 2**24
DEPTH_LIMIT = 32
NUMBER_LIMIT = 32  # characters; a 64-bit integer has at most 20, a shortest float64 at most 24

_SIGNATURES = {
    b"version https://git-lfs": "a git-lfs pointer (fetch the real file with `git lfs pull`)",
    b"PK\x03\x04": "a zip archive",
    b"\x80\x02": "a pickle",
    b"GGUF": "a GGUF file",
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in this file. A missing, too large or malformed file raises CheckpointError."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, SIZE_LIMIT) + 1)  # for which so many bytes are set aside
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, found: {error.strerror}") from error
    if len(data) > SIZE_LIMIT:
        raise CheckpointError(f"{path}: expected at most {SIZE_LIMIT} bytes of JSON, found more")
    return parse_json(data, str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """The object in `data`: UTF-8, no duplicate key, no NaN or infinity, no lone surrogate, no deep nesting.

    where: the file that the message names.
    """

    def refuse(expected: str, found: object) -> NoReturn:
        raise CheckpointError(f"{where}: expected {expected}, found {found}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            key, count = Counter(key for key, _ in pairs).most_common(1)[0]
            refuse("each key once", f"{shown(key)} {count} times")
        return result

    def number(text: str) -> int | float:
        if len(text) > NUMBER_LIMIT:
            refuse(f"numbers of at most {NUMBER_LIMIT} characters", f"one of {len(text)}")
        value = int(text) if text.lstrip("-").isdigit() else float(text)
        return value if math.isfinite(value) else refuse("finite numbers", text)

    if found := impostor(data):
        refuse("JSON", found)
    if data.startswith(b"\xef\xbb\xbf"):
        refuse("UTF-8 without a byte-order mark", "one")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_int=number,
            parse_float=number,
            parse_constant=lambda text: refuse("finite numbers", text),
        )
    except UnicodeDecodeError as error:
        refuse("UTF-8", f"byte {data[error.start]:#04x} at position {error.start}")
    except json.JSONDecodeError as error:
        refuse("JSON", f"a mistake at line {error.lineno} column {error.colno} ({error.msg})")
    except RecursionError:
        refuse(f"nesting of at most {DEPTH_LIMIT} levels", "more")
    if not isinstance(value, dict):
        refuse("a JSON object", type(value).__name__)
    if not _is_shallow_text(value):
        refuse(f"nesting of at most {DEPTH_LIMIT} levels and no lone surrogate", "otherwise")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write the object, indented, so that no torn file is ever seen under this name; an existing one is refused."""
    with atomic_file(path) as file:
        file.write(json.dumps(value, indent=2, allow_nan=False).encode() + b"\n")


def open_regular(path: Path) -> BinaryIO:
    """The file opened for reading; a folder, a pipe, a device or nothing at all raises CheckpointError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
            raise CheckpointError(f"{path}: expected a regular file, found something else")
        return open(path, "rb")
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, found: {error.strerror}") from None


def impostor(data: bytes) -> str | None:
    """What the bytes are if they begin as a well-known kind of file that often lies under another's name."""
    head = data[:512]
    for signature, name in _SIGNATURES.items():
        if head.startswith(signature):
            return name
    text = head.lstrip().lower()
    return "a web page" if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")) else None


def _is_shallow_text(value: Any) -> bool:
    """Whether nesting stays within DEPTH_LIMIT and every string is UTF-8; level by level, without recursion."""
    level = [value]
    for _ in range(DEPTH_LIMIT):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                try:
                    item.encode()
                except UnicodeEncodeError:
                    return False
            elif isinstance(item, dict):
                below += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                below += item
        if not below:
            return True
        level = below
    return False
