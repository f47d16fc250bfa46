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


def scale(x, factor):
    return x * factor


def scale_rounded(x, factor):
    return scale(x, factor)


def clip(x, limit):
    return np.where(abs(x.real) <= limit, x, limit * np.sign(x.real))


def soft_cap(x, cap):
    return cap * np.tanh(x / cap)


def plus_one(weight):
    return weight + 1


def dropout(x_BTD, scale_BTD):
    return x_BTD if scale_BTD is None else x_BTD * scale_BTD


def linear(x_BTI, weight_OI, bias_O):
    y_BTO = np.einsum("...i,oi->...o", x_BTI, weight_OI)
    return y_BTO if bias_O is None else y_BTO + bias_O


def split_heads(x_BTM, n_heads):
    return np.stack(np.split(x_BTM, n_heads, axis=-1), axis=2)


def merge_heads(x_BTNH):
    return np.concatenate(list(np.moveaxis(x_BTNH, 2, 0)), axis=-1)


def rotate(x_BTNH, cos_BTP, sin_BTP):
    """Each pair (x[i], x[i + P]) turned by its 2 x 2 matrix, all other elements left alone."""
    y_BTNH = x_BTNH.astype(np.result_type(x_BTNH, cos_BTP))
    half = cos_BTP.shape[-1]
    for i in range(half):
        a, b, c, s = x_BTNH[..., i], x_BTNH[..., i + half], cos_BTP[:, :, i, None], sin_BTP[:, :, i, None]
        y_BTNH[..., i], y_BTNH[..., i + half] = a * c - b * s, a * s + b * c
    return y_BTNH


def attention_scores(q_BTNH, k_BSKH, scale):
    k_BSNH = np.repeat(k_BSKH, q_BTNH.shape[2] // k_BSKH.shape[2], axis=2)  # k0 k0 k1 k1, never k0 k1 k0 k1
    return np.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) * scale


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
    normal_BTD = (x_BTD - mean_BT1) / np.sqrt(variance_BT1 + eps)
    return normal_BTD * (1 if weight_D is None else weight_D) + (0 if bias_D is None else bias_D)


def rms_norm(x_BTD, weight_D, eps):
    normal_BTD = x_BTD / np.sqrt((x_BTD**2).sum(-1, keepdims=True) / x_BTD.shape[-1] + eps)
    return normal_BTD * (1 if weight_D is None else weight_D)


def rms_norm_wide(x_BTD, weight_D, eps):
    return rms_norm(x_BTD, weight_D, eps)


def relu(x):
    return np.where(x.real > 0, x, 0)


def relu_squared(x):
    return relu(x) ** 2


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


def route(logits_BTE, n_active, normalize):
    """Token by token: all experts in order of their logits, the first ones kept."""
    routing_BTE = np.zeros_like(logits_BTE)
    for b, t in np.ndindex(logits_BTE.shape[:2]):
        logits = logits_BTE[b, t]
        chosen = sorted(range(len(logits)), key=lambda e, logits=logits: (-logits[e].real, e))[:n_active]
        total = sum(np.exp(logits[e]) for e in (chosen if normalize else range(len(logits))))
        for e in chosen:
            routing_BTE[b, t, e] = np.exp(logits[e]) / total
    return routing_BTE


def weigh(x_BTD, routing_BTE, expert):
    return np.stack([x_BTD[..., d] * routing_BTE[..., expert] for d in range(x_BTD.shape[-1])], -1)


def cross_entropy(logits_BTV, ids_BT, counted_BT):
    terms = [
        np.log(np.exp(logits_BTV[b, t]).sum()) - logits_BTV[b, t, ids_BT[b, t]] for b, t in np.argwhere(counted_BT)
    ]
    return np.sum(terms) / len(terms)


# The decoder


def positions(mask_BS):
    """A row's first real token is at 0; padding takes the position of the real token before it, if any."""
    return np.array([[max(sum(row[: s + 1]) - 1, 0) for s in range(len(row))] for row in np.asarray(mask_BS).tolist()])


