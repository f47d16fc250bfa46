"""AdamW with global-norm clipping, to the rule stated in samelogits.schedule.AdamWSettings."""

import math

import numpy as np

from numpy_reference.exact_primitives import divide, plus, rounded, square_root, times, total, wide
from numpy_reference.tape import Array
from samelogits.schedule import AdamWSettings, step_numbers

_CHUNK = 2**15  # elements updated at a time, so that the nine passes stay in cache


class AdamW:
    """Updates the parameters in place: decay on matrices alone, clipping at max / (norm + 1e-6)."""

    def __init__(self, parameters: dict[str, Array], settings: AdamWSettings):
        for name, parameter in parameters.items():
            assert parameter.flags.c_contiguous, f"{name}: a flat view of it is updated"
        self.parameters = parameters
        self.settings = settings
        self.first = {name: np.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: np.zeros_like(p) for name, p in parameters.items()}
        self.finished = 0

    def step(self, gradients: dict[str, Array], learning_rate: float) -> float:
        """One update; returns the gradients' global norm before clipping."""
        s = self.settings
        self.finished += 1
        norm = math.sqrt(sum(float(np.vdot(g, g)) for g in gradients.values()))
        clip = float(np.minimum(1.0, s.max_grad_norm / (norm + 1e-6)))  # NaN stays NaN
        unbias_first = 1 / (1 - s.beta1**self.finished)
        unbias_second = 1 / (1 - s.beta2**self.finished)
        for name, parameter in self.parameters.items():
            decay = learning_rate * s.weight_decay if parameter.ndim >= 2 else 0.0
            flat = [a.reshape(-1) for a in (parameter, gradients[name], self.first[name], self.second[name])]
            for start in range(0, parameter.size, _CHUNK):
                w, g, m, v = (a[start : start + _CHUNK] for a in flat)
                g = g * clip
                m *= s.beta1
                m += (1 - s.beta1) * g
                v *= s.beta2
                v += (1 - s.beta2) * np.square(g)
                update = (m * unbias_first) / (np.sqrt(v * unbias_second) + s.eps)
                w -= decay * w + learning_rate * update
        return norm


class ExactAdamW:
    """The same in exact arithmetic, to the rule stated in samelogits.schedule.StepNumbers."""

    def __init__(self, parameters: dict[str, Array], settings: AdamWSettings):
        self.parameters = parameters
        self.settings = settings
        self.first = {name: np.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: np.zeros_like(p) for name, p in parameters.items()}
        self.finished = 0

    @np.errstate(all="ignore")
    def step(self, gradients: dict[str, Array], learning_rate: float) -> float:
        """One update; returns the gradients' global norm before clipping."""
        self.finished += 1
        squares = [total(times(g, g).reshape(-1)) for g in gradients.values()]
        norm = float(square_root(total(np.concatenate(squares)))[0])
        n = step_numbers(self.settings, self.finished, norm, learning_rate)
        for name, w in self.parameters.items():
            g = times(gradients[name], n.clip)
            m = rounded(wide(self.first[name]) * n.keep_first + wide(g) * n.take_first)
            v = rounded(wide(self.second[name]) * n.keep_second + wide(times(g, g)) * n.take_second)
            update = divide(times(m, n.unbias_first), plus(square_root(times(v, n.unbias_second)), n.eps))
            if w.ndim >= 2:
                update = rounded(wide(w) * n.decay + update)
            w[...] = rounded(wide(w) - wide(update) * n.learning_rate)
            self.first[name], self.second[name] = m, v
        return norm
