"""The whole decoder: embeddings, blocks, final norm, output head."""

from types import ModuleType

from torch import Tensor, nn

from pytorch_impl.block import Block
from pytorch_impl.cache import Cache
from pytorch_impl.linear import Bias, Embedding, Linear, Load
from pytorch_impl.normalization import make_norm
from samelogits.batch import Batch
from samelogits.config import DecoderConfig
from samelogits.taps import Tap


class DecoderStack(nn.Module):
    """Token ids to what the output head reads [B, T, W], given the table of embeddings."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, load: Load):
        super().__init__()
        self.config = config
        self.ops = ops
        self.embed_tokens = Embedding(ops, "model.embed_tokens", load, head=config.tie_embeddings)
        self.embed_positions = (
            Embedding(ops, "model.embed_positions", load, head=False) if config.position == "learned" else None
        )
        narrow = config.embedding_width not in (None, config.d_model)
        self.embed_in = Linear(ops, "model.embed_in", load, bias=False) if narrow else None
        self.embed_norm = (
            make_norm(config, ops, "model.embed_norm", load, config.norm_bias) if config.embedding_norm else None
        )
        self.layers = nn.ModuleList([Block(config, ops, i, load) for i in range(config.n_layers)])
        self.norm = make_norm(config, ops, "model.norm", load, config.norm_bias) if config.final_norm else None
        self.embed_out = Linear(ops, "model.embed_out", load, bias=False) if narrow else None

    def forward(self, batch: Batch, table_VW: Tensor, cache: Cache | None, tap: Tap) -> Tensor:
        x_BTD = self.ops.embed(batch.tokens_BT, table_VW)
        x_BTD = tap("embed_tokens", x_BTD)
        if self.config.embedding_scale is not None:
            x_BTD = self.ops.scale_rounded(x_BTD, self.config.embedding_scale)
        if self.embed_in is not None:
            x_BTD = self.embed_in(x_BTD)
        if self.embed_norm is not None:
            x_BTD = self.embed_norm(x_BTD)
        positions_BTD = batch.sinusoids_BTD
        if self.embed_positions is not None:
            positions_BTD = self.ops.embed(batch.positions_BT, self.embed_positions.weight)
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
        return x_BTD if self.embed_out is None else self.embed_out(x_BTD)


class Decoder(nn.Module):
    """Token ids to logits [B, T, V]."""

    def __init__(self, config: DecoderConfig, ops: ModuleType, load: Load):
        super().__init__()
        self.config = config
        self.ops = ops
        self.model = DecoderStack(config, ops, load)
        self.lm_head = make_head(config, ops, load)

    def forward(self, batch: Batch, cache: Cache | None, tap: Tap) -> Tensor:
        table = self.model.embed_tokens
        if isinstance(self.lm_head, Linear):
            logits_BTV = self.lm_head(self.model(batch, table.weight, cache, tap))
        else:
            input_VW, output_VW = self.ops.fan_out(table.weight, 2)
            x_BTW = self.model(batch, input_VW, cache, tap)
            bias_V = None if self.lm_head is None else self.lm_head.bias
            logits_BTV = self.ops.linear(x_BTW, output_VW, bias_V, table.prepared)
        if self.config.logit_scale is not None:
            logits_BTV = self.ops.scale(logits_BTV, self.config.logit_scale)
        if self.config.logit_softcap is not None:
            logits_BTV = self.ops.soft_cap(logits_BTV, self.config.logit_softcap)
        return tap("logits", logits_BTV)


def make_head(config: DecoderConfig, ops: ModuleType, load: Load) -> Linear | Bias | None:
    """What the output head has beside the embedding's table, if that is its weight, or all of it."""
    if not config.tie_embeddings:
        return Linear(ops, "lm_head", load, config.head_bias)
    return Bias(ops, "lm_head", load) if config.head_bias else None
