"""AdamW with global-norm clipping, to the rule stated in samelogits.schedule.AdamWSettings."""

import torch
from torch import Tensor

from samelogits.schedule import AdamWSettings


class AdamW:
    """Updates the parameters in place: decay on matrices alone, clipping at max / (norm + 1e-6)."""

    def __init__(self, parameters: dict[str, Tensor], settings: AdamWSettings):
        self.parameters = parameters
        self.settings = settings
        matrices = [p for p in parameters.values() if p.ndim >= 2]
        vectors = [p for p in parameters.values() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        betas = (settings.beta1, settings.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=settings.eps)

    def step(self, gradients: dict[str, Tensor], learning_rate: float) -> float:
        """One update; returns the gradients' global norm before clipping. The gradients are clipped in place."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.item()
