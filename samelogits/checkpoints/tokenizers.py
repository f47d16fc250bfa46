"""Tokenizers: plain bytes, a tokenizer.json, and the byte-level BPE that a GGUF file carries in its metadata."""

from __future__ import annotations

import importlib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from samelogits.checkpoints.checkpoint import Tokenizer
from samelogits.checkpoints.gguf_header import Value, field, shorten
from samelogits.checkpoints.json_file import open_regular
from samelogits.errors import CheckpointError, InputError

# How the text is cut before the merges, by the name that llama.cpp gives to it: each pattern cuts the pieces that the
# one before it left, and what no pattern matches stays a piece.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3 % 3,),
    "qwen2": (_LLAMA3 % 1,),
    "smollm": (r"\p{N}", _GPT2),
}
# Token types of GGUF: these three are found in the text as they are, before anything else; these two are spelled in
# the byte alphabet.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
NORMAL, BYTE = 1, 6


class ByteTokenizer:
    """The UTF-8 bytes of the text as token ids 0 to 255."""

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def decode(self, ids: list[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD; an id outside 0 to 255 raises InputError."""
        _check_ids(ids, range(256))
        return bytes(ids).decode(errors="replace")


class JsonTokenizer:
    """A Hugging Face tokenizer.json, special tokens included as its post-processor says.

    Raises InputError without the package `tokenizers`, CheckpointError for a file that is not one.
    """

    def __init__(self, path: str | Path):
        library = _library()
        with open_regular(Path(path)) as file:
            content = file.read()
        try:
            self._tokenizer = library.Tokenizer.from_buffer(content)
        except Exception as error:  # the package raises nothing narrower
            raise CheckpointError(f"{path}: expected a tokenizer.json, found {shorten(str(error))}") from error
        # A length limit or padding stored in the file would change the prompt in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._known = frozenset(self._tokenizer.get_vocab().values())

    def encode(self, text: str) -> list[int]:
        _utf8(text)
        try:
            return list(self._tokenizer.encode(text).ids)
        except Exception as error:  # for example a word outside a vocabulary that has no unknown token
            raise InputError(f"text: expected one that the tokenizer takes, found {shorten(str(error))}") from error

    def decode(self, ids: list[int]) -> str:
        _check_ids(ids, self._known)
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


@dataclass(frozen=True)
class BytePairTokenizer:
    """encoder: text to ids. pieces: the bytes of each id. prefix: ids before every text. missing: bytes with no id."""

    encoder: Any
    pieces: list[bytes]
    prefix: list[int]
    missing: frozenset[int]

    def encode(self, text: str) -> list[int]:
        lost = self.missing.intersection(_utf8(text))
        if lost:
            raise InputError(f"text: expected bytes that the vocabulary has, found {min(lost):#04x}")
        return self.prefix + list(self.encoder.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        _check_ids(ids, range(len(self.pieces)))
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def gguf_tokenizer(metadata: Mapping[str, Value], where: str = "gguf metadata") -> Tokenizer:
    """The byte-level BPE of the tokenizer.ggml.* metadata; special tokens in the text become their ids.

    Puts the beginning-of-text token first where the file (or llama.cpp's default for it) says so. Raises InputError for
    a kind of tokenizer that is not supported and without the package `tokenizers`, CheckpointError for broken metadata.
    """
    for key, known in (("tokenizer.ggml.model", ["gpt2"]), ("tokenizer.ggml.pre", list(PRE_TOKENIZERS))):
        found = metadata.get(key)
        if not isinstance(found, str) or found not in known:
            raise InputError(f"{where}: {key}: expected {' or '.join(known)}, found {shorten(found)}")
    try:
        return _byte_pair_tokenizer(metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _byte_pair_tokenizer(metadata: Mapping[str, Value]) -> BytePairTokenizer:
    tokens: list[str] = field(metadata, "tokenizer.ggml.tokens", list)
    merges: list[str] = field(metadata, "tokenizer.ggml.merges", list)
    types = field(metadata, "tokenizer.ggml.token_type", np.ndarray, np.full(len(tokens), NORMAL))
    pre = field(metadata, "tokenizer.ggml.pre", str)
    if types.shape != (len(tokens),):
        raise CheckpointError(f"tokenizer.ggml.token_type: expected {len(tokens)}, found {len(types)}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.tokens: expected distinct ones, found {len(vocabulary)} of {len(tokens)}"
        )
    pairs = [_pair(merge, vocabulary) for merge in merges]
    alphabet = byte_alphabet()
    prefix = []
    if field(metadata, "tokenizer.ggml.add_bos_token", bool, pre == "llama-bpe"):
        prefix = [field(metadata, "tokenizer.ggml.bos_token_id", int)]
        if not 0 <= prefix[0] < len(tokens):
            raise CheckpointError(f"tokenizer.ggml.bos_token_id: expected below {len(tokens)}, found {prefix[0]}")
    pieces = [_piece(token, kind, alphabet) for token, kind in zip(tokens, types, strict=True)]
    missing = frozenset(byte for letter, byte in alphabet.items() if letter not in vocabulary)
    specials = [token for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    return BytePairTokenizer(_encoder(vocabulary, pairs, specials, pre), pieces, prefix, missing)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's letter for each byte: printable Latin-1 stands for itself, the other 68 for U+0100 and on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _pair(merge: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
        raise CheckpointError(f"tokenizer.ggml.merges: expected two tokens that join to one, found {shorten(merge)}")
    return left, right


def _piece(token: str, kind: int, alphabet: Mapping[str, int]) -> bytes:
    if kind not in (NORMAL, BYTE):
        return token.encode()
    try:
        return bytes(alphabet[letter] for letter in token)
    except KeyError:
        raise CheckpointError(f"tokenizer.ggml.tokens: expected byte letters, found {shorten(token)}") from None


def _encoder(vocabulary: dict[str, int], pairs: list[tuple[str, str]], specials: list[str], pre: str) -> Any:
    library = _library()
    # Llama 3 takes a piece that is itself a token as it is, whatever the merges say.
    model = library.models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe")
    encoder = library.Tokenizer(model)
    cuts = [library.pre_tokenizers.Split(library.Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
    letters = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = library.pre_tokenizers.Sequence([*cuts, letters])
    encoder.add_special_tokens([library.AddedToken(token, normalized=False) for token in specials if token])
    return encoder


def _library() -> ModuleType:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        message = "tokenizer: expected the package tokenizers, found none: pip install 'samelogits[hf]'"
        raise InputError(message) from error


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"text: expected Unicode, found a lone surrogate at {error.start}") from None


def _check_ids(ids: list[int], known: Container[int]) -> None:
    unknown = [i for i in ids if i not in known]
    if unknown:
        raise InputError(f"ids: expected ids of the vocabulary, found {unknown[0]}")
