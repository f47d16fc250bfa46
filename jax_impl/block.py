"""One decoder block: attention and feed-forward, each with its norm and its residual sum."""

from types import ModuleType

from flax import nnx
from jax import Array

from jax_impl.attention import Attention
from jax_impl.cache import Cache
from jax_impl.feed_forward import FeedForward
from jax_impl.linear import Load
from jax_impl.normalization import make_norm
from samelogits.batch import Batch
from samelogits.config import DecoderConfig
from samelogits.parameters import norm_names
from samelogits.taps import Tap


class Block(nnx.Module):
    """x + f(norm(x)) twice (pre-norm), or norm(x + f(x)) twice (post-norm)."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, index: int, load: Load):
        self.config = config
        self.ops = ops
        self.name = f"layers.{index}"
        for norm_name in norm_names(config):
            setattr(self, norm_name, make_norm(config, ops, f"model.{self.name}.{norm_name}", load))
        self.self_attn = Attention(config, ops, index, load)
        self.mlp = FeedForward(config, ops, index, load)

    def __call__(self, x_BTD: Array, batch: Batch, cache: Cache | None, tap: Tap) -> Array:
        attention_norm, feed_forward_norm = norm_names(self.config)
        pre = self.config.norm_placement == "pre"

        residual_BTD, x_BTD = self.ops.fan_out(x_BTD, 2)
        normed_BTD = self.normalize(attention_norm, x_BTD, tap) if pre else x_BTD
        attended_BTD = self.self_attn(normed_BTD, batch, cache, tap)
        x_BTD = self.ops.add(residual_BTD, self.ops.dropout(attended_BTD, batch.dropout.get(f"{self.name}.self_attn")))
        x_BTD = tap(f"{self.name}.residual_mid", x_BTD)
        if not pre:
            x_BTD = self.normalize(attention_norm, x_BTD, tap)

        residual_BTD, x_BTD = self.ops.fan_out(x_BTD, 2)
        normed_BTD = self.normalize(feed_forward_norm, x_BTD, tap) if pre else x_BTD
        fed_BTD = self.mlp(normed_BTD, tap)
        x_BTD = self.ops.add(residual_BTD, self.ops.dropout(fed_BTD, batch.dropout.get(f"{self.name}.mlp")))
        x_BTD = tap(f"{self.name}.residual_out", x_BTD)
        if not pre:
            x_BTD = self.normalize(feed_forward_norm, x_BTD, tap)
        return x_BTD

    def normalize(self, norm_name: str, x_BTD: Array, tap: Tap) -> Array:
        """The norm of this name, tapped."""
        normed_BTD: Array = tap(f"{self.name}.{norm_name}", getattr(self, norm_name)(x_BTD))
        return normed_BTD
