"""Causal self-attention: multi-head, grouped-query and multi-query."""

from types import ModuleType

from numpy_reference.cache import Cache
from numpy_reference.linear import Linear, Load
from numpy_reference.tape import Array
from samelogits.batch import Batch
from samelogits.config import DecoderConfig
from samelogits.taps import Tap


class Attention:
    """Projects to queries, keys and values, mixes the values by softmax(q k^T / sqrt(H)), projects back."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, index: int, load: Load):
        self.config = config
        self.ops = ops
        self.index = index
        self.name = f"layers.{index}.self_attn"
        self.q_proj = Linear(ops, f"model.{self.name}.q_proj", load, config.attention_bias)
        self.k_proj = Linear(ops, f"model.{self.name}.k_proj", load, config.attention_bias)
        self.v_proj = Linear(ops, f"model.{self.name}.v_proj", load, config.attention_bias)
        self.o_proj = Linear(ops, f"model.{self.name}.o_proj", load, config.attention_bias)

    def __call__(self, x_BTD: Array, batch: Batch, cache: Cache | None, tap: Tap) -> Array:
        for_q_BTD, for_k_BTD, for_v_BTD = self.ops.fan_out(x_BTD, 3)
        q_BTNH = self.ops.split_heads(self.q_proj(for_q_BTD), self.config.n_heads)
        k_BTKH = self.ops.split_heads(self.k_proj(for_k_BTD), self.config.n_kv_heads)
        v_BTKH = self.ops.split_heads(self.v_proj(for_v_BTD), self.config.n_kv_heads)
        q_BTNH = tap(f"{self.name}.q", q_BTNH)
        k_BTKH = tap(f"{self.name}.k", k_BTKH)
        v_BTKH = tap(f"{self.name}.v", v_BTKH)
        if batch.rotary is not None:
            q_BTNH = self.ops.rotate(q_BTNH, *batch.rotary)
            k_BTKH = self.ops.rotate(k_BTKH, *batch.rotary)
            q_BTNH = tap(f"{self.name}.q_rotated", q_BTNH)
            k_BTKH = tap(f"{self.name}.k_rotated", k_BTKH)
        k_BSKH, v_BSKH = (k_BTKH, v_BTKH) if cache is None else cache.append(self.index, k_BTKH, v_BTKH)
        scores_BNTS = self.ops.attention_scores(q_BTNH, k_BSKH)
        scores_BNTS = tap(f"{self.name}.scores", scores_BNTS)
        weights_BNTS = self.ops.attention_weights(scores_BNTS, batch.visible_BTS)
        weights_BNTS = tap(f"{self.name}.weights", weights_BNTS)
        mixed_BTE = self.ops.merge_heads(self.ops.attention_mix(weights_BNTS, v_BSKH))
        mixed_BTE = tap(f"{self.name}.mixed", mixed_BTE)
        output_BTD = self.o_proj(mixed_BTE)
        return tap(f"{self.name}.output", output_BTD)
