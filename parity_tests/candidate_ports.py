"""Small checkpoints in memory, and decoders as people write them: what the adapters of candidates are tested on."""

import math
from functools import partial

import ladder
import numpy as np
from checkpoint_files import GPT2, LLAMA

from samelogits.backend import get_backend
from samelogits.batch import make_batch
from samelogits.checking.candidates import Candidate, check_output
from samelogits.checking.probe import make_probe
from samelogits.checkpoints.checkpoint import Checkpoint
from samelogits.checkpoints.tensors import StoredTensor
from samelogits.parameters import parameter_shapes, random_parameters
from samelogits.taps import tap_names

NOISE = {"float32": 2e-5, "bfloat16": 0.2}  # of the largest value; the worst measured are 6e-7 and 2e-2
ATTENTION = ("scores", "weights", "q_rotated", "k_rotated")
MASK = np.array([[1] * 7, [0, 0] + [1] * 5, [1] * 4 + [0] * 3])


def checkpoint_of(config, seed=3):
    """Float32 parameters in memory, as no folder."""
    arrays = random_parameters(config, seed)
    return Checkpoint(
        source="memory",
        format="canonical",
        config=config,
        tensors={name: StoredTensor("F32", arrays[name]) for name in parameter_shapes(config)},
    )


def probe_of(config, mask=MASK):
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, mask.shape)
    return make_probe(config.vocab_size, config.position_limit, tokens, mask)


def run_checked(candidate, config, probe=None):
    """Its output on the probe, through the contract's checks."""
    probe = probe or probe_of(config, MASK if candidate.takes_mask else np.ones_like(MASK))
    return check_output(candidate.run(probe), config, probe, candidate.name)


def assert_is_model(candidate, config, absent=(), mask=MASK):
    """Every tap but the absent kinds, within the noise of its precision, at every real token. The output."""
    assert isinstance(candidate, Candidate)
    probe = probe_of(config, mask)
    output = run_checked(candidate, config, probe)
    known = get_backend("numpy").load(config, checkpoint_of(config).parameters(), "float64", None)
    expected = known.activations(probe.tokens_BT, probe.mask_BT)
    wanted = [name for name in tap_names(config) if name.rpartition(".")[2] not in absent]
    assert sorted(output.taps) == sorted(wanted)
    assert np.array_equal(output.taps["logits"], output.logits)
    visible = make_batch(config, probe.tokens_BT, mask).visible_BTS & probe.mask_BT[:, :, None]
    for name in wanted:
        found, known_array = output.taps[name], expected[name]
        if name.endswith(("scores", "weights")):
            shown = np.broadcast_to(visible[:, None], found.shape)
        else:
            shown = probe.mask_BT
        ladder.assert_close(found[shown], known_array[shown], NOISE[candidate.precision], name)
    return output


