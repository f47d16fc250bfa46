"""Tokenizers: plain bytes, and a tokenizer.json."""

from __future__ import annotations

import importlib
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from samelogits.checkpoints.gguf_header import shorten
from samelogits.checkpoints.json_file import open_regular
from samelogits.errors import CheckpointError, InputError, SamelogitsError


class ByteTokenizer:
    """The UTF-8 bytes of the text as token ids 0 to 255."""

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def decode(self, ids: list[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD; an id outside 0 to 255 raises InputError."""
        check_ids(ids, range(256))
        return bytes(ids).decode(errors="replace")


class JsonTokenizer:
    """A Hugging Face tokenizer.json, special tokens included as its post-processor says.

    Raises InputError without the package `tokenizers`, CheckpointError for a file that is not one.
    """

    def __init__(self, path: str | Path):
        library = library_of_tokenizers()
        with open_regular(Path(path)) as file:
            content = file.read()
        with package_errors(CheckpointError, f"{path}: expected a tokenizer.json"):
            self._tokenizer = library.Tokenizer.from_buffer(content)
        # A length limit or padding stored in the file would change the prompt in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._known = frozenset(self._tokenizer.get_vocab().values())

    def encode(self, text: str) -> list[int]:
        utf8(text)
        # It may lack, for example, a word and a token for what is unknown.
        with package_errors(InputError, "text: expected one that the tokenizer takes"):
            return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        check_ids(ids, self._known)
        with package_errors(InputError, "ids: expected some that the tokenizer takes"):
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))


@contextmanager
def package_errors(kind: type[SamelogitsError], expected: str) -> Iterator[None]:
    """What the package `tokenizers` raises, as an error of this kind. It raises nothing narrower than Exception, and
    where it panics over a file, not even that."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{expected}, found {shorten(str(error))}") from error


def library_of_tokenizers() -> ModuleType:
    """The package `tokenizers`, or InputError."""
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        message = "tokenizer: expected the package tokenizers, found none: pip install 'samelogits[hf]'"
        raise InputError(message) from error


def utf8(text: str) -> bytes:
    """The bytes of a text, or InputError where it has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"text: expected Unicode, found a lone surrogate at {error.start}") from None


def check_ids(ids: list[int], known: Container[int]) -> None:
    """Raise InputError for an id that is not known."""
    unknown = [i for i in ids if i not in known]
    if unknown:
        raise InputError(f"ids: expected ids of the vocabulary, found {unknown[0]}")
