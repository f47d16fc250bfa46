"""Configs and tokenizers under fuzzing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import replace
from random import Random
from typing import Any

import by_hand
import cases_gpt
import cases_llama
import cases_moe
import cases_other
from by_hand import Value
from checkpoint_files import GPT2_JSON, LLAMA_JSON
from fuzz_gguf import GgufMutation
from fuzz_loader import TINY, checkpoint_of
from fuzz_mutations import JsonMutation
from fuzz_parser import Parser, Scratch, filled, gguf_file, must_refuse, same
from test_tokenizers import metadata, scored

from samelogits.checkpoints import save_checkpoint
from samelogits.checkpoints.canonical import read_canonical
from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.checkpoints.gguf_file import read_gguf
from samelogits.checkpoints.gguf_header import read_header
from samelogits.checkpoints.gguf_tokenizers import gguf_tokenizer
from samelogits.checkpoints.json_file import parse_json
from samelogits.checkpoints.meta import META
from samelogits.checkpoints.tokenizers import JsonTokenizer
from samelogits.config import DecoderConfig
from samelogits.errors import CheckpointError, ConfigError
from samelogits.parameters import parameter_shapes

CASES = cases_llama.CASES | cases_moe.CASES | cases_other.CASES | cases_gpt.CASES
PARAMS = (
    {"dim": 48, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2, "multiple_of": 10, "ffn_dim_multiplier": 1.3,
     "norm_eps": 3e-6, "vocab_size": 14, "rope_theta": 5000.0, "use_scaled_rope": True, "max_batch_size": 3},
    {"dim": 24, "n_layers": 3, "n_heads": 4, "hidden_dim": 28, "head_dim": 10, "norm_eps": 1e-3, "vocab_size": 31,
     "tied_embeddings": True, "max_seq_len": 40, "rope_theta": 700.0, "sliding_window": 5},
)  # fmt: skip
NESTED = {"rope_scaling", "rope_parameters", "attn_config"}


def config() -> Parser:
    """The config.json of every family, and Meta's params.json."""
    families = FAMILIES | {META.model_type: META}
    cases = CASES | {"gpt2": (GPT2_JSON, *CASES["gpt2"]), "llama": (LLAMA_JSON, *CASES["llama"]), "meta": PARAMS}
    seeds = {
        f"{name} {i}": json.dumps({"model_type": name} | case).encode()
        for name, family_cases in cases.items()
        for i, case in enumerate(family_cases)
    }

    def check(data: bytes) -> None:
        values = parse_json(data, "config.json")
        name = values.get("model_type")
        if not isinstance(name, str) or name not in families:
            raise CheckpointError("config.json: model_type")
        family = families[name]
        found = family.read_config(values, "config.json")
        if not family.limits(found):
            again = by_hand.strict_json(json.dumps(family.write_config(found)).encode())
            same(family.read_config(again, "again"), found, f"config of {name}")
        must_refuse(family.read_config, values | {"no_such_key": 1}, "config.json")
        for key in NESTED & values.keys():
            if values[key]:
                must_refuse(family.read_config, values | {key: values[key] | {"no_such_key": 1}}, "config.json")

    return Parser(seeds, JsonMutation(seeds.values()), check)


def canonical() -> Parser:
    """The config.json of the project's own folder, beside the weights of a small model."""
    scratch = Scratch()
    save_checkpoint(checkpoint_of(TINY), scratch.path / "tiny", "canonical")
    (scratch.path / "tiny" / "model.safetensors").rename(scratch.path / "model.safetensors")
    scratch.write("tokenizer.json", b"{}")
    whole = json.loads((scratch.path / "tiny" / "config.json").read_bytes())
    several = [FAMILIES[name].read_config({"model_type": name} | case, name) for name in CASES for case in CASES[name]]
    decoders = [_like_tiny(config).to_dict() for config in several] + [config.to_dict() for config in several[::4]]
    texts = {
        json.dumps(whole | {"decoder": decoder, "tokenizer": "bytes", "eos_token_ids": [1]}) for decoder in decoders
    }
    seeds = {f"{i}": text.encode() for i, text in enumerate(sorted(texts))}

    def check(data: bytes) -> None:
        decoder = parse_json(data, "config.json").get("decoder")
        if isinstance(decoder, dict):
            found = DecoderConfig.from_dict(decoder)
            written = json.loads(json.dumps(found.to_dict()))
            same(DecoderConfig.from_dict(written), found, "config")
            for name, value in written.items():
                meant = decoder[name]
                same(value, dict.fromkeys(value) | meant if isinstance(meant, dict) else meant, name)
        read_canonical(scratch.write("config.json", data).parent)

    return Parser(seeds, JsonMutation(seeds.values()), check)


