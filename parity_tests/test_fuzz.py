"""A short run of the fuzzing, what longer ones have found, and parsers without one of their checks, each caught.

The long runs are those of `nox -s fuzz`: docs/fuzzing.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from typing import Any

import by_hand
import numpy as np
import pytest
from fuzz import PARSERS
from fuzz_loader import TINY
from fuzz_parser import Finding, Parser, execute, forget_high_water, gguf_file, load
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import samelogits.config
from samelogits.checking.candidates import name_map, recording
from samelogits.checkpoints import (
    families,
    gguf_header,
    huggingface,
    json_file,
    orbax_folder,
    pickles,
    safetensors_file,
    tokenizers,
)
from samelogits.checkpoints.families import foreign_config

NEEDS = {
    "gguf": "gguf",
    "loader": "gguf",
    "name_map": "yaml",
    "orbax": "orbax",
    "pickles": "torch",
    "tokenizers": "tokenizers",
}
EXAMPLES = 400  # some seconds for all parsers; a control ends with its finding, and may take four times as many


@cache
def parser(name: str) -> Parser:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs the package {NEEDS[name]}")
    return load(PARSERS[name])


def short_run(parser: Parser, examples: int, phases: tuple[Phase, ...] = (Phase.generate, Phase.shrink)) -> int:
    """So many changed files, always the same ones; how many were accepted. Raises Finding."""
    accepted = 0

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, phases=phases,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.sampled_from(list(parser.seeds.values())), st.randoms(use_true_random=False))
    def run(data: bytes, random: Random) -> None:
        nonlocal accepted
        accepted += execute(parser, parser.mutate(data, random))

    forget_high_water()
    run()
    return accepted


@pytest.mark.parametrize("name", PARSERS)
def test_changed_files_are_read_rightly_or_refused(name: str) -> None:
    assert short_run(parser(name), EXAMPLES) > EXAMPLES // 100


def of(name: str, *path: str | int, value: Any) -> Callable[[Mapping[str, bytes]], bytes]:
    """The seed of this name, a JSON text, with this value in its place."""

    def edited(seeds: Mapping[str, bytes]) -> bytes:
        whole = json.loads(seeds[name])
        inner = whole
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return json.dumps(whole).encode()

    return edited


def undecodable(seeds: Mapping[str, bytes]) -> bytes:
    """The archive, the first member's name being no UTF-8 where it lies, and right in the directory at the end."""
    data = bytearray(seeds["least.npz"])
    data[7] |= 8
    data[30] = 0x93
    return bytes(data)


def zero_in_front(seeds: Mapping[str, bytes]) -> bytes:
    """The archive, one size being written as 03, which NumPy doesn't read."""
    with zipfile.ZipFile(io.BytesIO(seeds["least.npz"])) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data.replace(b"(1, 3)", b"(1,03)"))
    return written.getvalue()


def wide_number(seeds: Mapping[str, bytes]) -> bytes:
    """A number of 64 bits that 32 can't hold, which NumPy warned of."""
    header = by_hand.gguf(seeds["llama"])
    place = [key for key, _ in header.metadata].index(b"llama.rope.freq_base")
    header.metadata[place] = b"llama.rope.freq_base", by_hand.Value(12, 1e300)
    return by_hand.gguf_bytes(header)


def several_ends(seeds: Mapping[str, bytes]) -> bytes:
    """Three ids of the end, as large as can be: NumPy shows them on two lines."""
    header = by_hand.gguf(seeds["llama"])
    ends = by_hand.Value(by_hand.ARRAY, [2**63 - 1] * 3, of=11)
    header.metadata.append((b"tokenizer.ggml.eos_token_id", ends))
    return by_hand.gguf_bytes(header)


def longer_than_its_record(seeds: Mapping[str, bytes]) -> bytes:
    """The archive with a byte less in one record, where another one has the size that it should have."""
    return by_hand.with_member(seeds["state dict"], "archive/data/3", bytes(95))


def another_case(seeds: Mapping[str, bytes]) -> bytes:
    """The archive with a record twice, in capitals too, which PyTorch doesn't tell apart."""
    data = io.BytesIO(seeds["plain"])
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr("archive/DATA/0", bytes(96))
    return data.getvalue()


def shorter_than_its_record(seeds: Mapping[str, bytes]) -> bytes:
    """The archive, a second storage being on the record of the first, by a number in place of a word."""
    content = by_hand.members(seeds["plain"])["archive/data.pkl"]
    assert content.count(b"BFloat16Storage\nq\x0fX\x01\x00\x00\x001") == 1
    changed = content.replace(b"BFloat16Storage\nq\x0fX\x01\x00\x00\x001", b"BFloat16Storage\nq\x0fK\x00")
    return by_hand.with_member(seeds["plain"], "archive/data.pkl", changed)


def odd_heads(seeds: Mapping[str, bytes]) -> bytes:
    """Llama 3's file with heads of 17, whose half is no whole number."""
    header = by_hand.gguf(seeds["llama 3"])
    header.metadata = [(key, by_hand.Value(4, 17) if key == b"llama.attention.key_length" else value)
                       for key, value in header.metadata if key != b"llama.rope.dimension_count"]  # fmt: skip
    return by_hand.gguf_bytes(header)


def odd_separator(seeds: Mapping[str, bytes]) -> bytes:
    """The directory, what stands between numbers of chunks being a control character, which TensorStore repeats."""
    files = by_hand.unpacked(seeds["apart"])
    files["b--.zarray"] = files["b--.zarray"].replace(b'"dimension_separator":"."', b'"dimension_separator":"\\u007f"')
    return by_hand.packed(files)


