"""Loss and AdamW in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from samelogits.schedule import AdamWSettings

IGNORED = -100
BY_HAND = frozenset({"SL951", "SL952", "SL953", "SL967"})


def language_model_loss(logits: Tensor, tokens: Tensor, targets: Tensor, wrong: frozenset[str]) -> Tensor:
    """Mean cross-entropy of the targets that are not negative."""
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    labels = torch.where(targets < 0, IGNORED, targets)
    if "SL901" in wrong:
        labels = torch.where(labels == IGNORED, IGNORED, tokens)
    if "SL902" in wrong:
        logits, labels = logits[:, :-1], labels[:, 1:]
    if "SL904" in wrong:
        labels = labels.clamp(min=0)
    if "SL910" in wrong:
        counted = labels != IGNORED
        labels = labels.masked_fill(counted & (counted.cumsum(1) == 1), IGNORED)
    flat, ids = logits.flatten(0, 1), labels.flatten()
    if "SL903" in wrong:
        return F.cross_entropy(flat, ids, ignore_index=IGNORED, reduction="sum") / ids.numel()
    if "SL905" in wrong:
        return F.cross_entropy(flat, ids, ignore_index=IGNORED, reduction="sum")
    if "SL906" in wrong:
        rows = [F.cross_entropy(row, label) for row, label in zip(logits, labels, strict=True) if (label >= 0).any()]
        return torch.stack(rows).mean()
    smoothing = 0.1 if "SL907" in wrong else 0.0
    loss = F.cross_entropy(flat, ids, ignore_index=IGNORED, label_smoothing=smoothing)
    if "SL908" in wrong:
        loss = loss / math.log(2)
    if "SL909" in wrong:
        loss = loss + 1e-4 * torch.logsumexp(flat, dim=-1)[ids != IGNORED].square().mean()
    return loss


def schedule(s: AdamWSettings) -> Callable[[int], float]:
    """Factor of the learning rate by the number of finished steps: linear warm-up, then a cosine."""

    def factor(step: int) -> float:
        if step < s.warmup_steps:
            return step / s.warmup_steps
        done = min(1.0, (step - s.warmup_steps) / (s.total_steps - s.warmup_steps))
        return s.final_fraction + (1 - s.final_fraction) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


class HandAdamW(torch.optim.Optimizer):
    """AdamW written out, with what people get wrong in it."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], eps: float, wrong: frozenset[str]):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.wrong = wrong

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                m, v, t = state["m"], state["v"], state["t"]
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                first, second = 1 - beta1**t, 1 - beta2**t
                if "SL953" in self.wrong:
                    first = second = 1.0
                m_hat = m / first
                if "SL967" in self.wrong:
                    m_hat = beta1 * m / (1 - beta1 ** (t + 1)) + (1 - beta1) * p.grad / first
                if "SL951" in self.wrong:
                    update = m_hat / (v / second + group["eps"]).sqrt()
                elif "SL952" in self.wrong:
                    update = m_hat * math.sqrt(second) / (v.sqrt() + group["eps"])
                else:
                    update = m_hat / ((v / second).sqrt() + group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * update)


def make_optimizer(
    parameters: Iterable[nn.Parameter], s: AdamWSettings, wrong: frozenset[str]
) -> torch.optim.Optimizer:
    """AdamW with decay of matrices alone."""
    parameters = list(parameters)
    decay = 0.0 if wrong & {"SL955", "SL956"} else s.weight_decay
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if "SL957" in wrong:
        groups = [{"params": parameters, "weight_decay": decay}]
    betas = (0.0 if "SL965" in wrong else s.beta1, 0.999 if "SL964" in wrong else s.beta2)
    if wrong & BY_HAND:
        return HandAdamW(groups, s.learning_rate, betas, s.eps, wrong)
    make = torch.optim.Adam if "SL954" in wrong else torch.optim.AdamW
    return make(groups, lr=s.learning_rate, betas=betas, eps=s.eps, amsgrad="SL966" in wrong)


def clip(parameters: Iterable[nn.Parameter], s: AdamWSettings, wrong: frozenset[str]) -> None:
    """Bound the gradients' norm."""
    parameters = list(parameters)
    if "SL958" in wrong:
        return
    if "SL959" in wrong:
        for p in parameters:
            nn.utils.clip_grad_norm_([p], s.max_grad_norm)
    elif "SL960" in wrong:
        nn.utils.clip_grad_value_(parameters, s.max_grad_norm)
    else:
        nn.utils.clip_grad_norm_(parameters, s.max_grad_norm)


def train(
    parameters: Iterable[nn.Parameter],
    compute_loss: Callable[[], Tensor],
    s: AdamWSettings,
    steps: int,
    wrong: frozenset[str],
) -> list[float]:
    """The loss before each of so many steps; the parameters are changed."""
    parameters = list(parameters)
    optimizer = make_optimizer(parameters, s, wrong)
    factor = schedule(s)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = compute_loss()
        losses.append(float(loss.detach()))
        loss.backward()
        clip(parameters, s, wrong)
        finished = step
        if "SL961" in wrong:
            finished = step + 1
        if "SL962" in wrong:
            finished = max(0, step - 1)
        for group in optimizer.param_groups:
            group["lr"] = s.learning_rate if "SL963" in wrong else s.learning_rate * factor(finished)
        if "SL955" in wrong:
            with torch.no_grad():
                for p in parameters:
                    if p.dim() >= 2:
                        p.mul_(1 - s.weight_decay)
        optimizer.step()
    return losses
