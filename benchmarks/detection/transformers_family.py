"""transformers' models of all families as a candidate: of another config where the mistake is one, else changed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.detection import transformers_blocks as blocks
from benchmarks.detection import transformers_tensors, transformers_weights
from benchmarks.detection.planted import Planted
from benchmarks.detection.torch_block import LEFT_OUT
from benchmarks.detection.transformers_blocks import OTHERWISE, WIRING
from benchmarks.detection.transformers_changes import CHANGES, OTHER_LAYERS, changed
from benchmarks.detection.transformers_model import Model, Recorded, family_of, layer_arguments
from benchmarks.detection.transformers_parts import head_output
from benchmarks.detection.transformers_tensors import family_parameters
from samelogits.checking.candidates.candidate import Output, to_numpy
from samelogits.checking.probe import Probe
from samelogits.config import DecoderConfig
from samelogits.errors import InputError
from samelogits.parameters import norm_names

SCALES: dict[str, Callable[[DecoderConfig], float]] = {
    "SL401": lambda c: 1.0,
    "SL402": lambda c: c.d_model**-0.5,
    "SL403": lambda c: (c.d_model / c.n_heads) ** -0.5,
    "SL404": lambda c: 1 / c.d_head,
    "SL405": lambda c: c.d_head**0.5,
    "SL406": lambda c: c.d_head**-0.5,
    "SL407": lambda c: c.score_scale(0),
    "SL408": lambda c: c.score_scale(0),
}
ROUTER = frozenset(["SL151", "SL152", "SL153", "SL154", "SL155", "SL156", "SL157", "SL158"])
ALIBI = frozenset(["SL351", "SL352", "SL353", "SL354", "SL355", "SL357"])
TABLES = frozenset(["SL302", "SL306", "SL311", "SL321", "SL323"])
CORES = frozenset(["SL434", "SL435"])
QUERIES = frozenset(["SL448", "SL461", "SL462", "SL463", "SL464"])
EMBEDDING = frozenset(["SL601", "SL602", "SL603", "SL604", "SL605", "SL606", "SL607", "SL608", "SL609", "SL610"])
HEAD = frozenset(["SL216", "SL217", "SL621", "SL622", "SL623", "SL624", "SL625", "SL626", "SL627"])
WEIGHTS = transformers_tensors.CODES | transformers_weights.CODES
CODES = frozenset(["SL346"]).union(
    *(CHANGES, LEFT_OUT, WIRING, blocks.ACTIVATIONS, SCALES, ROUTER, ALIBI, TABLES, CORES, QUERIES, EMBEDDING, HEAD),
    WEIGHTS,
)


def makes(config: DecoderConfig, code: str) -> bool:
    """Whether the mistake, which the config can have, can be made in the model of it."""
    family = family_of(config)
    if family is None or code not in CODES:
        return False
    kind, rotates = family.model_type, config.position == "rope"
    tables = rotates and kind not in ("gptj", "codegen")
    if family.interleaved and code in ("SL320", "SL324"):
        return False  # the rows of files are ordered by the width that is turned
    if code in CHANGES and code not in OTHER_LAYERS:
        return changed(config, code) is not None
    if code in OTHER_LAYERS:
        return rotates or changed(config, code) is not None
    if code in WIRING:
        return kind not in OTHERWISE and not (config.shared_norm and code in ("SL713", "SL714"))
    if code in ALIBI:
        return kind in ("bloom", "mpt")
    if code in SCALES:
        return kind not in ("gptj", "codegen", "gpt_bigcode")
    if code == "SL448":
        return kind in ("olmo", "olmoe")
    if code == "SL464":
        return tables and not config.no_rope_layers
    if code in blocks.ACTIVATIONS:
        return config.n_experts is None
    if code in TABLES | {"SL346"}:
        return tables
    if code in transformers_weights.CODES:
        return _loads(config, code)
    return True


def _loads(config: DecoderConfig, code: str) -> bool:
    """Whether the script of transformers_weights makes the mistake as it is meant in this config."""
    if code in ("SL121", "SL125"):
        return config.n_experts is None
    if code == "SL443":
        return config.qk_norm != "projection"
    if code in ("SL511", "SL512", "SL513", "SL514"):
        return config.rotated == config.d_head
    return True


class FamilyCandidate:
    """transformers' model with the mistakes of these codes, local ones in these layers (None: everywhere)."""

    probe: Probe | None = None

    def __init__(
        self,
        config: DecoderConfig,
        parameters: Mapping[str, np.ndarray],
        mistakes: Iterable[str] = frozenset(),
        layers: Iterable[int] | None = None,
        dtype: str = "float32",
    ):
        self.planted = planted = Planted(config, mistakes, layers)
        if unfit := sorted(code for code in planted.codes if not makes(config, code)):
            raise InputError(f"mistakes: expected some that transformers' model of this config makes, found {unfit}")
        self.config = config
        self.precision: str | None = dtype
        self.name = " ".join(["transformers", dtype, *sorted(planted.codes)])
        self._seen: dict[str, np.ndarray] = {}  # taps of what is not transformers' own
        self._values: dict[int, Tensor] = {}  # not clipped
        self._late: dict[int, tuple[Any, Any]] = {}  # norms of queries and keys, that come after the rotation
        arrays = family_parameters(config, parameters, planted)
        everywhere = planted.at("stack")
        self.model = self._made(arrays, everywhere)
        self._layers = [i for i in range(config.n_layers) if planted.at(i) != everywhere]
        self._donor: Model | None = None  # whose layers, and what they are given, stand in for some
        if any(code == "SL346" or (code in CHANGES and changed(config, code)) for code in planted.codes - everywhere):
            self._donor = self._made(arrays, planted.codes)
            for i in self._layers:
                self.model.layers[i] = self._donor.layers[i]
        for i in range(config.n_layers):
            self._plant(i, planted.at(i))
        self._plant_stack(everywhere)
        within = self._within if planted.codes & CORES else None
        around = self._around if planted.codes & {"SL448", "SL464"} else None
        self._candidate = Recorded(self.model, config, self.name, within, around)

    @staticmethod
    def holds(config: DecoderConfig) -> bool:
        """Whether a model of transformers can be of this config. Its Falcon adds ALiBi twice."""
        return family_of(config) is not None and not config.alibi_rounded

    def run(self, probe: Probe) -> Output:
        """Logits and those taps that can be had."""
        self._seen = {}
        lent = self._arguments(self._donor, probe) if self._donor is not None else []
        own = self._arguments(self.model, probe) if self.planted.codes & OTHER_LAYERS else []
        self._seen = {}
        with contextlib.ExitStack() as stack:
            for i, block in enumerate(self.model.layers):
                enter = self._enter(i, lent[i] if lent and i in self._layers else None, own)
                stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            output = self._candidate.run(probe)
        for i in range(self.config.n_layers):
            if self.planted.at(i) & WIRING:
                for name in (*norm_names(self.config), "residual_mid", "residual_out"):
                    output.taps.pop(f"layers.{i}.{name}", None)
        output.taps |= self._seen
        for tap, array in output.taps.items():
            side = tap.rpartition(".")[2].partition("_")[0]
            if side in ("q", "k", "v"):
                array = array.reshape(*array.shape[:2], -1, self.config.d_head)
                back = -self.config.rotated if "SL325" in self.planted.at(int(tap.split(".")[1])) else 0
                output.taps[tap] = np.roll(array, 0 if side == "v" else back, axis=-1)
        return output

    def source_of(self, tap: str) -> tuple[str, str]:
        """Source of the class of transformers that computes a tap, and its file and line."""
        return self._candidate.source_of(tap)

    def _made(self, arrays: Mapping[str, np.ndarray], codes: frozenset[str]) -> Model:
        """The model of the config that these mistakes are."""
        config, kind = self.config, family_of(self.config)
        assert kind is not None
        for code in sorted(codes & CHANGES.keys()):
            config = changed(config, code) or config
        model = Model(config, arrays, self.precision or "float32", kind.model_type)
        if "SL346" in codes:
            rotary = model.stack.rotary_emb
            name = "inv_freq" if hasattr(rotary, "inv_freq") else "full_attention_inv_freq"
            right = getattr(rotary, name)
            exponents = torch.arange(0, config.rotated, 2).float() / config.rotated
            plain = 1.0 / (config.rope_theta or 1.0) ** exponents
            setattr(rotary, name, blocks.blended_by_wavelength(config, plain).to(right.dtype))
        return model

    def _arguments(self, model: Model, probe: Probe) -> list[tuple[Any, dict[str, Any]]]:
        return layer_arguments(Recorded(model, self.config, self.name), model, probe)

    def _tap(self, name: str, value: Tensor) -> None:
        if not (name.endswith("residual_mid") and self.config.parallel_residual):
            self._seen.setdefault(name, to_numpy(value.contiguous(), name))

    def _enter(
        self, i: int, lent: tuple[Any, dict[str, Any]] | None, own: list[tuple[Any, dict[str, Any]]]
    ) -> Callable[..., Any]:
        """A hook that changes what a block is given."""
        c, wrong = self.config, self.planted.at(i)

        def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if lent is not None:
                stream = {key: kwargs[key] for key in ("hidden_states",) if key in kwargs}
                args, kwargs = (*args[:1], *lent[0][1:]), lent[1] | stream
            for code in wrong & OTHER_LAYERS if c.position == "rope" else ():
                slides = code == "SL454" or ((i if code == "SL455" else i - 1) % c.n_layers in c.sliding_layers) != (
                    code == "SL455"
                )
                like = next(j for j in range(c.n_layers) if (j in c.sliding_layers) == slides)
                names = ["attention_mask"] if code == "SL454" else ["attention_mask", "position_embeddings"]
                if slides != (i in c.sliding_layers):
                    kwargs = kwargs | {name: own[like][1][name] for name in names}
            for name in ("alibi", "position_bias"):
                if wrong & ALIBI and name in kwargs:
                    kwargs = kwargs | {name: blocks.alibi(c, wrong, kwargs[name])}
            if wrong & TABLES:
                kwargs = kwargs | {"position_embeddings": blocks.tables(wrong, *kwargs["position_embeddings"])}
            return args, kwargs

        return enter

    def _plant(self, i: int, wrong: frozenset[str]) -> None:
        """What is changed in a block."""
        c, model, at = self.config, self.model, f"layers.{i}"
        attention, mlp = model.attention(i), model.feed_forward(i)
        if self.precision == "float64":  # a padded query's hidden scores are infinite in softmax's float32
            model[f"{at}.self_attn.o_proj"].register_forward_pre_hook(lambda m, a: (torch.nan_to_num(a[0]),))
        for code in wrong & LEFT_OUT.keys():
            model.put(f"{at}.{blocks.norm_at(c, LEFT_OUT[code])}", nn.Identity())
        for code in wrong & SCALES.keys():
            by_layer = code == "SL408" or (c.scale_by_layer and code != "SL407")
            blocks.set_scale(attention, SCALES[code](c) / (i + 1 if by_layer else 1), c.score_scale(i))
        for code in wrong & blocks.ACTIVATIONS.keys():
            blocks.set_activation(mlp, blocks.ACTIVATIONS[code])
        if wrong & ROUTER and c.has_experts(i):
            mlp.gate.register_forward_hook(blocks.routed(c, wrong))
        norms = [f"{at}.self_attn.{side}_norm" for side in "qk"] if c.qk_norm != "none" else []
        if "SL464" in wrong:
            self._late[i] = (model[norms[0]], model[norms[1]])
        for name, heads in zip(norms, (c.n_heads, c.n_kv_heads), strict=False):
            if wrong & {"SL461", "SL464"}:
                model.put(name, nn.Identity())
            elif wrong & {"SL462", "SL463"}:
                model.put(name, blocks.WholeNorm(c, model[name], heads, "SL462" in wrong))
        if "SL448" in wrong:
            attention.v_proj.register_forward_hook(lambda m, a, y: self._values.update({i: y.clone()}))
        if wrong & WIRING:
            model.layers[i].forward = blocks.wired(model, i, wrong, self._tap)

    def _plant_stack(self, wrong: frozenset[str]) -> None:
        c, model = self.config, self.model
        embed, scale = model["embed_tokens"], c.embedding_scale or 1.0
        if "SL606" in wrong:
            blocks.set_embedding_scale(model, 1.0)
        if "SL607" in wrong:
            blocks.set_embedding_scale(model, float(torch.tensor(scale).bfloat16()))
        if "SL608" in wrong:
            blocks.set_embedding_scale(model, 1 / scale)
        if "SL609" in wrong:
            model.head.register_forward_pre_hook(lambda m, a: (a[0] * scale,))
        if "SL610" in wrong:
            model.put("embed_norm", nn.Identity())
        if "SL216" in wrong:
            model.put("norm", nn.Identity())
        if "SL217" in wrong:
            model.put("norm", nn.Sequential(model["norm"], model["norm"]))
        embed.register_forward_pre_hook(lambda m, a: (blocks.other_ids(a[0], c.vocab_size, wrong), *a[1:]))
        root = math.sqrt(c.d_model)
        factor = root if "SL601" in wrong else 1 / root if "SL602" in wrong else 1.0
        if factor != 1:
            embed.register_forward_hook(lambda m, a, y: y * factor)
        if "SL622" in wrong:
            model.head.register_forward_hook(lambda m, a, y: y / root)

        def ended(module: nn.Module, inputs: Any, output: Any) -> Any:
            output.logits = head_output(c, output.logits, wrong - {"SL622"})
            return output

        model.module.register_forward_hook(ended)

    def _within(self, right: Callable[..., Any]) -> Callable[..., Any]:
        """Attention, computed otherwise. Padded queries that see nothing give nothing, as the reference's."""

        def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **more: Any) -> Any:
            wrong = self.planted.at(module.layer_idx)
            if wrong & CORES:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
                mixed, weights, scores = blocks.core(self.config, q, k, v, mask, more["scaling"], wrong)
                self._tap(f"layers.{module.layer_idx}.self_attn.scores", scores)
                return mixed, weights
            mixed, weights = right(module, q, k, v, mask, **more)
            return mixed * (mask == 0).any(-1).transpose(1, 2)[..., None], weights

        return attend

    def _around(self, right: Callable[..., Any]) -> Callable[..., Any]:
        """Attention of other queries, keys and values."""

        def late(norm: Any, x: Tensor) -> Tensor:
            if self.config.qk_norm == "projection":
                return norm(x.transpose(1, 2).flatten(2)).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
            return norm(x) if hasattr(norm, "norms") else norm(x.transpose(1, 2)).transpose(1, 2)

        def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Any:
            wrong = self.planted.at(module.layer_idx)
            if "SL464" in wrong:
                norms = self._late[module.layer_idx]
                q, k = late(norms[0], q), late(norms[1], k)
            if "SL448" in wrong:
                v = self._values[module.layer_idx].unflatten(-1, (v.shape[1], -1)).transpose(1, 2)
            return right(module, q, k, v, *rest, **more)

        return attend
