"""Training in the reference: AdamW in float64 whose rules can be exchanged, as a variant's operations can."""

from __future__ import annotations

import math

import numpy as np

from numpy_reference.tape import Tape
from samelogits.checking.variant import Variant
from samelogits.schedule import AdamWSettings, learning_rate

Array = np.ndarray


def gradients(variant: Variant) -> tuple[float, dict[str, Array]]:
    """The loss of the variant's probe, and its gradient for every parameter."""
    with Tape() as tape:
        loss = variant.loss(variant.run())
    return float(loss), tape.gradients(loss, variant.parameters)


def train(variant: Variant, settings: AdamWSettings, steps: int) -> list[float]:
    """The loss before each of so many steps on the probe. The variant's parameters are left as they were."""
    rules, s = variant.rules, settings
    before = variant.parameters
    variant.parameters = {name: array.copy() for name, array in before.items()}
    first = {name: np.zeros_like(array) for name, array in before.items()}
    second = {name: np.zeros_like(array) for name, array in before.items()}
    largest = {name: np.zeros_like(array) for name, array in before.items()}
    beta1 = s.beta1 if rules.beta1 is None else rules.beta1
    beta2 = s.beta2 if rules.beta2 is None else rules.beta2
    losses = []
    for step in range(steps):
        loss, d = gradients(variant)
        losses.append(loss)
        rate = s.learning_rate if rules.constant_rate else learning_rate(s, max(0, step + rules.rate_ahead))
        norm = math.sqrt(sum(float(np.vdot(g, g)) for g in d.values()))
        for name, w in variant.parameters.items():
            g, decays = d[name], s.weight_decay > 0 and (w.ndim >= 2 or rules.decayed == "all")
            if rules.clip == "global":
                g = g * min(1.0, s.max_grad_norm / (norm + 1e-6))
            elif rules.clip == "each":
                g = g * min(1.0, s.max_grad_norm / (float(np.linalg.norm(g)) + 1e-6))
            elif rules.clip == "value":
                g = np.clip(g, -s.max_grad_norm, s.max_grad_norm)
            if decays and rules.decay == "coupled":
                g = g + s.weight_decay * w
            first[name] = m = beta1 * first[name] + (1 - beta1) * g
            second[name] = v = beta2 * second[name] + (1 - beta2) * np.square(g)
            if rules.largest == "raw":
                largest[name] = v = np.maximum(largest[name], v)
            m_hat = m / (1 - beta1 ** (step + 1)) if rules.correct else m
            v_hat = v / (1 - beta2 ** (step + 1)) if rules.correct else v
            if rules.largest == "corrected":
                largest[name] = v_hat = np.maximum(largest[name], v_hat)
            if rules.ahead:
                m_hat = beta1 * m / (1 - beta1 ** (step + 2)) + (1 - beta1) * g / (1 - beta1 ** (step + 1))
            if rules.eps == "inside":
                update = m_hat / np.sqrt(v_hat + s.eps)
            elif rules.eps == "before":
                update = m_hat / ((np.sqrt(v) + s.eps) / math.sqrt(1 - beta2 ** (step + 1)))
            else:
                update = m_hat / (np.sqrt(v_hat) + s.eps)
            if decays and rules.decay in ("decoupled", "unscaled"):
                w -= (rate if rules.decay == "decoupled" else 1.0) * s.weight_decay * w
            w -= rate * update
    variant.parameters = before
    return losses
