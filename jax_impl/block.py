"""One decoder block: attention and feed-forward, each with its norms and its residual sum."""

from types import ModuleType

from flax import nnx
from jax import Array

from jax_impl.attention import Attention
from jax_impl.cache import Cache
from jax_impl.feed_forward import make_feed_forward
from jax_impl.linear import Load
from jax_impl.normalization import make_norm
from samelogits.batch import Batch
from samelogits.config import DecoderConfig
from samelogits.parameters import block_norms, norm_names
from samelogits.taps import Tap


class Block(nnx.Module):
    """[B, T, D] to the same: x + f(x) twice, or x + f(x) + g(x), with norms where the config places them."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, index: int, load: Load):
        self.config = config
        self.ops = ops
        self.name = f"layers.{index}"
        for norm_name in norm_names(config):
            norm = make_norm(config, ops, f"model.{self.name}.{norm_name}", load, config.norm_bias)
            setattr(self, norm_name, norm)
        self.self_attn = Attention(config, ops, index, load)
        self.mlp = make_feed_forward(config, ops, index, load)

    def __call__(self, x_BTD: Array, batch: Batch, cache: Cache | None, tap: Tap) -> Array:
        run = self.parallel if self.config.parallel_residual else self.sequential
        x_BTD = run(x_BTD, batch, cache, tap)
        assert x_BTD.dtype == self.self_attn.o_proj.weight.dtype  # differs: promotion
        return x_BTD

    def sequential(self, x_BTD: Array, batch: Batch, cache: Cache | None, tap: Tap) -> Array:
        """x + f(x), then that y + g(y)."""
        norms = block_norms(self.config)
        residual_BTD, x_BTD = self.ops.fan_out(x_BTD, 2)
        normed_BTD = self.normalize(norms.before_attention, x_BTD, tap)
        attended_BTD = self.self_attn(normed_BTD, batch, cache, tap)
        attended_BTD = self.normalize(norms.attention_output, attended_BTD, tap)
        x_BTD = self.ops.add(residual_BTD, self.addend("self_attn", attended_BTD, batch))
        x_BTD = tap(f"{self.name}.residual_mid", x_BTD)
        x_BTD = self.normalize(norms.attention_sum, x_BTD, tap)

        residual_BTD, x_BTD = self.ops.fan_out(x_BTD, 2)
        normed_BTD = self.normalize(norms.before_feed_forward, x_BTD, tap)
        fed_BTD = self.mlp(normed_BTD, tap)
        fed_BTD = self.normalize(norms.feed_forward_output, fed_BTD, tap)
        x_BTD = self.ops.add(residual_BTD, self.addend("mlp", fed_BTD, batch))
        x_BTD = tap(f"{self.name}.residual_out", x_BTD)
        return self.normalize(norms.feed_forward_sum, x_BTD, tap)

    def parallel(self, x_BTD: Array, batch: Batch, cache: Cache | None, tap: Tap) -> Array:
        """x + f(x) + g(x), behind one norm or two."""
        norms = block_norms(self.config)
        residual_BTD, x_BTD, other_BTD = self.ops.fan_out(x_BTD, 3)
        normed_BTD = self.normalize(norms.before_attention, x_BTD, tap)
        if norms.before_feed_forward is None:
            normed_BTD, other_BTD = self.ops.fan_out(normed_BTD, 2)
        attended_BTD = self.self_attn(normed_BTD, batch, cache, tap)
        other_BTD = self.normalize(norms.before_feed_forward, other_BTD, tap)
        fed_BTD = self.mlp(other_BTD, tap)
        both_BTD = self.ops.add(self.addend("self_attn", attended_BTD, batch), self.addend("mlp", fed_BTD, batch))
        return tap(f"{self.name}.residual_out", self.ops.add(residual_BTD, both_BTD))

    def normalize(self, norm_name: str | None, x_BTD: Array, tap: Tap) -> Array:
        """The norm of this name, tapped; x itself where there is none."""
        if norm_name is None:
            return x_BTD
        normed_BTD: Array = tap(f"{self.name}.{norm_name}", getattr(self, norm_name)(x_BTD))
        return normed_BTD

    def addend(self, site: str, y_BTD: Array, batch: Batch) -> Array:
        """What a layer adds to the residual stream."""
        y_BTD = self.ops.dropout(y_BTD, batch.dropout.get(f"{self.name}.{site}"))
        return y_BTD if self.config.residual_scale is None else self.ops.scale(y_BTD, self.config.residual_scale)
