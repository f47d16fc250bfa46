"""AdamW with global-norm clipping, to the rule stated in samelogits.schedule.AdamWSettings."""

import torch
from torch import Tensor

from pytorch_impl.exact_primitives import divide, plus, rounded, square_root, times, total, wide
from samelogits.schedule import AdamWSettings, step_numbers


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


class ExactAdamW:
    """The same in exact arithmetic, to the rule stated in samelogits.schedule.StepNumbers."""

    def __init__(self, parameters: dict[str, Tensor], settings: AdamWSettings):
        self.parameters = parameters
        self.settings = settings
        self.first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.finished = 0

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], learning_rate: float) -> float:
        """One update; returns the gradients' global norm before clipping."""
        self.finished += 1
        squares = [total(times(g, g).flatten()) for g in gradients.values()]
        norm = square_root(total(torch.cat(squares))).item()
        n = step_numbers(self.settings, self.finished, norm, learning_rate)
        for name, w in self.parameters.items():
            g = times(gradients[name], n.clip)
            m = rounded(wide(self.first[name]) * n.keep_first + wide(g) * n.take_first)
            v = rounded(wide(self.second[name]) * n.keep_second + wide(times(g, g)) * n.take_second)
            update = divide(times(m, n.unbias_first), plus(square_root(times(v, n.unbias_second)), n.eps))
            if w.ndim >= 2:
                update = rounded(wide(w) * n.decay + update)
            w.copy_(rounded(wide(w) - wide(update) * n.learning_rate))
            self.first[name], self.second[name] = m, v
        return norm
