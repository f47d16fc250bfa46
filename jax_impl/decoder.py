"""The whole decoder: embeddings, blocks, final norm, output head."""

from types import ModuleType

from flax import nnx
from jax import Array

from jax_impl.block import Block
from jax_impl.cache import Cache
from jax_impl.linear import Embedding, Linear, Load
from jax_impl.normalization import make_norm
from samelogits.batch import Batch
from samelogits.config import DecoderConfig
from samelogits.taps import Tap


class DecoderStack(nnx.Module):
    """Token ids to the last hidden state [B, T, D], given the table of embeddings."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, load: Load):
        self.ops = ops
        self.embed_tokens = Embedding(ops, "model.embed_tokens", load, head=config.tie_embeddings)
        self.embed_positions = (
            Embedding(ops, "model.embed_positions", load, head=False) if config.position == "learned" else None
        )
        self.layers = nnx.List([Block(config, ops, i, load) for i in range(config.n_layers)])
        self.norm = make_norm(config, ops, "model.norm", load) if config.final_norm else None

    def __call__(self, batch: Batch, table_VD: Array, cache: Cache | None, tap: Tap) -> Array:
        x_BTD = self.ops.embed(batch.tokens_BT, table_VD)
        x_BTD = tap("embed_tokens", x_BTD)
        positions_BTD = batch.sinusoids_BTD
        if self.embed_positions is not None:
            positions_BTD = self.ops.embed(batch.positions_BT, self.embed_positions.weight[...])
        if positions_BTD is not None:
            positions_BTD = tap("embed_positions", positions_BTD)
            x_BTD = self.ops.add(x_BTD, positions_BTD)
        x_BTD = self.ops.dropout(x_BTD, batch.dropout.get("embedded"))
        x_BTD = tap("embedded", x_BTD)
        for layer in self.layers:
            x_BTD = layer(x_BTD, batch, cache, tap)
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
            x_BTD = tap("norm", x_BTD)
        if cache is not None:
            cache.filled += x_BTD.shape[1]
        return x_BTD


class Decoder(nnx.Module):
    """Token ids to logits [B, T, V]."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, load: Load):
        self.ops = ops
        self.model = DecoderStack(config, ops, load)
        self.lm_head = None if config.tie_embeddings else Linear(ops, "lm_head", load, bias=False)

    def __call__(self, batch: Batch, cache: Cache | None, tap: Tap) -> Array:
        table = self.model.embed_tokens
        if self.lm_head is not None:
            logits_BTV = self.lm_head(self.model(batch, table.weight[...], cache, tap))
        else:
            input_VD, output_VD = self.ops.fan_out(table.weight[...], 2)
            logits_BTV = self.ops.linear(self.model(batch, input_VD, cache, tap), output_VD, None, table.prepared)
        return tap("logits", logits_BTV)
