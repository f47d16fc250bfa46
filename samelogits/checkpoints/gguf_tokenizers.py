"""The tokenizers that a GGUF file carries in its metadata: byte-level BPE, and SentencePiece's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from samelogits.checkpoints.checkpoint import Tokenizer
from samelogits.checkpoints.gguf_header import Value, field, shorten
from samelogits.checkpoints.sentencepiece import SPACE, SentencePieceTokenizer
from samelogits.checkpoints.tokenizers import check_ids, library_of_tokenizers, package_errors, utf8
from samelogits.errors import CheckpointError, InputError

# How the text is cut before the merges, by the name that llama.cpp gives to it: each pattern cuts the pieces that the
# one before it left, and what no pattern matches stays a piece.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_DIGITS = (r"\p{N}", _GPT2)
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
PRE_TOKENIZERS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys((*LLAMA3_NAMES, "dbrx", "smaug-bpe"), (_LLAMA3 % 3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_LLAMA3 % 1,)),
    "bloom": (r" ?[^(\s|.,!?…。，、।۔،)]+",),
}
_PRE, _DEFAULT_PRE = "tokenizer.ggml.pre", "default"  # what llama.cpp takes where a file has none
# Token types of GGUF: these three are found in the text as they are, before anything else; these two are spelled in
# the byte alphabet.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
NORMAL, BYTE = 1, 6


@dataclass(frozen=True)
class BytePairTokenizer:
    """encoder: text to ids. pieces: the bytes of each id. prefix: ids before every text. missing: bytes with no id."""

    encoder: Any
    pieces: list[bytes]
    prefix: list[int]
    missing: frozenset[int]

    def encode(self, text: str) -> list[int]:
        lost = self.missing.intersection(utf8(text))
        if lost:
            raise InputError(f"text: expected bytes that the vocabulary has, found {min(lost):#04x}")
        return self.prefix + list(self.encoder.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        check_ids(ids, range(len(self.pieces)))
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def gguf_tokenizer(metadata: Mapping[str, Value], where: str = "gguf metadata") -> Tokenizer:
    """The tokenizer of the tokenizer.ggml.* metadata; special tokens in the text become their ids.

    Puts the beginning-of-text token first where the file (or llama.cpp's default for it) says so. Raises InputError for
    a kind of tokenizer that is not supported and, for byte-level BPE, without the package `tokenizers`, CheckpointError
    for broken metadata.
    """
    builders: dict[str, Callable[[Mapping[str, Value]], Tokenizer]] = {
        "gpt2": _byte_pair_tokenizer,
        "llama": _sentence_piece_tokenizer,
    }
    metadata = {_PRE: _DEFAULT_PRE, **metadata}
    known = {"tokenizer.ggml.model": list(builders)}
    model = metadata.get("tokenizer.ggml.model")
    if isinstance(model, str) and model == "gpt2":  # an array would be compared element by element
        known[_PRE] = list(PRE_TOKENIZERS)
    for key, names in known.items():
        found = metadata.get(key)
        if not isinstance(found, str) or found not in names:
            raise InputError(f"{where}: {key}: expected {' or '.join(names)}, found {shorten(found)}")
    try:
        return builders[field(metadata, "tokenizer.ggml.model", str)](metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


class _Vocabulary:
    """The tokens of the metadata, with the type of each, and by text."""

    def __init__(self, metadata: Mapping[str, Value]):
        self.metadata = metadata
        self.tokens: list[str] = field(metadata, "tokenizer.ggml.tokens", list)
        self.types = self.numbers("token_type", NORMAL)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise CheckpointError(
                f"tokenizer.ggml.tokens: expected distinct ones, found {len(self.ids)} of {len(self.tokens)}"
            )

    def numbers(self, key: str, default: int | None = None) -> list[Any]:
        """One for each token."""
        key, size = f"tokenizer.ggml.{key}", len(self.tokens)
        values = field(self.metadata, key, np.ndarray, None if default is None else np.full(size, default))
        if values.shape != (size,):
            raise CheckpointError(f"{key}: expected {size}, found {len(values)}")
        return list(values.tolist())

    def prefix(self, begins: bool, first: int | None = None) -> list[int]:
        """The ids before every text. begins, first: what the absence of the keys means."""
        if not field(self.metadata, "tokenizer.ggml.add_bos_token", bool, begins):
            return []
        bos = field(self.metadata, "tokenizer.ggml.bos_token_id", int, first)
        if not 0 <= bos < len(self.tokens):
            raise CheckpointError(f"tokenizer.ggml.bos_token_id: expected below {len(self.tokens)}, found {bos}")
        return [bos]

    def whole(self) -> list[str]:
        """Tokens that are found in the text as they are."""
        kinds = (UNKNOWN, CONTROL, USER_DEFINED)
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if token and kind in kinds]


def _byte_pair_tokenizer(metadata: Mapping[str, Value]) -> BytePairTokenizer:
    words = _Vocabulary(metadata)
    merges: list[str] = field(metadata, "tokenizer.ggml.merges", list)
    pre = field(metadata, _PRE, str)
    pairs = [_pair(merge, words.ids) for merge in merges]
    alphabet = byte_alphabet()
    prefix = words.prefix(begins=pre in LLAMA3_NAMES)
    pieces = [_piece(token, kind, alphabet) for token, kind in zip(words.tokens, words.types, strict=True)]
    missing = frozenset(byte for letter, byte in alphabet.items() if letter not in words.ids)
    return BytePairTokenizer(_encoder(words.ids, pairs, words.whole(), pre), pieces, prefix, missing)


def _sentence_piece_tokenizer(metadata: Mapping[str, Value]) -> SentencePieceTokenizer:
    words = _Vocabulary(metadata)
    pieces, spare = [], {}
    for i, (token, kind) in enumerate(zip(words.tokens, words.types, strict=True)):
        if kind == BYTE:
            if not re.fullmatch("<0x[0-9A-F]{2}>", token):
                raise CheckpointError(f"tokenizer.ggml.tokens: expected a byte like <0x0A>, found {shorten(token)}")
            spare[int(token[3:5], 16)] = i
            pieces.append(bytes.fromhex(token[3:5]))
        else:
            pieces.append((token if kind in (UNKNOWN, CONTROL, USER_DEFINED) else token.replace(SPACE, " ")).encode())
    return SentencePieceTokenizer(
        vocabulary=words.ids,
        scores=words.numbers("scores"),
        pieces=pieces,
        whole=frozenset(words.whole()),
        spare=spare,
        prefix=words.prefix(begins=True, first=1),
        leading_space=field(metadata, "tokenizer.ggml.add_space_prefix", bool, True),
    )


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
    library = library_of_tokenizers()
    with package_errors(CheckpointError, "tokenizer.ggml: expected a vocabulary that the package tokenizers takes"):
        # Llama 3 takes a piece that is itself a token as it is, whatever the merges say.
        model = library.models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in LLAMA3_NAMES)
        encoder = library.Tokenizer(model)
        cuts = [library.pre_tokenizers.Split(library.Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
        letters = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoder.pre_tokenizer = library.pre_tokenizers.Sequence([*cuts, letters])
        encoder.add_special_tokens([library.AddedToken(token, normalized=False) for token in specials])
    return encoder