def _like_tiny(other: DecoderConfig) -> DecoderConfig:
    """TINY with everything of another config that leaves it its weights."""
    config, shapes = TINY, parameter_shapes(TINY)
    windows = {"sliding_window": other.sliding_window, "sliding_layers": (0,) if other.sliding_layers else ()}
    for change in (windows, *({field.name: getattr(other, field.name)} for field in dataclasses.fields(other))):
        with contextlib.suppress(ConfigError):
            changed = replace(config, **change)
            config = changed if parameter_shapes(changed) == shapes else config
    return config


def gguf() -> Parser:
    """Files of every architecture, up to their config and the shapes of their tensors."""
    from gguf_files import CASES as ARCHITECTURES  # they need the package gguf
    from gguf_files import made

    scratch = Scratch()
    seeds = {}
    for name, case in ARCHITECTURES.items():
        path = scratch.path / "seed.gguf"
        made(path, case)
        data = path.read_bytes()
        path.unlink()
        if (end := by_hand.gguf(data).end) < 2**13:  # longer ones are slow, and have the same keys
            seeds[name] = data[:end]

    def check(data: bytes) -> None:
        checkpoint = read_gguf(scratch.write("model.gguf", filled(data)))
        assert list(checkpoint.tensors) == list(parameter_shapes(checkpoint.config))
        header = by_hand.gguf(data)
        name = dict(header.metadata)[b"general.architecture"].value
        header.metadata.append((name + b".no_such_key", Value(4, 1)))
        must_refuse(read_gguf, scratch.write("more.gguf", filled(by_hand.gguf_bytes(header))))

    return Parser(seeds, GgufMutation(seeds.values(), of_metadata=0.9), check)


TEXTS = ("", "Hello, world!  12345\n", "a\u0301é 🙂 <s>ab c\u2581", "a" * 100, "<|im_start|>don't\t\r\n \x00 ")


def tokenizers() -> Parser:
    """tokenizer.json, and the vocabularies of GGUF files."""
    scratch = Scratch()
    vocabularies = {"byte pairs": metadata(pre="llama-bpe"), "scores": scored(add_bos_token=True)}
    seeds = {name: gguf_file(values) for name, values in vocabularies.items()}
    of_gguf = GgufMutation(seeds.values())
    texts = {name: json.dumps(tokenizer).encode() for name, tokenizer in _tokenizers().items()}
    of_json = JsonMutation(texts.values(), ["(a+)+b", "(", "Ġ", "byte_fallback", 1e40])

    def check(data: bytes) -> None:
        if data.startswith(b"GGUF"):
            tokenizer = gguf_tokenizer(read_header(scratch.write("model.gguf", data)).metadata)
        else:
            tokenizer = JsonTokenizer(scratch.write("tokenizer.json", data))
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert all(type(i) is int and i >= 0 for i in ids)
            assert isinstance(tokenizer.decode(ids), str)

    def mutate(data: bytes, random: Random) -> bytes:
        return (of_gguf if data.startswith(b"GGUF") else of_json)(data, random)

    return Parser(seeds | texts, mutate, check)


def _tokenizers() -> dict[str, Any]:
    """Small tokenizer.json files, one for each model and most of what may stand around it."""
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    token = {"id": 0, "content": "<s>", **added}
    base = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [token], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
    }  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}"}, "behavior": "Isolated", "invert": False}
    template = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [0],
        "tokens": ["<s>"]}},
    }  # fmt: skip
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    merged = {"type": "BPE", "dropout": None, "unk_token": "<s>", "continuing_subword_prefix": None,
              "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}  # fmt: skip
    return {
        "bpe": base | {
            "model": merged | {"vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4}, "merges": [["a", "b"]]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}, "decoder": byte_level,
            "post_processor": template, "truncation": {"direction": "Right", "max_length": 3, "stride": 0,
                                                       "strategy": "LongestFirst"},
        },
        "unigram": base | {
            "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<s>", 0.0], ["a", -1.5], ["\u2581a", -2.5]],
                      "byte_fallback": False},
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "_"},
                           {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
            "pre_tokenizer": metaspace, "decoder": metaspace,
        },
        "wordpiece": base | {
            "model": {"type": "WordPiece", "unk_token": "<s>", "continuing_subword_prefix": "##",
                      "max_input_chars_per_word": 100, "vocab": {"<s>": 0, "a": 1, "##b": 2}},
            "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                           "strip_accents": None, "lowercase": True},
            "pre_tokenizer": {"type": "BertPreTokenizer"}, "decoder": {"type": "WordPiece", "prefix": "##",
                                                                       "cleanup": True},
            "padding": {"strategy": {"Fixed": 5}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                        "pad_type_id": 0, "pad_token": "<s>"},
        },
        "wordlevel": base | {"model": {"type": "WordLevel", "vocab": {"<s>": 0, "a": 1}, "unk_token": "<s>"},
                             "pre_tokenizer": {"type": "Whitespace"}},
    }  # fmt: skip
