"""Files of tensors and vocabularies under fuzzing: safetensors, GGUF, JSON and the index of shards, recordings."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import by_hand
import numpy as np
from by_hand import ARRAY, BOOL, STRING, Gguf, Value
from checkpoint_files import LLAMA, raw
from fuzz_gguf import GgufMutation
from fuzz_mutations import JsonMutation, npz_mutation, safetensors_mutation, shifted, shuffled
from fuzz_parser import DATA, Parser, Scratch, filled, gguf_file, header_of, same

from samelogits.checking.candidates.name_map import MAPS, NameMap
from samelogits.checking.candidates.recording import Recording, read_recording, write_recording
from samelogits.checkpoints.gguf_header import read_header
from samelogits.checkpoints.huggingface import WEIGHTS, _open_weights
from samelogits.checkpoints.json_file import parse_json
from samelogits.checkpoints.safetensors_file import SafetensorsFile, write_safetensors
from samelogits.checkpoints.tensors import DTYPES, StoredTensor


def safetensors() -> Parser:
    """Headers and data."""
    scratch = Scratch()
    several = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [24, 30]},
        "mask": {"dtype": "BOOL", "shape": [1, 2], "data_offsets": [30, 32]},
        "none": {"dtype": "F64", "shape": [0, 4], "data_offsets": [32, 32]},
        "d": {"dtype": "F16", "shape": [], "data_offsets": [32, 34]},
    }
    seeds = {
        "several": raw(several, DATA[:34]),
        "one": raw({"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, DATA[:3]),
        "none": raw({}),
    }

    def check(data: bytes) -> None:
        file = SafetensorsFile(scratch.write("model.safetensors", data))
        expected = by_hand.safetensors(data)
        assert set(file) == set(expected)
        for name, (dtype, shape, content) in expected.items():
            assert re.fullmatch(r"(?!.*\.\.)[a-zA-Z0-9_.:-]{1,256}", name), f"name: {name!r}"
            entry = file.entries[name]
            same((entry.dtype, entry.shape), (dtype, shape), name)
            if dtype in DTYPES:
                assert file[name].array.tobytes() == content, f"{name}: other bits"

    return Parser(seeds, safetensors_mutation(JsonMutation(map(header_of, seeds.values()))), check)


def gguf_header() -> Parser:
    """Metadata, list of tensors and their data."""
    scratch = Scratch()
    values = {
        "general.architecture": "llama", "general.alignment": 32, "a.bool": True, "a.float": 0.5,
        "a.strings": ["a", "", "é"], "a.numbers": np.arange(3, dtype=np.int32),
    }  # fmt: skip
    plain = gguf_file(values, [("a", (2, 3), 0), ("b.weight", (5,), 1), ("c", (1, 2, 1, 32), 8)])
    kinds = Gguf(2, [(b"k%d" % kind, Value(kind, 1)) for kind in by_hand.NUMBERS])
    kinds.metadata += [(b"l%d" % kind, Value(ARRAY, [1, 0], kind)) for kind in (*by_hand.NUMBERS, BOOL)]
    seeds = {"plain": filled(plain), "kinds": by_hand.gguf_bytes(kinds), "none": gguf_file({})}

    def check(data: bytes) -> None:
        header = read_header(scratch.write("model.gguf", data))
        expected = by_hand.gguf(data)
        same(header.version, expected.version, "version")
        same([key.encode() for key in header.metadata], [key for key, _ in expected.metadata], "keys")
        for found, (key, value) in zip(header.metadata.values(), expected.metadata, strict=True):
            same(found.tolist() if isinstance(found, np.ndarray) else found, _meant(value), repr(key))
        places = by_hand.gguf_places(expected)
        same(list(header.tensors), list(places), "tensors")
        for name, (kind, shape, begin, end) in places.items():
            info = header.tensors[name]
            same((info.type.name, info.shape, info.offset, info.size), (kind, shape, begin, end - begin), name)
            assert end <= len(data)
            assert header.read(info).tobytes() == data[begin:end], f"{name}: other bits"

    return Parser(seeds, GgufMutation(seeds.values()), check)


def _meant(value: Value) -> Any:
    """The value in Python's types."""
    if value.kind == ARRAY:
        return [_meant(Value(value.of, item)) for item in value.value]
    if value.kind == BOOL and value.value > 1:
        raise ValueError(f"a boolean of {value.value}")
    kinds = {STRING: bytes.decode, BOOL: bool}
    return kinds[value.kind](value.value) if value.kind in kinds else value.value