def nano_gpt(parameters):
    """nanoGPT's modules, names and ways: one projection for q, k, v; without targets, the last logits only."""
    import torch
    from torch import nn
    from torch.nn import functional

    c = GPT2

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
            self.resid_dropout = nn.Dropout(0.3)

        def forward(self, x):
            B, T, D = x.shape
            q, k, v = (each.view(B, T, c.n_heads, -1).transpose(1, 2) for each in self.c_attn(x).split(D, dim=2))
            hidden = torch.ones(T, T).tril() == 0
            weights = (q @ k.transpose(2, 3) / math.sqrt(c.d_head)).masked_fill(hidden, -math.inf).softmax(-1)
            return self.resid_dropout(self.c_proj((weights @ v).transpose(1, 2).reshape(B, T, D)))

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_fc, self.gelu = nn.Linear(c.d_model, c.d_ff), nn.GELU("tanh")
            self.c_proj, self.dropout = nn.Linear(c.d_ff, c.d_model), nn.Dropout(0.3)

        def forward(self, x):
            return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.attn = nn.LayerNorm(c.d_model, c.norm_eps), Attention()
            self.ln_2, self.mlp = nn.LayerNorm(c.d_model, c.norm_eps), MLP()

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            x += self.mlp(self.ln_2(x))  # in place: what a hook kept by reference would change
            return x

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            parts = {
                "wte": nn.Embedding(c.vocab_size, c.d_model),
                "wpe": nn.Embedding(c.max_seq_len, c.d_model),
                "drop": nn.Dropout(0.3),
                "h": nn.ModuleList([Block() for _ in range(c.n_layers)]),
                "ln_f": nn.LayerNorm(c.d_model, c.norm_eps),
            }
            self.transformer = nn.ModuleDict(parts)
            self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
            self.lm_head.weight = self.transformer.wte.weight

        def forward(self, idx, targets=None):
            t = self.transformer
            x = t.drop(t.wte(idx) + t.wpe(torch.arange(idx.shape[1])))
            for block in t.h:
                x = block(x)
            x = t.ln_f(x)
            if targets is None:
                return self.lm_head(x[:, [-1]]), None
            logits = self.lm_head(x)
            return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    names = {
        "wte": "model.embed_tokens", "wpe": "model.embed_positions", "ln_f": "model.norm",
        "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
    }  # fmt: skip
    model = GPT()
    with torch.no_grad():
        for name, value in model.named_parameters():
            module, _, kind = name.removeprefix("transformer.").rpartition(".")
            layer = ""
            if module.startswith("h."):
                _, index, module = module.split(".", 2)
                layer = f"model.layers.{index}."
            if module == "attn.c_attn":
                found = np.concatenate([parameters[f"{layer}self_attn.{letter}_proj.{kind}"] for letter in "qkv"])
            else:
                found = parameters[f"{layer}{names[module]}.{kind}"]
            value.copy_(torch.tensor(found))
    return model


def torch_linear(parameters, name, change=lambda weight_OI: weight_OI):
    """nn.Linear with these parameters, its weight changed."""
    import torch

    weight, bias = change(parameters[f"{name}.weight"]), parameters.get(f"{name}.bias")
    made = torch.nn.Linear(*weight.shape[::-1], bias=bias is not None)
    made.weight.data = torch.tensor(weight)
    if bias is not None:
        made.bias.data = torch.tensor(bias)
    return made


def torch_norm(parameters, config, name):
    """nn.LayerNorm or nn.RMSNorm with these parameters."""
    import torch

    weight, bias = parameters[f"{name}.weight"], parameters.get(f"{name}.bias")
    made = (torch.nn.RMSNorm if bias is None else torch.nn.LayerNorm)(len(weight), config.norm_eps)
    made.weight.data = torch.tensor(weight)
    if bias is not None:
        made.bias.data = torch.tensor(bias)
    return made


