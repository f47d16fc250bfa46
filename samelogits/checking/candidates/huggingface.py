"""transformers as a candidate: its model on the checked checkpoint's folder or on another one."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from samelogits.checking.candidates.candidate import Array, Output, guarded, source_of, to_numpy
from samelogits.checking.candidates.capture import host_inputs
from samelogits.checking.candidates.family_map import family_map
from samelogits.checking.candidates.modules import TorchModuleCandidate, torch_as_found
from samelogits.checking.candidates.name_map import NameMap
from samelogits.checking.probe import Probe
from samelogits.checkpoints import Checkpoint, open_checkpoint, save_checkpoint, shipped_models
from samelogits.checkpoints.canonical import FORMAT
from samelogits.checkpoints.families import turn_pairs
from samelogits.checkpoints.families.registry import FAMILIES
from samelogits.checkpoints.folder import inside
from samelogits.checkpoints.hub import SCHEME
from samelogits.checkpoints.json_file import read_json
from samelogits.checkpoints.safetensors_file import SafetensorsFile
from samelogits.config import DecoderConfig
from samelogits.errors import CandidateError, SamelogitsError

PREFIX = "hf:"
DTYPES = ("float32", "bfloat16", "float16", "float64")
# A closed list: transformers takes other names as repositories of compiled kernels to download.
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flex_attention")
CACHES = ("cache", "past_key_values")  # what the cache is called, in one version and another
EAGER = "eager_attention_forward"  # what each of transformers' files calls its own
RECORDED = ("q_rotated", "k_rotated", "scores", "weights")


class HuggingFaceCandidate(TorchModuleCandidate):
    """A causal language model of transformers. With eager attention, its scores and weights are taps too."""

    def __init__(self, model: Any, config: DecoderConfig, name_map: NameMap | None = None, name: str | None = None):
        self.family = FAMILIES.get(str(getattr(model.config, "model_type", None)))
        if name_map is None and self.family is not None and config is not None:
            name_map = family_map(self.family, config)
        super().__init__(model, name_map, self._forward, name, config)
        self.takes_mask = True
        self.attention = str(getattr(model.config, "_attn_implementation", None))
        if self.attention != "eager":
            self.notes.append(f"attention by {self.attention}: {', '.join(RECORDED)} can't be seen there")
        elif self.precision == "float64" and config.position == "rope":
            self.notes.append("transformers computes rotary tables, some norms and softmax in float32 all the same")

    def run(self, probe: Probe) -> Output:
        """Logits and taps. Raises CandidateError."""
        taps: dict[str, Array] = {}
        with self._recorded(taps) if self.attention == "eager" else contextlib.nullcontext():
            output = super().run(probe)
        if self.attention == "eager" and not taps:
            output.notes.append(f"its attention is its own: {', '.join(RECORDED)} were not seen")
        output.taps |= taps
        output.taps = {tap: self._arranged(tap, array, probe) for tap, array in output.taps.items()}
        return output

    @property
    def decode(self) -> Callable[[Probe], Array] | None:
        """Logits of a probe by transformers' cache: half of it at once, the rest token by token. None without one."""
        name = next((name for name in CACHES if name in self._parameters), None)
        return None if name is None else functools.partial(self._decode, name)

    def _decode(self, name: str, probe: Probe) -> Array:
        cache_of: Any = importlib.import_module("transformers").DynamicCache
        device = next(self.module.parameters()).device
        inputs = {name: self.torch.tensor(array, device=device) for name, array in host_inputs(probe).items()}
        cache, T = cache_of(config=self.module.config), probe.tokens_BT.shape[1]
        ends = [0, *range(max(1, T // 2), T + 1)]
        pieces = []
        with torch_as_found(self.module), self.torch.no_grad():
            for begin, end in itertools.pairwise(ends):
                piece = {name: tensor[:, begin:end] for name, tensor in inputs.items()}
                piece["attention_mask"] = inputs["attention_mask"][:, :end]
                output = self._forward(self.module, piece, **{name: cache, "use_cache": True})
                pieces.append(to_numpy(output.logits, "logits"))
        return np.concatenate(pieces, axis=1)

    def source_of(self, tap: str) -> tuple[str, str]:
        """Source text of what computes a tap, and its place."""
        kind = tap.rpartition(".")[2]
        if kind in RECORDED:
            function = "apply_rotary_pos_emb" if kind.endswith("rotated") else EAGER
            homes = [home for part in self._attentions() if (home := _home(part, function)) is not None]
            if homes:
                return source_of(getattr(homes[0], function))
        return super().source_of(tap)

    def _arranged(self, tap: str, array: Array, probe: Probe) -> Array:
        """A tap with rows and tokens apart, tokens before heads, and its rotary pairs half a head apart."""
        kind, c = tap.rpartition(".")[2], self.config
        if array.ndim == 2 and len(array) == probe.tokens_BT.size:
            array = array.reshape(*probe.tokens_BT.shape, -1)
        if c is None or kind.partition("_")[0] not in ("q", "k", "v"):
            return array
        heads = c.n_heads if kind.startswith("q") else c.n_kv_heads
        if array.ndim == 4 and array.shape[1] == heads != array.shape[2]:
            array = array.swapaxes(1, 2)
        rotates = c.position == "rope" and kind != "v" and int(tap.split(".")[1]) not in c.no_rope_layers
        if rotates and self.family is not None and self.family.interleaved:
            by_element = array.reshape(-1, heads * c.d_head).T
            array = turn_pairs(by_element, heads, c.rotated, to_half_split=True).T.reshape(array.shape)
        return array

    def _forward(self, module: Any, inputs: dict[str, Any], **cache: Any) -> Any:
        keywords = {"use_cache": False, "attention_mask": inputs["attention_mask"], **cache}
        if "position_ids" in self._parameters:
            keywords["position_ids"] = inputs["position_ids"]
        return module(inputs["tokens"], **keywords)

    @contextlib.contextmanager
    def _recorded(self, taps: dict[str, Array]) -> Iterator[None]:
        """The eager attention function of the model's file also records, for as long as this lasts.

        It computes what the model goes on with as ever; the scores, which it doesn't give, are computed a second time
        by the same operations. It is replaced where its file looks it up, and not in the table of attention functions:
        that isn't asked for "eager" in every version.
        """
        own = {id(part) for part in self.module.modules()}
        homes = {id(home): home for part in self._attentions() if (home := _home(part, EAGER)) is not None}

        def wrap(compute: Any) -> Any:
            @functools.wraps(compute)
            def eager(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
                found = compute(module, query, key, *args, **kwargs)
                if id(module) in own:
                    self._keep(taps, module, query, key, found[1], kwargs)
                return found

            return eager

        with contextlib.ExitStack() as stack:
            for home in homes.values():
                compute = getattr(home, EAGER)
                stack.callback(setattr, home, EAGER, compute)
                setattr(home, EAGER, wrap(compute))
            yield

    def _keep(
        self, taps: dict[str, Array], module: Any, query: Any, key: Any, weights: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """The taps of one attention layer. query, key: [B, heads, T, H], rotated."""
        scaling, cap = kwargs.get("scaling"), kwargs.get("softcap")
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = self.torch.matmul(query, keys.transpose(2, 3))
        scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if cap is not None:
            scores = cap * self.torch.tanh(scores / cap)
        values = {"scores": scores, "weights": weights}
        c = self.config
        if c is not None and c.position == "rope" and module.layer_idx not in c.no_rope_layers:
            values |= {"q_rotated": query.transpose(1, 2), "k_rotated": key.transpose(1, 2)}
        for kind, array in values.items():
            taps[f"layers.{module.layer_idx}.self_attn.{kind}"] = to_numpy(array, f"{kind} of {module.layer_idx}")

    def _attentions(self) -> list[Any]:
        return [part for part in self.module.modules() if hasattr(part, "layer_idx")]


def _home(module: Any, name: str) -> Any:
    """The file that defines a module's class, if it has something under this name; None otherwise."""
    homes = (sys.modules.get(base.__module__) for base in type(module).__mro__)
    return next((home for home in homes if hasattr(home, name)), None)


def open_huggingface(
    spec: str, checkpoint: Checkpoint, name_map: NameMap | None = None, dtype: str | None = None
) -> HuggingFaceCandidate:
    """The candidate of "hf:", "hf:PATH" or "hf:PATH?dtype=bfloat16&attn=sdpa&device=cuda". Raises CandidateError.

    PATH: a folder that transformers reads, or anything that open_checkpoint opens (default: the checkpoint's source);
    "hf://owner/name" is what that says of it. dtype: default float32. attn: default eager, the only one that shows
    scores and weights. device: default cpu. transformers downloads nothing, reads no pickle and runs no code that comes
    with the weights.
    """
    known = {"dtype": DTYPES, "attn": ATTENTIONS, "device": None}
    path, options = parse_options(spec if spec.startswith(SCHEME) else spec.removeprefix(PREFIX), known, spec)
    if dtype is not None and options.setdefault("dtype", dtype) != dtype:
        raise CandidateError(f"candidate {spec}: dtype: expected {dtype}, as asked, found {options['dtype']}")
    if options.get("dtype", DTYPES[0]) not in DTYPES:
        raise CandidateError(
            f"candidate {spec}: dtype: expected one of {', '.join(DTYPES)}, found {options['dtype']!r}"
        )
    try:
        transformers: Any = importlib.import_module("transformers")
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise CandidateError(f"candidate {spec}: expected transformers and torch installed, found: {error}") from error
    with contextlib.ExitStack() as stack:
        folder = _folder(path, checkpoint, stack, spec)
        logging = transformers.utils.logging
        bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        stack.callback(logging.set_verbosity, verbosity)
        stack.callback(logging.enable_progress_bar if bar else logging.disable_progress_bar)
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        stack.enter_context(torch_as_found())

        def load() -> Any:
            return transformers.AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=getattr(torch, options.get("dtype", DTYPES[0])),
                attn_implementation=options.get("attn", ATTENTIONS[0]),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )

        (model, report), _ = guarded(spec, load)
        for fault in ("missing_keys", "mismatched_keys", "error_msgs"):
            if found := report.get(fault):
                raise CandidateError(
                    f"candidate {spec}: expected all parameters in {path or checkpoint.source}, "
                    f"found {fault.replace('_', ' ')}: {', '.join(map(str, sorted(found, key=str)[:4]))[:300]}"
                )
        model = guarded(spec, lambda: model.eval().to(options.get("device", "cpu")))[0]
    candidate = HuggingFaceCandidate(model, checkpoint.config, name_map, spec)
    if unexpected := report.get("unexpected_keys"):
        candidate.notes.append(f"transformers did not use {len(unexpected)} of the stored tensors")
    return candidate


def parse_options(text: str, known: Mapping[str, tuple[str, ...] | None], spec: str) -> tuple[str, dict[str, str]]:
    """ "PATH?key=value&key=value" as path and options. known: the keys, with their values where these are few."""
    match = re.fullmatch(r"(?s)(.*?)\?((?:[a-z]+=[^&?=]*)(?:&[a-z]+=[^&?=]*)*)", text)
    if match is None:
        return text, {}
    options: dict[str, str] = {}
    for pair in match[2].split("&"):
        key, _, value = pair.partition("=")
        if key not in known or key in options:
            raise CandidateError(f"candidate {spec}: expected the options {', '.join(known)} once, found {key!r}")
        values = known[key]
        if values is not None and value not in values:
            raise CandidateError(f"candidate {spec}: {key}: expected one of {', '.join(values)}, found {value!r}")
        options[key] = value
    return match[1], options


def _folder(path: str, checkpoint: Checkpoint, stack: contextlib.ExitStack, spec: str) -> Path:
    """A folder that transformers reads: the one named, or one written for the time being. Its files are sound."""
    try:
        if os.path.isdir(path) and read_json(inside(Path(path), "config.json")).get("format") != FORMAT:
            folder = Path(path)
        else:
            wanted = open_checkpoint(path) if path else checkpoint
            folder = Path(wanted.source)
            as_is = wanted.format == "huggingface" and wanted.source not in shipped_models()
            if not as_is or not any(folder.glob("*.safetensors")):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="samelogits-"))) / "model"
                save_checkpoint(wanted, folder, "huggingface")
        for file in sorted(folder.glob("*.safetensors")):
            SafetensorsFile(inside(folder, file.name))  # transformers' own parser takes what it should not
    except SamelogitsError as error:
        raise CandidateError(f"candidate {spec}: {error}") from error
    return folder
