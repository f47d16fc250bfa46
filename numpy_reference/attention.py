"""Causal self-attention: multi-head, grouped-query and multi-query."""

from types import ModuleType

from numpy_reference.cache import Cache
from numpy_reference.linear import Linear, Load
from numpy_reference.normalization import LayerNorm, RMSNorm, make_norm
from numpy_reference.tape import Array
from samelogits.batch import Batch
from samelogits.config import DecoderConfig
from samelogits.taps import Tap


class Attention:
    """[B, T, D] to the same: projects to queries, keys, values, mixes these by softmax(scale q k^T), projects back."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, index: int, load: Load):
        self.config = config
        self.ops = ops
        self.index = index
        self.name = f"layers.{index}.self_attn"
        self.q_proj = Linear(ops, f"model.{self.name}.q_proj", load, config.attention_bias)
        self.k_proj = Linear(ops, f"model.{self.name}.k_proj", load, config.attention_bias)
        self.v_proj = Linear(ops, f"model.{self.name}.v_proj", load, config.attention_bias)
        self.o_proj = Linear(ops, f"model.{self.name}.o_proj", load, config.attention_output_bias)

        def norm(part: str) -> LayerNorm | RMSNorm | None:
            has_one = config.qk_norm != "none"
            return make_norm(config, ops, f"model.{self.name}.{part}", load, config.qk_norm_bias) if has_one else None

        self.q_norm = norm("q_norm")
        self.k_norm = norm("k_norm")

    def __call__(self, x_BTD: Array, batch: Batch, cache: Cache | None, tap: Tap) -> Array:
        config = self.config
        for_q_BTD, for_k_BTD, for_v_BTD = self.ops.fan_out(x_BTD, 3)
        q_BTNH = self.ops.split_heads(self.q_proj(for_q_BTD), config.n_heads)
        k_BTKH = self.ops.split_heads(self.k_proj(for_k_BTD), config.n_kv_heads)
        v_BTKH = self.ops.split_heads(self.v_proj(for_v_BTD), config.n_kv_heads)
        q_BTNH = tap(f"{self.name}.q", q_BTNH)
        k_BTKH = tap(f"{self.name}.k", k_BTKH)
        v_BTKH = tap(f"{self.name}.v", v_BTKH)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH = tap(f"{self.name}.q_normed", self.normed(self.q_norm, q_BTNH))
            k_BTKH = tap(f"{self.name}.k_normed", self.normed(self.k_norm, k_BTKH))
        if config.clip_qkv is not None:
            q_BTNH = self.ops.clip(q_BTNH, config.clip_qkv)
            k_BTKH = self.ops.clip(k_BTKH, config.clip_qkv)
            v_BTKH = self.ops.clip(v_BTKH, config.clip_qkv)
        turn = batch.turn(config, self.index)
        if turn is not None:
            q_BTNH = self.ops.rotate(q_BTNH, *turn)
            k_BTKH = self.ops.rotate(k_BTKH, *turn)
            q_BTNH = tap(f"{self.name}.q_rotated", q_BTNH)
            k_BTKH = tap(f"{self.name}.k_rotated", k_BTKH)
        k_BSKH, v_BSKH = (k_BTKH, v_BTKH) if cache is None else cache.append(self.index, k_BTKH, v_BTKH)
        scores_BNTS = self.ops.attention_scores(q_BTNH, k_BSKH, config.score_scale(self.index))
        if config.attention_softcap is not None:
            scores_BNTS = self.ops.soft_cap(scores_BNTS, config.attention_softcap)
        if batch.alibi_BNTS is not None:
            scores_BNTS = self.ops.add(scores_BNTS, batch.alibi_BNTS)
        scores_BNTS = tap(f"{self.name}.scores", scores_BNTS)
        weights_BNTS = self.ops.attention_weights(scores_BNTS, batch.visible(config, self.index))
        weights_BNTS = tap(f"{self.name}.weights", weights_BNTS)
        mixed_BTM = self.ops.merge_heads(self.ops.attention_mix(weights_BNTS, v_BSKH))
        mixed_BTM = tap(f"{self.name}.mixed", mixed_BTM)
        output_BTD = self.o_proj(mixed_BTM)
        return tap(f"{self.name}.output", output_BTD)

    def normed(self, norm: LayerNorm | RMSNorm, x_BTNH: Array) -> Array:
        """Each head normed, or all heads as one vector."""
        if self.config.qk_norm != "projection":
            return norm(x_BTNH)
        return self.ops.split_heads(norm(self.ops.merge_heads(x_BTNH)), x_BTNH.shape[2])