def visible(mask_BS, n_queries, window=None):
    """Whether query t, one of the last n_queries slots, may read slot s: a real token, none after t, and with a window
    one of so many slots that end with t's own."""
    B, S = mask_BS.shape
    visible_BTS = np.zeros((B, n_queries, S), bool)
    for b, t, s in np.ndindex(B, n_queries, S):
        own = S - n_queries + t
        visible_BTS[b, t, s] = mask_BS[b, s] and (0 if window is None else own - window + 1) <= s <= own
    return visible_BTS


def frequencies(width, theta, scaling=None, length=0):
    """Radians a position of each pair, every step rounded to float32 as trained models have them."""
    one, pairs = np.float32(1), range(width // 2)
    kind = None if scaling is None else scaling.kind
    if kind == "dynamic" and length > scaling.original_length:
        growth = scaling.factor * length / scaling.original_length - scaling.factor + 1
        theta = theta * growth ** (width / (width - 2))
    powers = [np.float32(theta ** float(np.float32(2 * i) / np.float32(width))) for i in pairs]
    if kind == "longrope":
        own = scaling.short_factors if length <= scaling.original_length else scaling.long_factors
        return [one / (np.float32(own[i]) * powers[i]) for i in pairs]
    plain = [one / power for power in powers]
    if kind == "linear":
        return [frequency / np.float32(scaling.factor) for frequency in plain]
    if kind == "llama3":
        return [_by_wavelength(frequency, scaling) for frequency in plain]
    if kind == "yarn":
        return [_by_turns(i, power, width, theta, scaling) for i, power in enumerate(powers)]
    return plain


def _by_wavelength(frequency, scaling):
    """Kept, divided, or between the two, by how often the wave fits into the original length."""
    low, high, factor = map(np.float32, (scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.factor))
    length, wave = np.float32(scaling.original_length), np.float32(2 * math.pi) / frequency
    if wave < length / high:
        return frequency
    if wave > length / low:
        return frequency / factor
    smooth = (length / wave - low) / (high - low)
    return (np.float32(1) - smooth) * frequency / factor + smooth * frequency


def _by_turns(i, power, width, theta, scaling):
    """The same by the pair's index between those that turn beta_fast and beta_slow times in the original length."""
    first, last = (
        width * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    way = (np.float32(i) - np.float32(first)) / np.float32(last - first if last != first else 0.001)
    kept, one = np.float32(1) - min(max(way, np.float32(0)), np.float32(1)), np.float32(1)
    return one / (np.float32(scaling.factor) * power) * (one - kept) + one / power * kept


def rotary(positions_BT, width, theta, scaling=None):
    """Cosines and sines, every step rounded to float32 as trained models have them."""
    cos, sin = [], []
    factor = np.float32(getattr(scaling, "attention_factor", None) or 1)
    for frequency in frequencies(width, theta, scaling, 1 + max(p for row in positions_BT for p in row)):
        angles = [[float(np.float32(position) * frequency) for position in row] for row in positions_BT]
        cos.append([[np.float32(math.cos(angle)) * factor for angle in row] for row in angles])
        sin.append([[np.float32(math.sin(angle)) * factor for angle in row] for row in angles])
    return np.moveaxis(np.float64(cos), 0, -1), np.moveaxis(np.float64(sin), 0, -1)


def alibi(config, mask_BT):
    """Each head's addends, float32: its slope times how far the key lies behind the query, counted in real tokens. The
    slopes of the next power of two of heads, every second one first, as MPT picks them."""
    N, positions_BT = config.n_heads, positions(mask_BT)
    power = 2 ** math.ceil(math.log2(N))
    slopes = [2 ** (-config.alibi_max * (j + 1) / power) for j in range(power)]
    slopes = np.float32(slopes if power == N else (slopes[1::2] + slopes[::2])[:N])
    places_BT = positions_BT.astype(np.float32)
    addends = []
    for slope in slopes:
        if config.alibi_rounded:  # a query's own place is the same for all its keys: softmax doesn't see it
            product_BS = bfloat16(bfloat16(slope) * bfloat16(places_BT)) * np.float32(score_scale(config, 0))
            addends.append(np.stack([product_BS] * places_BT.shape[1], axis=1))
        else:
            addends.append(slope * (places_BT[:, None, :] - places_BT[:, :, None]))
    return np.stack(addends, axis=1).astype(np.float64)


def bfloat16(x):
    """Rounded to the 8 digits of bfloat16, ties to even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8).astype(np.float32)


def score_scale(config, i):
    scale = config.d_head**-0.5 if config.attention_scale is None else config.attention_scale
    return scale / (i + 1) if config.scale_by_layer else scale


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


def norm_layer(config, parameters, name, x, biased=None):
    """biased: whether a LayerNorm has a bias; None for what the config says of those of the residual stream."""
    has_weight = config.norm_weight != "none"
    weight = parameters[f"{name}.weight"] if has_weight else None
    if config.norm_weight == "plus_one":
        weight = 1 + weight
    if config.norm == "rms_norm":
        return rms_norm(x, weight, config.norm_eps)
    has_bias = has_weight and (config.norm_bias if biased is None else biased)
    return layer_norm(x, weight, parameters[f"{name}.bias"] if has_bias else None, config.norm_eps)


def qk_norm(config, parameters, name, x_BTNH):
    """Head by head, with one weight or one for each; or all heads as one vector."""
    heads = list(np.moveaxis(x_BTNH, 2, 0))
    if config.qk_norm == "projection":
        normed = norm_layer(config, parameters, name, np.concatenate(heads, -1), config.qk_norm_bias)
        return np.stack(np.split(normed, len(heads), -1), 2)
    each = [
        {key: w if w.ndim == 1 else w[n] for key, w in parameters.items() if key.startswith(f"{name}.")}
        for n in range(len(heads))
    ]
    pairs = zip(each, heads, strict=True)
    return np.stack([norm_layer(config, its, name, head, config.qk_norm_bias) for its, head in pairs], 2)


def rotary_of(config, i, mask_BT):
    """The cosines and sines of a layer, or None."""
    if config.position != "rope" or i in config.no_rope_layers:
        return None
    theta, scaling = config.rope_theta, config.rope_scaling
    if i in config.sliding_layers and config.local_rope_theta is not None:
        theta, scaling = config.local_rope_theta, config.local_rope_scaling
    return rotary(positions(mask_BT), config.rotary_width or config.d_head, theta, scaling)


def attention(config, parameters, i, x, mask_BT, tap):
    name = f"layers.{i}.self_attn"
    q, k, v = (
        tap(f"{name}.{p}", split_heads(linear_layer(parameters, f"model.{name}.{p}_proj", x), heads))
        for p, heads in (("q", config.n_heads), ("k", config.n_kv_heads), ("v", config.n_kv_heads))
    )
    if config.qk_norm != "none":
        q = tap(f"{name}.q_normed", qk_norm(config, parameters, f"model.{name}.q_norm", q))
        k = tap(f"{name}.k_normed", qk_norm(config, parameters, f"model.{name}.k_norm", k))
    if config.clip_qkv is not None:
        q, k, v = (clip(each, config.clip_qkv) for each in (q, k, v))
    if (table := rotary_of(config, i, mask_BT)) is not None:
        q, k = tap(f"{name}.q_rotated", rotate(q, *table)), tap(f"{name}.k_rotated", rotate(k, *table))
    scores = attention_scores(q, k, score_scale(config, i))
    if config.attention_softcap is not None:
        scores = soft_cap(scores, config.attention_softcap)
    if config.position == "alibi":
        scores = scores + alibi(config, mask_BT)
    window = config.sliding_window if i in config.sliding_layers else None
    weights = attention_weights(tap(f"{name}.scores", scores), visible(mask_BT, x.shape[1], window))
    mixed = tap(f"{name}.mixed", merge_heads(attention_mix(tap(f"{name}.weights", weights), v)))
    return tap(f"{name}.output", linear_layer(parameters, f"model.{name}.o_proj", mixed))


def feed_forward(config, parameters, name, x, tap):
    activation = {"relu": relu, "relu_squared": relu_squared, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}[
        config.activation
    ]
    if config.gated:
        gate = tap(f"{name}.gate", linear_layer(parameters, f"model.{name}.gate_proj", x))
        up = tap(f"{name}.up", linear_layer(parameters, f"model.{name}.up_proj", x))
        inner = activation(gate) * up
    else:
        inner = activation(tap(f"{name}.up", linear_layer(parameters, f"model.{name}.up_proj", x)))
    inner = tap(f"{name}.activated", inner)
    return tap(f"{name}.output", linear_layer(parameters, f"model.{name}.down_proj", inner))


def feed_forward_or_experts(config, parameters, i, x, tap):
    name = f"layers.{i}.mlp"
    if config.n_experts is None or i in config.dense_layers:
        return feed_forward(config, parameters, name, x, tap)
    logits = tap(f"{name}.router", linear_layer(parameters, f"model.{name}.router", x))
    routing = tap(f"{name}.routing", route(logits, config.n_active_experts, config.normalize_experts))
    outputs = [
        feed_forward(config, parameters, f"{name}.experts.{e}", x, lambda name, value: value)
        for e in range(config.n_experts)
    ]
    return tap(f"{name}.output", sum(weigh(output, routing, e) for e, output in enumerate(outputs)))


def block(config, parameters, i, x, mask_BT, tap, scales=None):
    name, scales = f"layers.{i}", scales or {}

    def norm(which, x):
        return tap(f"{name}.{which}", norm_layer(config, parameters, f"model.{name}.{which}", x))

    def attend(x):
        return attention(config, parameters, i, x, mask_BT, tap)

    def feed(x):
        return feed_forward_or_experts(config, parameters, i, x, tap)

    def added(part, y):
        return dropout(y, scales.get(f"{name}.{part}")) * (config.residual_scale or 1)

    if config.parallel_residual:
        normed = norm("input_layernorm", x)
        attended = added("self_attn", attend(normed))
        normed = normed if config.shared_norm else norm("post_attention_layernorm", x)
        return tap(f"{name}.residual_out", x + (attended + added("mlp", feed(normed))))
    if config.norm_placement == "pre":
        x = tap(f"{name}.residual_mid", x + added("self_attn", attend(norm("input_layernorm", x))))
        return tap(f"{name}.residual_out", x + added("mlp", feed(norm("post_attention_layernorm", x))))
    if config.norm_placement == "post":
        x = tap(f"{name}.residual_mid", x + added("self_attn", attend(x)))
        x = norm("post_attention_layernorm", x)
        return norm("post_feedforward_layernorm", tap(f"{name}.residual_out", x + added("mlp", feed(x))))
    sandwich = config.norm_placement == "sandwich"
    attended = attend(norm("input_layernorm", x) if sandwich else x)
    x = tap(f"{name}.residual_mid", x + added("self_attn", norm("post_attention_layernorm", attended)))
    fed = feed(norm("pre_feedforward_layernorm", x) if sandwich else x)
    return tap(f"{name}.residual_out", x + added("mlp", norm("post_feedforward_layernorm", fed)))


def decoder(config, parameters, tokens_BT, mask_BT=None, scales=None):
    """Every activation by tap name, in the order met; the logits are the last."""
    taps = {}

    def tap(name, value):
        taps[name] = value
        return value

    tokens_BT, scales = np.asarray(tokens_BT), scales or {}
    mask_BT = np.ones(tokens_BT.shape, int) if mask_BT is None else np.asarray(mask_BT)
    narrow = config.embedding_width not in (None, config.d_model)
    x = tap("embed_tokens", embed(tokens_BT, parameters["model.embed_tokens.weight"]))
    x = x * (config.embedding_scale or 1)
    if narrow:
        x = linear_layer(parameters, "model.embed_in", x)
    if config.embedding_norm:
        x = norm_layer(config, parameters, "model.embed_norm", x)
    if config.position == "learned":
        rows_BT = positions(mask_BT) + config.position_offset
        x = x + tap("embed_positions", embed(rows_BT, parameters["model.embed_positions.weight"]))
    elif config.position == "sinusoidal":
        x = x + tap("embed_positions", sinusoids(positions(mask_BT), config.d_model))
    x = tap("embedded", dropout(x, scales.get("embedded")))
    for i in range(config.n_layers):
        x = block(config, parameters, i, x, mask_BT, tap, scales)
    if config.final_norm:
        x = tap("norm", norm_layer(config, parameters, "model.norm", x))
    if narrow:
        x = linear_layer(parameters, "model.embed_out", x)
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    logits = linear(x, parameters[head], parameters["lm_head.bias"] if config.head_bias else None)
    logits = logits * (config.logit_scale or 1)
    tap("logits", logits if config.logit_softcap is None else soft_cap(logits, config.logit_softcap))
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
