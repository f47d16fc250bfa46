"""The decoder once more, straight from its formulas: no speed, no stability, no code of the implementations.

The implementations' NumPy is held to this file, PyTorch and JAX to that NumPy. Every function takes complex arrays too,
since derivatives come from the complex step: f'(x) = Im f(x + ih) / h, without a subtraction, hence to the last digit
(Squire and Trapp, 1998).
"""

import hashlib
import math

import numpy as np

STEP = 1e-30


def derivative(function, arrays, directions):
    """Derivative of a real scalar function of a dict of arrays along directions, a dict that may leave arrays out."""
    moved = {name: array + 1j * STEP * directions[name] for name, array in arrays.items() if name in directions}
    return function({**arrays, **moved}).imag / STEP


# Operations, under the names and arguments of native.py


def embed(ids_BT, weight_VD):
    return np.stack([[weight_VD[i] for i in row] for row in ids_BT])


def add(x, y):
    return x + y


def multiply(x, y):
    return x * y


def dropout(x_BTD, scale_BTD):
    return x_BTD if scale_BTD is None else x_BTD * scale_BTD


def linear(x_BTI, weight_OI, bias_O):
    y_BTO = np.einsum("...i,oi->...o", x_BTI, weight_OI)
    return y_BTO if bias_O is None else y_BTO + bias_O


def split_heads(x_BTE, n_heads):
    return np.stack(np.split(x_BTE, n_heads, axis=-1), axis=2)


def merge_heads(x_BTNH):
    return np.concatenate(list(np.moveaxis(x_BTNH, 2, 0)), axis=-1)


def rotate(x_BTNH, cos_BTR, sin_BTR):
    """Each pair (x[i], x[i + H / 2]) turned by its 2 x 2 matrix."""
    y_BTNH = np.empty(x_BTNH.shape, np.result_type(x_BTNH, cos_BTR))
    half = x_BTNH.shape[-1] // 2
    for i in range(half):
        a, b, c, s = x_BTNH[..., i], x_BTNH[..., i + half], cos_BTR[:, :, i, None], sin_BTR[:, :, i, None]
        y_BTNH[..., i], y_BTNH[..., i + half] = a * c - b * s, a * s + b * c
    return y_BTNH


def attention_scores(q_BTNH, k_BSKH):
    k_BSNH = np.repeat(k_BSKH, q_BTNH.shape[2] // k_BSKH.shape[2], axis=2)  # k0 k0 k1 k1, never k0 k1 k0 k1
    return np.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) / math.sqrt(q_BTNH.shape[-1])


def attention_weights(scores_BNTS, visible_BTS):
    exp_BNTS = np.where(visible_BTS[:, None], np.exp(scores_BNTS), 0)
    sum_BNT1 = exp_BNTS.sum(-1, keepdims=True)
    return exp_BNTS / np.where(sum_BNT1 == 0, 1, sum_BNT1)