# What runs have found, by the parser and out of its seeds.
FOUND: dict[str, tuple[str, Callable[[Mapping[str, bytes]], bytes]]] = {
    "shard named with a control character": ("json", lambda seeds: b'{"weight_map": {"a": "\\f.safetensors"}}'),
    "archive with a name that is no UTF-8": ("recordings", undecodable),
    "array with a line break in its name": (
        "recordings",
        lambda seeds: b'8\0\0\0\0\0\0\0{"\\n":{"shape":[],"dtype":"I64","data_offsets":[24,32]}}',
    ),
    "storage longer than its record": ("pickles", longer_than_its_record),
    "storage shorter than its record": ("pickles", shorter_than_its_record),
    "heads of an odd width": ("gguf", odd_heads),
    "record in another case": ("pickles", another_case),
    "control character that a library repeats": ("orbax", odd_separator),
    "shape that is no tuple of Python's": ("recordings", zero_in_front),
    "one number for all rotary factors": (
        "canonical",
        of("0", "decoder", "rope_scaling",
           value={"kind": "longrope", "original_length": 4, "short_factors": 2.5, "long_factors": [1.0, 2.0],
                  "attention_factor": 1.0}),
    ),
    "rotary scaling that can't be printed": (
        "canonical", of("0", "decoder", "rope_scaling", value={"kind": "linear", "factor": 2, "truncate": "\u2028"})
    ),
    "endless word": ("canonical", of("0", "decoder", "norm", value="a" * 5000)),
    "endless list": ("canonical", of("0", "decoder", "no_rope_layers", value=list(range(5000)))),
    "many unknown fields": ("canonical", of("0", "decoder", value={str(i) * 9: 0 for i in range(5000)})),
    "experts without end": (
        "canonical",
        of("0", "decoder",
           value=TINY.to_dict() | {"n_experts": 2**16, "n_active_experts": 1, "expert_width": 1}),
    ),
    "panic over a template": ("tokenizers", of("bpe", "post_processor", "special_tokens", value={})),
    "panic over a prefix": ("tokenizers", of("bpe", "model", "continuing_subword_prefix", value="####")),
    "query_pre_attn_scalar beyond a width": ("config", of("gemma2 0", "query_pre_attn_scalar", value=2**24 + 1)),
    "number beyond 32 bits": ("gguf", wide_number),
    "numbers in place of one": ("gguf", several_ends),
    "kind of vocabulary in an array": (
        "tokenizers", lambda seeds: gguf_file({"tokenizer.ggml.model": np.array([8, 9], np.int32)})
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "make"), FOUND.values(), ids=FOUND)
def test_what_was_found_is_mended(name: str, make: Callable[[Mapping[str, bytes]], bytes]) -> None:
    made = parser(name)
    forget_high_water()
    execute(made, make(made.seeds))


def silent(*given: Any, **options: Any) -> None:
    """In place of a check that raises."""


# What a parser is left without: the parser, where the check is, and what stands in its place.
CONTROLS: dict[str, tuple[str, Any, str, Any]] = {
    "gaps and overlaps": ("safetensors", safetensors_file, "_check_layout", silent),
    "sizes that are whole numbers": ("safetensors", safetensors_file, "_are_sizes", lambda value: True),
    "plain names of tensors": ("safetensors", safetensors_file, "NAME", re.compile(".*", re.DOTALL)),
    "lone surrogates": ("json", json_file, "_is_shallow_text", lambda value: True),
    "names that stay in the folder": ("json", huggingface, "inside", lambda folder, name: folder / name),
    "an index that lies": ("json", huggingface, "raise_faults", silent),
    "bytes that remain": ("gguf_header", gguf_header._Parser, "take", lambda self, size, key: self.file.read(size)),
    "dimensions": ("gguf_header", gguf_header, "RANK_LIMIT", 99),
    "unknown keys": ("config", foreign_config.ForeignConfig, "finish", silent),
    "types of keys": ("config", foreign_config.ForeignConfig, "take",
                      lambda self, key, kind, default=None: self._left.pop(key, default)),
    "types of fields": ("canonical", samelogits.config, "_check_type", silent),
    "unknown arrays": ("recordings", recording, "_check_names", silent),
    "patterns that take for ever": ("name_map", name_map, "_ambiguity", silent),
    "errors of the package": ("tokenizers", tokenizers, "package_errors", lambda *given: contextlib.nullcontext()),
    "records of the sizes": ("pickles", pickles.PickleFile, "_are_records", lambda *given: True),
    "names that stand twice": ("orbax", orbax_folder, "raise_faults", silent),
    "rotary pairs": ("loader", families, "turn_pairs", lambda rows, *given, **options: rows),
}  # fmt: skip


@pytest.mark.parametrize(("name", "owner", "check", "other"), CONTROLS.values(), ids=CONTROLS)
def test_a_parser_without_a_check_is_found(
    name: str, owner: Any, check: str, other: Any, monkeypatch: pytest.MonkeyPatch, record_property: Callable
) -> None:
    made = parser(name)
    monkeypatch.setattr(owner, check, other)
    with pytest.raises(Finding) as caught:
        short_run(made, 20 * EXAMPLES, (Phase.generate,))  # ends with the first finding
    record_property("negative control", f"{name} without {check}: {str(caught.value)[:90]}")
