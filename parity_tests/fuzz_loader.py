"""Whole checkpoints under fuzzing: opened, read to the last tensor, and compared with slices of the files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import by_hand
import numpy as np
from checkpoint_files import GPT2, LLAMA
from fuzz_gguf import GgufMutation
from fuzz_mutations import JsonMutation, folder_mutation, safetensors_mutation
from fuzz_parser import Parser, Scratch, filled, gguf_file, header_of, same
from test_gguf import gguf_name

from samelogits.checkpoints import open_checkpoint, save_checkpoint
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.safetensors_file import write_safetensors
from samelogits.checkpoints.tensors import DTYPES, StoredTensor
from samelogits.config import DecoderConfig
from samelogits.parameters import parameter_shapes, random_parameters

TINY = replace(LLAMA, vocab_size=5, d_model=6, n_heads=2, n_kv_heads=1, d_head=4, d_ff=3, n_layers=1)
TINY_GPT2 = replace(GPT2, vocab_size=5, d_model=6, n_heads=2, n_kv_heads=2, d_head=3, d_ff=4, n_layers=1)
Bits = dict[str, tuple[str, np.ndarray]]  # name to dtype and the bits in order


def loader() -> Parser:
    """Folders of four kinds and a GGUF file, opened and read to the last tensor."""
    scratch = Scratch()
    seeds = {name: by_hand.packed(files) for name, files in _folders(scratch).items()}
    files = [by_hand.unpacked(data) for data in seeds.values()]
    texts = [data for each in files for name, data in each.items() if name.endswith("json")]
    headers = [header_of(data) for each in files for name, data in each.items() if name.endswith("safetensors")]
    headers_only = [each["model.gguf"] for each in files if "model.gguf" in each]
    mutate = folder_mutation({
        ".json": JsonMutation(texts),
        ".safetensors": safetensors_mutation(JsonMutation(headers)),
        ".gguf": GgufMutation(headers_only),
    })  # fmt: skip

    def check(data: bytes) -> None:
        found = by_hand.unpacked(data)
        if "model.gguf" in found:
            found = {"model.gguf": filled(found["model.gguf"])}
        scratch.keep(found)
        for name, content in found.items():
            scratch.write(name, content)
        checkpoint = open_checkpoint(scratch.path / "model.gguf" if "model.gguf" in found else scratch.path)
        expected = _expected(found, checkpoint.config)
        shapes = parameter_shapes(checkpoint.config)
        same(list(checkpoint.tensors), list(shapes), "tensors")
        for name, stored in checkpoint.tensors.items():
            dtype, bits = expected[name]
            same((stored.dtype, stored.shape), (dtype, shapes[name]), name)
            assert stored.array.tobytes() == bits.tobytes(), f"{name}: other bits"

    return Parser(seeds, mutate, check)


def checkpoint_of(config: DecoderConfig) -> Checkpoint:
    tensors = {name: StoredTensor("F32", array) for name, array in random_parameters(config, 1).items()}
    return Checkpoint("memory", "canonical", config, tensors, eos_token_ids=(1,))


def _folders(scratch: Scratch) -> dict[str, dict[str, bytes]]:
    """Small checkpoints as files by name."""
    made = {
        "llama": (TINY, "huggingface"), "gpt2": (TINY_GPT2, "huggingface"), "meta": (TINY, "meta"),
        "canonical": (TINY, "canonical"), "tied": (replace(TINY, tie_embeddings=True), "huggingface"),
    }  # fmt: skip
    folders = {}
    for name, (config, format) in made.items():
        save_checkpoint(checkpoint_of(config), scratch.path / name, format)
        folders[name] = {path.name: path.read_bytes() for path in (scratch.path / name).iterdir()}
    tensors = checkpoint_of(TINY).tensors
    names, files = list(tensors), dict(folders["llama"])
    del files["model.safetensors"]
    index = {}
    for k in range(2):
        shard = f"model-{k + 1}.safetensors"
        write_safetensors(scratch.path / shard, {name: tensors[name] for name in names[k::2]}, {})
        files[shard] = (scratch.path / shard).read_bytes()
        (scratch.path / shard).unlink()
        index |= dict.fromkeys(names[k::2], shard)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": index}).encode()
    files["generation_config.json"] = b'{"eos_token_id": [1, 2]}'
    folders["shards"] = files
    wide = replace(TINY, d_model=32, tie_embeddings=True)
    keys = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 9, "llama.vocab_size": 5,
        "llama.embedding_length": 32, "llama.feed_forward_length": 3, "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1, "llama.attention.layer_norm_rms_epsilon": 3e-6,
        "llama.attention.key_length": 4, "llama.attention.value_length": 4, "llama.rope.freq_base": 5000.0,
        "llama.rope.dimension_count": 4, "tokenizer.ggml.eos_token_id": 1,
    }  # fmt: skip
    kinds = {"embed_tokens": 8, "q_proj": 1, "k_proj": 30, "gate_proj": 2}
    tensors_of = [(gguf_name(name), shape, kinds.get(name.split(".")[-2], 0))
                  for name, shape in parameter_shapes(wide).items()]  # fmt: skip
    folders["gguf"] = {"model.gguf": gguf_file(keys, tensors_of)}
    return folders


META_NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GPT2_NAMES = {
    "model.embed_tokens": "transformer.wte", "model.embed_positions": "transformer.wpe",
    "model.norm": "transformer.ln_f", "model.layers": "transformer.h", "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip


def _expected(files: Mapping[str, bytes], config: DecoderConfig) -> Bits:
    """The canonical tensors that these files hold: slices of them, put together by the formulas of each layout."""
    found: Bits = {}
    for name, data in files.items():
        if name.endswith(".safetensors"):
            found |= {
                key: (dtype, np.frombuffer(content, f"<u{by_hand.BITS[dtype] // 8}").reshape(shape))
                for key, (dtype, shape, content) in by_hand.safetensors(data).items()
                if dtype in DTYPES
            }
    names = list(parameter_shapes(config))
    if "model.gguf" in files:
        found = _of_gguf(files["model.gguf"])
        return {name: _half_split(found[gguf_name(name)], name, config) for name in names}
    if "config.json" not in files:
        return {name: _half_split(found[_renamed(name, META_NAMES)], name, config) for name in names}
    gpt2 = json.loads(files["config.json"]).get("model_type") == "gpt2"
    prefix = "transformer." if gpt2 else "model."
    if not any(name.startswith(prefix) for name in found):
        found = {name if name == "lm_head.weight" else prefix + name: tensor for name, tensor in found.items()}
    table = f"{prefix}{'wte' if gpt2 else 'embed_tokens'}.weight"
    if table not in found:
        found[table] = found["lm_head.weight"]
    return {name: _of_gpt2(found, name, config) if gpt2 else found[name] for name in names}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for ours, theirs in names.items():
        name = name.replace(f"{ours}.", f"{theirs}.")
    return name


def _half_split(tensor: tuple[str, np.ndarray], name: str, config: DecoderConfig) -> tuple[str, np.ndarray]:
    """Rows 2i and 2i + 1 of a head of q or k become rows i and i + H / 2."""
    heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    dtype, rows = tensor
    return dtype, rows.reshape(heads, config.d_head // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _of_gpt2(found: Bits, name: str, config: DecoderConfig) -> tuple[str, np.ndarray]:
    """Linear weights are stored (in, out), and q, k and v side by side."""
    for k, part in enumerate("qkv"):
        if f".{part}_proj." in name:
            dtype, fused = found[_renamed(name, GPT2_NAMES).replace(f"self_attn.{part}_proj", "attn.c_attn")]
            return dtype, fused[..., k * config.d_model : (k + 1) * config.d_model].T
    dtype, array = found[_renamed(name, GPT2_NAMES)]
    return dtype, array.T if "_proj" in name else array


def _of_gguf(data: bytes) -> Bits:
    """F32, F16 and BF16 as they are; Q8_0 and Q4_0 by their formula, the rest by the package gguf."""
    found: Bits = {}
    for name, (kind, shape, begin, end) in by_hand.gguf_places(by_hand.gguf(data)).items():
        if kind in DTYPES:
            found[name] = kind, np.frombuffer(data[begin:end], f"<u{by_hand.BITS[kind] // 8}").reshape(shape)
            continue
        rows = np.frombuffer(data[begin:end], np.uint8)
        if kind in ("Q8_0", "Q4_0"):
            blocks = rows.reshape(-1, 34 if kind == "Q8_0" else 18)
            low, high = blocks[:, 2:] & 15, blocks[:, 2:] >> 4
            whole = blocks[:, 2:].view(np.int8) if kind == "Q8_0" else np.concatenate([low, high], 1).view(np.int8) - 8
            values = blocks[:, :2].view("<f2").astype(np.float32) * whole.astype(np.float32)
        else:
            from gguf import GGMLQuantizationType, quants

            values = quants.dequantize(rows, GGMLQuantizationType[kind])
        found[name] = "F32", values.reshape(shape)
    return found
