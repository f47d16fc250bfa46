"""What every reader returns and every writer takes: a config, and canonical tensors read on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from samelogits.checkpoints.tensors import Parameters, StoredTensor
from samelogits.config import DecoderConfig
from samelogits.errors import InputError


class Tokenizer(Protocol):
    """Text to token ids and back, as the checkpoint's authors meant it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


def no_tokenizer() -> Tokenizer:
    raise InputError("prompt: expected a checkpoint with a tokenizer, found none: give token ids instead")


def tokenizer_loader(source: Path | Literal["bytes"] | None) -> Callable[[], Tokenizer]:
    """What builds the tokenizer of a tokenizer.json, the one of plain bytes, or raises InputError for None."""
    if source is None:
        return no_tokenizer

    def load() -> Tokenizer:
        # Imported when asked for: most uses of a checkpoint need no tokenizer.
        from samelogits.checkpoints.tokenizers import ByteTokenizer, JsonTokenizer

        return ByteTokenizer() if source == "bytes" else JsonTokenizer(source)

    return load


class LazyTensors(Mapping[str, StoredTensor]):
    """Tensor name to StoredTensor, made by the function of that name at each access; nothing is kept."""

    def __init__(self, readers: Mapping[str, Callable[[], StoredTensor]]):
        self._readers = readers

    def __getitem__(self, name: str) -> StoredTensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True)
class Checkpoint:
    """source: what the user named. format: "canonical", "state_dict", "orbax", "huggingface", "meta", "gguf",
    "nanogpt", "mingpt" or "random".

    tensors: canonical name to StoredTensor, in the order of parameter_shapes(config), read at each access.
    load_tokenizer: builds the tokenizer when asked, or raises InputError. eos_token_ids: tokens that end a text.
    tokenizer_source: what a writer takes along, a tokenizer.json or "bytes"; None where there is neither.
    metadata: facts worth showing that change nothing (file names, stored dtypes, quantisation).
    """

    source: str
    format: str
    config: DecoderConfig
    tensors: Mapping[str, StoredTensor]
    load_tokenizer: Callable[[], Tokenizer] = no_tokenizer
    eos_token_ids: tuple[int, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    tokenizer_source: Path | Literal["bytes"] | None = None

    def parameters(self) -> Mapping[str, np.ndarray]:
        """Canonical name to float32 (float64 for F64) array; nothing is kept."""
        return Parameters(self.tensors)
