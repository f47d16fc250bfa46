"""transformers' own GPT-2 and Llama, with mistakes planted in weights, modules and functions."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

from benchmarks.detection import transformers_parts as parts
from benchmarks.detection import transformers_weights
from benchmarks.detection.planted import Planted
from benchmarks.detection.torch_precision import DTYPES
from benchmarks.detection.transformers_weights import planted_parameters
from samelogits.checking.candidates.candidate import Output, to_numpy
from samelogits.checking.probe import Probe
from samelogits.checkpoints import save_checkpoint, trained_checkpoint
from samelogits.checkpoints.huggingface import FAMILIES
from samelogits.config import DecoderConfig
from samelogits.errors import InputError
from samelogits.parameters import parameter_shapes

# Names of what a block has: for Llama, then for GPT-2.
NAMES = {
    "llama": {
        "layers": "layers", "embed": "embed_tokens", "norm": "norm", "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm", "attention": "self_attn", "out": "o_proj", "up": "up_proj",
        "down": "down_proj", "act": "act_fn", "eps": "variance_epsilon",
    },
    "gpt2": {
        "layers": "h", "embed": "wte", "norm": "ln_f", "norm1": "ln_1", "norm2": "ln_2", "attention": "attn",
        "out": "c_proj", "up": "c_fc", "down": "c_proj", "act": "act", "eps": "eps",
    },
}  # fmt: skip
SCALES: dict[str, Callable[[DecoderConfig], float]] = {
    "SL401": lambda c: 1.0,
    "SL402": lambda c: c.d_model**-0.5,
    "SL403": lambda c: (c.d_model / c.n_heads) ** -0.5,
    "SL404": lambda c: 1 / c.d_head,
    "SL405": lambda c: c.d_head**0.5,
}
EPS = {"SL201": 0.1, "SL202": 10.0, "SL203": 0.0}
HERE = frozenset([
    "SL110", "SL122", "SL123", "SL124", "SL215", "SL216", "SL217", "SL331", "SL332", "SL333", "SL334", "SL335",
    "SL601", "SL602", "SL603", "SL604", "SL605", "SL621", "SL622", "SL623", "SL624", "SL625", "SL626", "SL627",
    "SL707", "SL708", "SL823", "SL824",
])  # fmt: skip
OURS = (
    *(transformers_weights.CODES, HERE, EPS, SCALES, parts.ACTIVATIONS, parts.NORMS, parts.WIRING, parts.MASKS),
    *(parts.CORES, parts.HEADS, parts.TABLES, parts.TURNS),
)


class PlainCandidate:
    """transformers' model with the mistakes of these codes, local ones in these layers (None: everywhere)."""

    takes_mask = True
    probe: Probe | None = None
    complete = False  # no tap of scores; padded queries are others than the reference's
    CODES = frozenset().union(*OURS)

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, np.ndarray],
        mistakes: Iterable[str] = frozenset(),
        layers: Iterable[int] | None = None,
        dtype: str = "float32",
    ):
        self.planted = Planted(config, mistakes, layers)
        if self.planted.codes - self.CODES:
            raise InputError(f"mistakes: expected some of {len(self.CODES)}, found {sorted(self.planted.codes)}")
        self.config, self.parameters = config, parameters
        self.precision: str | None = dtype
        self.name = " ".join(["transformers", dtype, *sorted(self.planted.codes)])
        self.kind = "gpt2" if not FAMILIES["gpt2"].obstacles(config) else "llama"
        self.names = NAMES[self.kind]
        self._taps: dict[str, np.ndarray] = {}
        self._layer = 0  # that is running
        self._mask = torch.empty(0)
        self.model = self._load(DTYPES[dtype])
        self._plant()
        self._hook()

    @staticmethod
    def holds(config: DecoderConfig) -> bool:
        """Whether a model of transformers can be of this config."""
        return any(not family.obstacles(config) for family in FAMILIES.values())

    def run(self, probe: Probe) -> Output:
        """Logits, those taps that can be had, and loss of the probe."""
        tokens, mask = torch.from_numpy(probe.tokens_BT.copy()), torch.from_numpy(probe.mask_BT.copy())
        stack = self.planted.at("stack")
        if "SL603" in stack:
            tokens = (tokens + 1) % self.config.vocab_size
        if "SL604" in stack:
            tokens = (tokens - 1) % self.config.vocab_size
        if "SL605" in stack:
            tokens = tokens.roll(1, dims=1)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        if "SL335" in stack:
            positions = torch.zeros_like(positions)
        for code, offset in (("SL331", 2), ("SL332", 1)):
            if code in stack:
                positions = (positions + offset).clamp(max=self.config.max_seq_len - 1)
        self._mask, self._taps = mask, {}
        labels = torch.from_numpy(np.where(probe.targets_BT < 0, -100, probe.targets_BT))
        with torch.no_grad(), self._patched():
            ids = None if "SL334" in stack else positions  # transformers counts padding, if it is not told
            logits = self.model(tokens, attention_mask=mask.long(), position_ids=ids, use_cache=False).logits
            wide = logits.float() if logits.dtype.itemsize < 4 else logits
            loss = nn.functional.cross_entropy(wide.flatten(0, 1), labels.flatten())
        self._tap("logits", logits)
        return Output(self._taps["logits"], self._taps, float(loss))

    def source_of(self, tap: str) -> tuple[str, str]:
        """Source of the class of transformers that computes a tap, and its file and line."""
        block = self._blocks()[0]
        thing: type = type(self.model)
        if tap.startswith("layers."):
            inner = {"self_attn": self.names["attention"], "mlp": "mlp"}.get(tap.split(".")[2])
            thing = type(getattr(block, inner) if inner else block)
        lines, start = inspect.getsourcelines(thing)
        return "".join(lines), f"{inspect.getsourcefile(thing)}:{start}"

    def _load(self, dtype: torch.dtype) -> Any:
        parameters = planted_parameters(self.config, self.parameters, self.planted)
        parameters = {
            name: np.ascontiguousarray(parameters[name], np.float32) for name in parameter_shapes(self.config)
        }
        transformers.utils.logging.disable_progress_bar()
        with tempfile.TemporaryDirectory() as folder:
            save_checkpoint(trained_checkpoint(self.config, parameters), Path(folder) / "model", "huggingface")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                Path(folder) / "model", attn_implementation="eager", dtype=dtype
            )
        return model.eval()

    def _tap(self, name: str, value: Tensor) -> None:
        self._taps[name] = to_numpy(value.contiguous(), name)

    @property
    def _stack(self) -> Any:
        return self.model.transformer if self.kind == "gpt2" else self.model.model

    def _blocks(self) -> Any:
        return getattr(self._stack, self.names["layers"])

    def _norm(self, norm: nn.Module, wrong: frozenset[str]) -> None:
        for code in wrong & EPS.keys():
            setattr(norm, self.names["eps"], self.config.norm_eps * EPS[code])
        for code in wrong & parts.NORMS:
            norm.forward = parts.norm_forward(norm, self.config.norm, code, self.config.norm_eps)

    def _plant(self) -> None:
        c, names, stack = self.config, self.names, self.planted.at("stack")
        for i, block in enumerate(self._blocks()):
            wrong = self.planted.at(i)
            self._norm(getattr(block, names["norm1"]), wrong)
            self._norm(getattr(block, names["norm2"]), wrong)
            if "SL215" in wrong:
                setattr(block, names["norm1"], nn.Identity())
            attention, mlp = getattr(block, names["attention"]), block.mlp
            for code in wrong & SCALES.keys():
                attention.scaling = SCALES[code](c)
            act = getattr(mlp, names["act"])
            for code in wrong & parts.ACTIVATIONS.keys():
                act = parts.ACTIVATIONS[code]
            if "SL110" in wrong:
                act = nn.Sequential(act, copy.deepcopy(act))
            setattr(mlp, names["act"], act)
            if "SL823" in wrong:
                setattr(mlp, names["act"], nn.Identity())
                act_ = act
                mlp_act = lambda x, act_=act_: act_(x.bfloat16()).to(x.dtype)  # noqa: E731
                getattr(mlp, names["act"]).forward = mlp_act
            for code in wrong & {"SL122", "SL123", "SL124"}:
                mlp.forward = parts.feed_forward(mlp, code)
        norm = getattr(self._stack, names["norm"])
        self._norm(norm, stack)
        if "SL216" in stack:
            setattr(self._stack, names["norm"], nn.Identity())
        if "SL217" in stack:
            setattr(self._stack, names["norm"], nn.Sequential(norm, norm))
        if "SL707" in stack:
            setattr(self._stack, names["layers"], self._blocks()[:-1])
        head = self.planted.at("head")
        self.model.lm_head.register_forward_hook(lambda m, a, y: parts.head_output(c, y, head))

    def _hook(self) -> None:
        """Taps, and what is changed on the way."""
        c, names, stack = self.config, self.names, self.planted.at("stack")

        def embedded(module: nn.Module, inputs: Any, x: Tensor) -> Tensor:
            if "SL601" in stack:
                x = x * math.sqrt(c.d_model)
            if "SL602" in stack:
                x = x / math.sqrt(c.d_model)
            if "SL824" in stack:
                x = x.bfloat16().to(x.dtype)
            self._tap("embed_tokens", x)
            return x

        def placed(module: nn.Module, inputs: Any, x: Tensor) -> Tensor:
            x = x.bfloat16().to(x.dtype) if "SL824" in stack else x
            self._tap("embed_positions", x.expand(*self._mask.shape, -1))
            return torch.zeros_like(x) if "SL333" in stack else x

        getattr(self._stack, names["embed"]).register_forward_hook(embedded)
        if self.kind == "gpt2":
            self._stack.wpe.register_forward_hook(placed)
        blocks = self._blocks()
        for i, block in enumerate(blocks):
            self._hook_block(i, block)
        blocks[0].register_forward_pre_hook(self._first_input, with_kwargs=True)
        getattr(self._stack, names["norm"]).register_forward_hook(lambda m, a, y: self._tap("norm", y))
        if "SL708" in stack:  # the same module again: its taps are those of the second run
            blocks.append(blocks[-1])
            self.model.config.num_hidden_layers += 1

    def _first_input(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if self.kind == "gpt2" and "SL821" in self.planted.at("stack"):
            x = x.bfloat16().to(x.dtype)
        if self.kind == "gpt2" and "SL822" in self.planted.at("stack"):
            x = x.half().to(x.dtype)
        if "embedded" not in self._taps:
            self._tap("embedded", x)
            return (x, *args[1:]), kwargs
        return None

    def _hook_block(self, i: int, block: nn.Module) -> None:
        c, names, wrong = self.config, self.names, self.planted.at(i)
        attention, mlp = getattr(block, names["attention"]), block.mlp
        norms = getattr(block, names["norm1"]), getattr(block, names["norm2"])
        at = f"layers.{i}"

        def output(module: nn.Module, name: str, pick: Callable[[Any], Tensor] = lambda y: y) -> None:
            module.register_forward_hook(lambda m, a, y: self._tap(f"{at}.{name}", pick(y)))

        def given(module: nn.Module, name: str) -> None:
            module.register_forward_pre_hook(lambda m, a: self._tap(f"{at}.{name}", a[0]))

        if wrong & parts.WIRING:
            block.forward = parts.wired(norms, attention, mlp, wrong, lambda n, x: self._tap(f"{at}.{n}", x))
        else:
            given(norms[1], "residual_mid")
            output(block, "residual_out")
        output(norms[0], "input_layernorm")
        output(norms[1], "post_attention_layernorm")
        given(getattr(attention, names["out"]), "self_attn.mixed")
        output(getattr(attention, names["out"]), "self_attn.output")
        if self.kind == "gpt2":
            attention.c_attn.register_forward_hook(
                lambda m, a, y: (
                    [
                        self._tap(f"{at}.self_attn.{n}", part.unflatten(-1, (c.n_heads, c.d_head)))
                        for n, part in zip("qkv", y.chunk(3, dim=-1), strict=True)
                    ]
                    and None
                )
            )
        else:
            for n in "qkv":
                output(getattr(attention, f"{n}_proj"), f"self_attn.{n}", lambda y: y.unflatten(-1, (-1, c.d_head)))
            output(mlp.gate_proj, "mlp.gate")
        output(getattr(mlp, names["up"]), "mlp.up")
        given(getattr(mlp, names["down"]), "mlp.activated")
        output(mlp, "mlp.output")

        def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            self._layer = i
            x = args[0] if args else kwargs["hidden_states"]
            if wrong & parts.MASKS:
                kwargs = kwargs | {"attention_mask": parts.additive_mask(self._mask, x.dtype, wrong)}
            if wrong & parts.TABLES:
                right, positions = kwargs["position_embeddings"], kwargs["position_ids"]
                kwargs = kwargs | {"position_embeddings": parts.tables(c, wrong, right, self._mask, positions)}
            return args, kwargs

        attention.register_forward_pre_hook(enter, with_kwargs=True)

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """The module's functions, exchanged where the running layer has a mistake in them."""
        library: Any = modeling_gpt2 if self.kind == "gpt2" else modeling_llama
        right = library.eager_attention_forward

        def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **more: Any) -> Any:
            wrong, at = self.planted.at(self._layer), f"layers.{self._layer}.self_attn"
            if self.kind == "gpt2" and wrong & parts.HEADS:
                k, v = parts.repeat(k, 1, wrong), parts.repeat(v, 1, wrong)
            if self.kind == "llama":
                self._tap(f"{at}.q_rotated", q.transpose(1, 2))
                self._tap(f"{at}.k_rotated", k.transpose(1, 2))
            if wrong & parts.CORES:
                n = q.shape[1] // k.shape[1]
                k, v = (x.repeat_interleave(n, dim=1) for x in (k, v))
                mixed, weights = parts.core(self.config, q, k, v, mask, scaling, wrong)
            else:
                mixed, weights = right(module, q, k, v, mask, scaling=scaling, **more)
                weights = torch.nan_to_num(weights)
                mixed = torch.nan_to_num(mixed)
            self._tap(f"{at}.weights", weights)
            return mixed, weights

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(library, "eager_attention_forward", attend))
            if self.kind == "llama":
                turn, repeat = library.apply_rotary_pos_emb, library.repeat_kv

                def turned(q: Tensor, k: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
                    wrong = self.planted.at(self._layer)
                    positions = (self._mask.long().cumsum(1) - 1).clamp(min=0)
                    return parts.turn(turn, self.config, wrong, positions)(q, k, *rest, **more)

                def repeated(x: Tensor, n: int) -> Tensor:
                    wrong = self.planted.at(self._layer)
                    return parts.repeat(x, n, wrong) if wrong & parts.HEADS else repeat(x, n)

                stack.enter_context(mock.patch.object(library, "apply_rotary_pos_emb", turned))
                stack.enter_context(mock.patch.object(library, "repeat_kv", repeated))
            yield