def json_file() -> Parser:
    """Any JSON; what has a weight_map is then the index of a folder with these shards, and of one that leads out."""
    scratch = Scratch()
    outside = "../outside.safetensors"
    shards = {"a.safetensors": ("x", "y"), "b.safetensors": ("z",), outside: ("z",)}
    for shard, names in shards.items():
        write_safetensors(scratch.path / shard, {name: StoredTensor("F32", np.ones(2, "<f4")) for name in names}, {})
    (scratch.path / "link.safetensors").symlink_to(outside)
    index = {name: shard for shard, names in shards.items() for name in names if shard != outside}
    text = {"a": [1, -2.5, 1e300, None, True, {"b": {"é": "\U0001f600"}}], "b": "\n", "c": [[[[]]]], "": -0.0}
    seeds = {
        "index": json.dumps({"weight_map": index, "metadata": {"total_size": 24}}).encode(),
        "least": b'{"weight_map": {"z": "b.safetensors"}}',
        "text": json.dumps(text, indent=1, ensure_ascii=False).encode(),
    }

    def check(data: bytes) -> None:
        found = parse_json(data, "a.json")
        same(found, by_hand.strict_json(data), "value")
        if "weight_map" not in found:
            return
        scratch.write(f"{WEIGHTS}.index.json", data)
        opened = _open_weights(scratch.path, False)
        where = sorted((name, shard) for shard, names in opened.items() for name in names)
        same(where, sorted(found["weight_map"].items()), "index")
        for shard, entries in opened.items():
            assert shard != outside
            same(sorted(entries), sorted(shards[shard]), shard)

    odd = [*shards, "link.safetensors", "./a.safetensors", "c.safetensors", "a.bin"]
    return Parser(seeds, JsonMutation(seeds.values(), odd), check)


def recordings() -> Parser:
    """Archives of NumPy and safetensors that a candidate's arrays lie in."""
    scratch = Scratch()
    tokens = np.array([[1, 4, 0]])
    taps = {"norm": np.ones((1, 3, 12)), "layers.0.self_attn.q": np.arange(120, dtype=np.float16).reshape(1, 3, 40)}
    recording = Recording(
        tokens, np.arange(33, dtype=np.float32).reshape(1, 3, 11), np.array([[0, 1, 1]]), loss=2.5, losses=[1.5, 1.0],
        gradients={"model.norm.weight": np.ones(12)}, log_probabilities=np.zeros((1, 3)), taps=taps,
        precision="float32", source="a port",
    )  # fmt: skip
    seeds = {}
    for suffix in ("npz", "safetensors"):
        for name, each in {"all": recording, "least": Recording(tokens, recording.logits)}.items():
            path = scratch.path / f"seed.{suffix}"
            write_recording(path, each, overwrite=True)
            seeds[f"{name}.{suffix}"] = path.read_bytes()
    facts = np.frombuffer(b'{"uint16": "bfloat16", "precision": "bfloat16"}', np.uint8)
    path = scratch.path / "seed.npz"
    np.savez_compressed(path, tokens=tokens, logits=np.arange(48, dtype=np.uint16).reshape(1, 3, 16), metadata=facts)
    seeds["packed.npz"] = path.read_bytes()
    facts_of = [by_hand.npz(data)["metadata"].tobytes() for name, data in seeds.items() if name != "least.npz"
                and name.endswith("npz")]  # fmt: skip
    headers = [header_of(data) for name, data in seeds.items() if name.endswith("safetensors")]
    of_npz, of_safetensors = npz_mutation(JsonMutation(facts_of)), safetensors_mutation(JsonMutation(headers))

    def check(data: bytes) -> None:
        zipped = data.startswith(b"PK")
        found = read_recording(scratch.write(f"a.{'npz' if zipped else 'safetensors'}", data), LLAMA)
        arrays = by_hand.npz(data) if zipped else _arrays(by_hand.safetensors(data))
        output = found.run(found.probe)
        same(found.probe.tokens_BT.tolist(), arrays["tokens"].tolist(), "tokens")
        if "attention_mask" in arrays:
            same(found.probe.mask_BT.tolist(), (arrays["attention_mask"] != 0).tolist(), "attention_mask")
        read = {f"taps/{name}": array for name, array in output.taps.items() if name != "logits"}
        read |= {f"gradients/{name}": array for name, array in output.gradients.items()}
        read["logits"] = output.logits
        if output.log_probabilities is not None:
            read["log_probabilities"] = output.log_probabilities
        if output.loss is not None:
            read["loss"] = np.array(output.loss)
        if output.losses:
            read["losses"] = np.array(output.losses)
        for name, array in read.items():
            meant = arrays[name][..., :11] if name == "logits" else arrays[name]
            if meant.dtype == np.uint16:
                meant = (meant.astype(np.uint32) << 16).view(np.float32)
            with np.errstate(all="ignore"):
                same(array.ravel().tolist(), meant.astype(array.dtype).ravel().tolist(), name)

    def mutate(data: bytes, random: Any) -> bytes:
        return (of_npz if data.startswith(b"PK") else of_safetensors)(data, random)

    return Parser(seeds, mutate, check)