def from_scratch(config, parameters):
    """The modules and names of the book "Build a Large Language Model (From Scratch)": its GPT, and its Qwen."""
    import torch
    from torch import nn

    from samelogits.positions import rotary_tables

    c, gpt = config, config.position == "learned"

    linear, norm = partial(torch_linear, parameters), partial(torch_norm, parameters, c)

    def rotate(x_BNTH):
        cos, sin = (
            torch.tensor(each) for each in rotary_tables(np.arange(x_BNTH.shape[2])[None], c.d_head, c.rope_theta)
        )
        a, b = x_BNTH.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    class Attention(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.W_query, self.W_key, self.W_value, self.out_proj = (linear(f"{name}.{i}_proj") for i in "qkvo")
            if gpt:
                self.dropout = nn.Dropout(0.1)
            else:
                self.q_norm, self.k_norm = norm(f"{name}.q_norm"), norm(f"{name}.k_norm")

        def forward(self, x):
            B, T, _ = x.shape
            q, k, v = (
                each(x).view(B, T, -1, c.d_head).transpose(1, 2) for each in (self.W_query, self.W_key, self.W_value)
            )
            if not gpt:
                q, k = rotate(self.q_norm(q)), rotate(self.k_norm(k))
            k, v = (each.repeat_interleave(c.n_heads // c.n_kv_heads, dim=1) for each in (k, v))
            hidden = torch.ones(T, T).tril() == 0
            weights = (q @ k.mT / math.sqrt(c.d_head)).masked_fill(hidden, -math.inf).softmax(-1)
            weights = self.dropout(weights) if gpt else weights
            return self.out_proj((weights @ v).transpose(1, 2).reshape(B, T, -1))

    class Dense(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.layers = nn.Sequential(linear(f"{name}.up_proj"), nn.GELU("tanh"), linear(f"{name}.down_proj"))

        def forward(self, x):
            return self.layers(x)

    class Gated(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.fc1, self.fc2, self.fc3 = (linear(f"{name}.{part}_proj") for part in ("gate", "up", "down"))

        def forward(self, x):
            return self.fc3(nn.functional.silu(self.fc1(x)) * self.fc2(x))

    class Block(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.att, self.ff = Attention(f"{name}.self_attn"), (Dense if gpt else Gated)(f"{name}.mlp")
            self.norm1, self.norm2 = norm(f"{name}.input_layernorm"), norm(f"{name}.post_attention_layernorm")
            self.drop_resid = nn.Dropout(0.1) if gpt else nn.Identity()

        def forward(self, x):
            x = x + self.drop_resid(self.att(self.norm1(x)))
            return x + self.drop_resid(self.ff(self.norm2(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok_emb = nn.Embedding.from_pretrained(torch.tensor(parameters["model.embed_tokens.weight"]))
            if gpt:
                positions = torch.tensor(parameters["model.embed_positions.weight"])
                self.pos_emb, self.drop_emb = nn.Embedding.from_pretrained(positions), nn.Dropout(0.1)
            self.trf_blocks = nn.Sequential(*(Block(f"model.layers.{i}") for i in range(c.n_layers)))
            self.final_norm = norm("model.norm")
            self.out_head = linear("model.embed_tokens" if c.tie_embeddings else "lm_head")

        def forward(self, in_idx):
            x = self.tok_emb(in_idx)
            if gpt:
                x = self.drop_emb(x + self.pos_emb(torch.arange(in_idx.shape[1])))
            return self.out_head(self.final_norm(self.trf_blocks(x)))

    return Model()


def meta_llama(parameters):
    """Meta's modules and names: rotary pairs side by side, to which the rows of wq and wk are put."""
    import torch
    from torch import nn

    from samelogits.positions import rotary_tables

    c = LLAMA
    linear, norm = partial(torch_linear, parameters), partial(torch_norm, parameters, c)

    def side_by_side(weight_OI):
        return weight_OI.reshape(-1, 2, c.d_head // 2, c.d_model).swapaxes(1, 2).reshape(weight_OI.shape)

    class Attention(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.wq, self.wk = (linear(f"{name}.{letter}_proj", side_by_side) for letter in "qk")
            self.wv, self.wo = linear(f"{name}.v_proj"), linear(f"{name}.o_proj")

        def forward(self, x, turn):
            B, T, _ = x.shape
            q, k, v = (each(x).view(B, T, -1, c.d_head).transpose(1, 2) for each in (self.wq, self.wk, self.wv))
            q, k = (torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) * turn for each in (q, k))
            q, k = torch.view_as_real(q).flatten(3), torch.view_as_real(k).flatten(3)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.wo(mixed.transpose(1, 2).reshape(B, T, -1))

    class FeedForward(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.w1, self.w3, self.w2 = (linear(f"{name}.{part}_proj") for part in ("gate", "up", "down"))

        def forward(self, x):
            return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))

    class TransformerBlock(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.attention, self.feed_forward = Attention(f"{name}.self_attn"), FeedForward(f"{name}.mlp")
            self.attention_norm = norm(f"{name}.input_layernorm")
            self.ffn_norm = norm(f"{name}.post_attention_layernorm")

        def forward(self, x, turn):
            h = x + self.attention(self.attention_norm(x), turn)
            return h + self.feed_forward(self.ffn_norm(h))

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok_embeddings = nn.Embedding.from_pretrained(torch.tensor(parameters["model.embed_tokens.weight"]))
            self.layers = nn.ModuleList(TransformerBlock(f"model.layers.{i}") for i in range(c.n_layers))
            self.norm, self.output = norm("model.norm"), linear("lm_head")

        def forward(self, tokens):
            tables = rotary_tables(np.arange(tokens.shape[1])[None], c.d_head, c.rope_theta)
            turn, h = torch.complex(*map(torch.tensor, tables)), self.tok_embeddings(tokens)
            for layer in self.layers:
                h = layer(h, turn)
            return self.output(self.norm(h))

    return Transformer()


def nnx_llama(parameters):
    """A Llama of Flax's own layers, with dropout, in training mode."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from samelogits.positions import rotary_tables

    c = LLAMA

    class Base(nnx.Module):
        def __init__(self, name, rngs, out, into):
            self.kernel = nnx.Param(jnp.asarray(parameters[f"{name}.weight"].T))

        def __call__(self, x):
            return jnp.einsum("...i,io->...o", x, self.kernel[...])

    class Projection(Base):  # its __call__ is inherited
        pass

    class Attention(nnx.Module):
        def __init__(self, name, rngs):
            width = {"q": c.n_heads, "k": c.n_kv_heads, "v": c.n_kv_heads}
            for letter, heads in width.items():
                setattr(self, f"{letter}_proj", Projection(f"{name}.{letter}_proj", rngs, heads * c.d_head, c.d_model))
            self.o_proj = Projection(f"{name}.o_proj", rngs, c.d_model, c.n_heads * c.d_head)

        def __call__(self, x, mask):
            B, T, _ = x.shape
            cos, sin = (jnp.asarray(table)[:, :, None] for table in rotary_tables(np.arange(T)[None], c.d_head, 5000.0))

            def rotate(x):
                a, b = jnp.split(x, 2, -1)
                cosines, sines = jnp.broadcast_to(cos, a.shape), jnp.broadcast_to(sin, a.shape)
                return jnp.concatenate([a * cosines - b * sines, b * cosines + a * sines], -1)

            q, k, v = (
                getattr(self, f"{letter}_proj")(x).reshape(B, T, heads, c.d_head)
                for letter, heads in (("q", c.n_heads), ("k", c.n_kv_heads), ("v", c.n_kv_heads))
            )
            k, v = (jnp.repeat(each, c.n_heads // c.n_kv_heads, 2) for each in (rotate(k), v))
            scores = jnp.einsum("btnh,bsnh->bnts", rotate(q), k) / math.sqrt(c.d_head)
            seen = jnp.tril(jnp.ones((T, T), bool))[None, None] & (mask[:, None, None] > 0)
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
            return self.o_proj(jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(B, T, -1))

    class MLP(nnx.Module):
        def __init__(self, name, rngs):
            self.gate_proj = Projection(f"{name}.gate_proj", rngs, c.d_ff, c.d_model)
            self.up_proj = Projection(f"{name}.up_proj", rngs, c.d_ff, c.d_model)
            self.down_proj = Projection(f"{name}.down_proj", rngs, c.d_model, c.d_ff)

        def __call__(self, x):
            return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))

    def norm(name, rngs):
        made = nnx.RMSNorm(c.d_model, epsilon=c.norm_eps, rngs=rngs)
        made.scale[...] = jnp.asarray(parameters[f"{name}.weight"])
        return made

    class Layer(nnx.Module):
        def __init__(self, name, rngs):
            self.input_layernorm = norm(f"{name}.input_layernorm", rngs)
            self.self_attn = Attention(f"{name}.self_attn", rngs)
            self.post_attention_layernorm = norm(f"{name}.post_attention_layernorm", rngs)
            self.mlp = MLP(f"{name}.mlp", rngs)
            self.dropout = nnx.Dropout(0.4, rngs=rngs)

        def __call__(self, x, mask):
            x = x + self.dropout(self.self_attn(self.input_layernorm(x), mask))
            return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))

    class Llama(nnx.Module):
        def __init__(self, rngs):
            self.embed_tokens = nnx.Embed(c.vocab_size, c.d_model, rngs=rngs)
            self.embed_tokens.embedding[...] = jnp.asarray(parameters["model.embed_tokens.weight"])
            self.layers = nnx.List([Layer(f"model.layers.{i}", rngs) for i in range(c.n_layers)])
            self.norm = norm("model.norm", rngs)
            self.lm_head = Projection("lm_head", rngs, c.vocab_size, c.d_model)

        def __call__(self, tokens, attention_mask):
            x = self.embed_tokens(tokens)
            for layer in self.layers:
                x = layer(x, attention_mask)
            return {"logits": self.lm_head(self.norm(x)), "cache": object()}

    return Llama(nnx.Rngs(0))