def attention_mix(weights_BNTS, v_BSKH):
    v_BSNH = np.repeat(v_BSKH, weights_BNTS.shape[1] // v_BSKH.shape[2], axis=2)
    return np.einsum("bnts,bsnh->btnh", weights_BNTS, v_BSNH)


def layer_norm(x_BTD, weight_D, bias_D, eps):
    mean_BT1 = x_BTD.sum(-1, keepdims=True) / x_BTD.shape[-1]
    variance_BT1 = ((x_BTD - mean_BT1) ** 2).sum(-1, keepdims=True) / x_BTD.shape[-1]
    return (x_BTD - mean_BT1) / np.sqrt(variance_BT1 + eps) * weight_D + bias_D


def rms_norm(x_BTD, weight_D, eps):
    return x_BTD / np.sqrt((x_BTD**2).sum(-1, keepdims=True) / x_BTD.shape[-1] + eps) * weight_D


def relu(x):
    return np.where(x.real > 0, x, 0)


def gelu(x):
    z = x / math.sqrt(2)
    erf = np.vectorize(math.erf, otypes=[float])(z.real)
    if np.iscomplexobj(z):  # the first two terms of the Taylor series; the others vanish for an infinitesimal step
        erf = erf + 1j * z.imag * 2 / math.sqrt(math.pi) * np.exp(-(z.real**2))
    return x * (1 + erf) / 2


def gelu_tanh(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def silu(x):
    return x / (1 + np.exp(-x))


def cross_entropy(logits_BTV, ids_BT, counted_BT):
    terms = [
        np.log(np.exp(logits_BTV[b, t]).sum()) - logits_BTV[b, t, ids_BT[b, t]] for b, t in np.argwhere(counted_BT)
    ]
    return np.sum(terms) / len(terms)


# The decoder


def positions(mask_BS):
    """A row's first real token is at 0; padding takes the position of the real token before it, if any."""
    return np.array([[max(sum(row[: s + 1]) - 1, 0) for s in range(len(row))] for row in np.asarray(mask_BS).tolist()])


def visible(mask_BS, n_queries):
    """Whether query t, one of the last n_queries slots, may read slot s: a real token, and none after t."""
    B, S = mask_BS.shape
    visible_BTS = np.zeros((B, n_queries, S), bool)
    for b, t, s in np.ndindex(B, n_queries, S):
        visible_BTS[b, t, s] = mask_BS[b, s] and s <= S - n_queries + t
    return visible_BTS


def rotary(positions_BT, d_head, theta):
    """Cosines and sines, every step rounded to float32 as trained models have them."""
    one, cos, sin = np.float32(1), [], []
    for i in range(d_head // 2):
        frequency = one / np.float32(theta ** float(np.float32(2 * i) / np.float32(d_head)))
        angles = [[float(np.float32(position) * frequency) for position in row] for row in positions_BT]
        cos.append([[np.float32(math.cos(angle)) for angle in row] for row in angles])
        sin.append([[np.float32(math.sin(angle)) for angle in row] for row in angles])
    return np.moveaxis(np.float64(cos), 0, -1), np.moveaxis(np.float64(sin), 0, -1)


def sinusoids(positions_BT, d_model):
    """sin(p / 10000^(2i/D)) and cos of it, in turn, as float32."""
    columns = [
        [[wave(p / 10000 ** (2 * i / d_model)) for p in row] for row in positions_BT]
        for i in range(d_model // 2)
        for wave in (math.sin, math.cos)
    ]
    return np.moveaxis(np.float64(np.float32(columns)), 0, -1)


def dropout_scales(config, shape, seed, step):
    """The documented rule: Philox under the hash of seed/step/site; 0 below the rate, else 1 / (1 - rate)."""
    scales = {}
    for site in ["embedded", *(f"layers.{i}.{part}" for i in range(config.n_layers) for part in ("self_attn", "mlp"))]:
        key = int.from_bytes(hashlib.sha256(f"{seed}/{step}/{site}".encode()).digest()[:16], "little")
        drawn = np.random.Generator(np.random.Philox(key=key)).random((*shape, config.d_model), dtype=np.float32)
        scales[site] = (drawn >= np.float32(config.dropout)) * np.float64(np.float32(1 / (1 - config.dropout)))
    return scales


def linear_layer(parameters, name, x):
    return linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def norm_layer(config, parameters, name, x):
    weight = parameters[f"{name}.weight"]
    if config.norm == "layer_norm":
        return layer_norm(x, weight, parameters[f"{name}.bias"], config.norm_eps)
    return rms_norm(x, weight, config.norm_eps)


def attention(config, parameters, i, x, table, visible_BTS, tap):
    """table: cosines and sines, or None."""
    name = f"layers.{i}.self_attn"
    q, k, v = (
        tap(f"{name}.{p}", split_heads(linear_layer(parameters, f"model.{name}.{p}_proj", x), heads))
        for p, heads in (("q", config.n_heads), ("k", config.n_kv_heads), ("v", config.n_kv_heads))
    )
    if table is not None:
        q, k = tap(f"{name}.q_rotated", rotate(q, *table)), tap(f"{name}.k_rotated", rotate(k, *table))
    scores = tap(f"{name}.scores", attention_scores(q, k))
    weights = tap(f"{name}.weights", attention_weights(scores, visible_BTS))
    mixed = tap(f"{name}.mixed", merge_heads(attention_mix(weights, v)))
    return tap(f"{name}.output", linear_layer(parameters, f"model.{name}.o_proj", mixed))


def feed_forward(config, parameters, i, x, tap):
    name = f"layers.{i}.mlp"
    activation = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}[config.activation]
    if config.gated:
        gate = tap(f"{name}.gate", linear_layer(parameters, f"model.{name}.gate_proj", x))
        up = tap(f"{name}.up", linear_layer(parameters, f"model.{name}.up_proj", x))
        inner = activation(gate) * up
    else:
        inner = activation(tap(f"{name}.up", linear_layer(parameters, f"model.{name}.up_proj", x)))
    inner = tap(f"{name}.activated", inner)
    return tap(f"{name}.output", linear_layer(parameters, f"model.{name}.down_proj", inner))


def block(config, parameters, i, x, table, visible_BTS, tap, scales=None):
    name, scales = f"layers.{i}", scales or {}

    def norm(which, x):
        return tap(f"{name}.{which}", norm_layer(config, parameters, f"model.{name}.{which}", x))

    def attend(x):
        attended = attention(config, parameters, i, x, table, visible_BTS, tap)
        return dropout(attended, scales.get(f"{name}.self_attn"))

    def feed(x):
        return dropout(feed_forward(config, parameters, i, x, tap), scales.get(f"{name}.mlp"))

    if config.norm_placement == "pre":
        x = tap(f"{name}.residual_mid", x + attend(norm("input_layernorm", x)))
        return tap(f"{name}.residual_out", x + feed(norm("post_attention_layernorm", x)))
    x = norm("post_attention_layernorm", tap(f"{name}.residual_mid", x + attend(x)))
    return norm("post_feedforward_layernorm", tap(f"{name}.residual_out", x + feed(x)))


def decoder(config, parameters, tokens_BT, mask_BT=None, scales=None):
    """Every activation by tap name, in the order met; the logits are the last."""
    taps = {}

    def tap(name, value):
        taps[name] = value
        return value

    tokens_BT, scales = np.asarray(tokens_BT), scales or {}
    mask_BT = np.ones(tokens_BT.shape, int) if mask_BT is None else np.asarray(mask_BT)
    positions_BT, table = positions(mask_BT), None
    x = tap("embed_tokens", embed(tokens_BT, parameters["model.embed_tokens.weight"]))
    if config.position == "learned":
        x = x + tap("embed_positions", embed(positions_BT, parameters["model.embed_positions.weight"]))
    elif config.position == "sinusoidal":
        x = x + tap("embed_positions", sinusoids(positions_BT, config.d_model))
    elif config.position == "rope":
        table = rotary(positions_BT, config.d_head, config.rope_theta)
    x = tap("embedded", dropout(x, scales.get("embedded")))
    for i in range(config.n_layers):
        x = block(config, parameters, i, x, table, visible(mask_BT, tokens_BT.shape[1]), tap, scales)
    if config.final_norm:
        x = tap("norm", norm_layer(config, parameters, "model.norm", x))
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    tap("logits", linear(x, parameters[head], None))
    return taps


def loss(config, parameters, tokens_BT, targets_BT, mask_BT=None, scales=None, ignored=-100):
    logits_BTV = decoder(config, parameters, tokens_BT, mask_BT, scales)["logits"]
    return cross_entropy(logits_BTV, targets_BT, targets_BT != ignored)


# Training and generation


class AdamW:
    """One scalar rule, written out (Loshchilov and Hutter, 2019); PyTorch's clipping."""

    def __init__(self, settings):
        self.settings, self.t, self.m, self.v = settings, 0, {}, {}

    def step(self, parameters, gradients, rate):
        """New parameters, and the gradients' norm before clipping."""
        s = self.settings
        self.t += 1
        norm = math.sqrt(sum(np.sum(g**2) for g in gradients.values()))
        new = {}
        for name, w in parameters.items():
            g = gradients[name] * min(1, s.max_grad_norm / (norm + 1e-6))
            self.m[name] = s.beta1 * self.m.get(name, 0) + (1 - s.beta1) * g
            self.v[name] = s.beta2 * self.v.get(name, 0) + (1 - s.beta2) * g**2
            m_hat = self.m[name] / (1 - s.beta1**self.t)
            v_hat = self.v[name] / (1 - s.beta2**self.t)
            decayed = s.weight_decay * w if np.ndim(w) >= 2 else 0
            new[name] = w - rate * decayed - rate * m_hat / (np.sqrt(v_hat) + s.eps)
        return new, norm


def learning_rate(settings, finished):
    """Warm-up from 0, half a cosine down to final_fraction, then flat."""
    s = settings
    if finished < s.warmup_steps:
        return s.learning_rate / s.warmup_steps * finished
    share = min(finished - s.warmup_steps, s.total_steps - s.warmup_steps) / (s.total_steps - s.warmup_steps)
    low = s.learning_rate * s.final_fraction
    return low + (s.learning_rate - low) * (1 + math.cos(math.pi * share)) / 2


def choose(logits_V, seen, row, step, temperature=0.0, top_k=None, top_p=None, repetition_penalty=1.0, seed=0):
    """One token, from sorted lists of (logit, id) and the documented draw."""
    logits = [float(value) for value in logits_V]
    for token in {int(token) for token in seen}:
        logits[token] = logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return ranked[0]
    ranked = ranked[:top_k]
    masses = [math.exp((logits[token] - logits[ranked[0]]) / temperature) for token in ranked]
    kept, total = len(masses), sum(masses)
    if top_p is not None:
        kept = next(n for n in range(1, len(masses) + 1) if n == len(masses) or sum(masses[:n]) >= top_p * total)
    drawn = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, row, step])).random() * sum(masses[:kept])
    return next(token for n, token in enumerate(ranked[:kept], 1) if n == kept or drawn < sum(masses[:n]))


def generate(config, parameters, tokens, n_new, mask=None, ends=(), pad=0, **settings):
    """Rows of prompt and continuation, the whole decoder run anew for each token."""
    rows = [list(map(int, row)) for row in tokens]
    masks = [[1] * len(row) for row in rows] if mask is None else [list(map(int, row)) for row in mask]
    done = [False] * len(rows)
    for step in range(n_new):
        logits = decoder(config, parameters, rows, masks)["logits"]
        for b, row in enumerate(rows):
            seen = [token for token, real in zip(row, masks[b], strict=True) if real]
            token = pad if done[b] else choose(logits[b, -1], seen, b, step, **settings)
            row.append(token)
            masks[b].append(int(not done[b]))
            done[b] = done[b] or token in ends
        if all(done):
            break
    return np.array(rows)