def _arrays(tensors: by_hand.Tensors) -> dict[str, np.ndarray]:
    kinds = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2", "BOOL": "?"}
    kinds |= {f"{sign}{8 * size}": f"{sign.lower()}{size}" for sign in "IU" for size in (1, 2, 4, 8)}
    return {
        name: np.frombuffer(data, f"<{kinds[dtype]}").reshape(shape) for name, (dtype, shape, data) in tensors.items()
    }


WORDS = rb"""
    &x *x <<: !!python/object/apply:os.getcwd !!binary | > - ? %YAML --- ... 2001-01-01 0x1F 1:1:1 ~ yes .inf [ { } ] :
    '' " # pattern tap part index split layout parts sizes axis input BTNH q embedded -4 64 16777217
    layers.\1.self_attn.q layers.0.residual_out layers.99999.input_layernorm
""".split()
PIECES = rb"""
    (a+)+b (?:a|a)*b (?:a*)*b (a|aa)+b .* a? a{2,9} (?=a) (?P<n>a) (?P=n) (?i) [[a] \1 \9 ( \g<1> (?(1)a|b) (?<!a) \Z $
    [^]] (?x) (?# ++ a{99999} *+ (?>a) a** (?:a{1000}){1000} | ) \
""".split()
MODULES = ("a", "model.layers.7.self_attn.q_proj", "transformer.h.0", "h.1.mlp.c_fc", "a" * 200, "aab." * 50, "a" * 201)


def name_map() -> Parser:
    """Rules in YAML, and the regular expressions in them."""
    import yaml

    seeds = {}
    for path in MAPS.glob("*.yaml"):
        rules = re.findall(rb"^  - .*\n(?:    .*\n)*", path.read_bytes(), re.MULTILINE)
        for i in range(0, len(rules), 2):
            seeds[f"{path.stem} {i}"] = b"rules:\n" + b"".join(rules[i : i + 2])
    seeds["own"] = b"rules:\n- pattern: a(\\d)?\n  tap: [embedded]\n  index: 0\n  split: {sizes: [q], axis: 1}\n"

    def check(data: bytes) -> None:
        found = NameMap.parse(data, "map.yaml")
        try:
            said = yaml.load(data, yaml.CSafeLoader)["rules"]
        except yaml.YAMLError:  # stricter with colons than the loader in Python
            said = yaml.safe_load(data)["rules"]
        same([rule.pattern.pattern for rule in found.rules], [rule["pattern"] for rule in said], "patterns")
        taps = [[rule["tap"]] if isinstance(rule["tap"], str) else rule["tap"] for rule in said]
        same([list(rule.taps) for rule in found.rules], taps, "taps")
        for key in ("part", "index", "layout"):
            default = "output" if key == "part" else None
            same([getattr(rule, key) for rule in found.rules], [rule.get(key, default) for rule in said], key)
        plan = found.plan(MODULES)
        with warnings.catch_warnings(action="ignore"):
            known = {module for module in MODULES[:-1] for rule in said if re.fullmatch(rule["pattern"], module, re.A)}
        same(sorted(plan.known), sorted(known), "modules")

    def mutate(data: bytes, random: Any) -> bytes:
        match random.randrange(5):
            case 0:
                return shifted(data, random)
            case 1 | 2:
                at = random.choice([0, *(found.end() for found in re.finditer(rb"pattern: '?", data))])
                return data[:at] + random.choice(PIECES) + data[at:]
            case _:
                return shuffled(data, random, WORDS)

    return Parser(seeds, mutate, check)
