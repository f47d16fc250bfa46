"""What is measured: the three implementations, and the peers that take the same weights."""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.plan import ADAMW, EXACT


class Subject(abc.ABC):
    """One implementation on the CPU, in float32. Token ids are int64 [B, T]."""

    model: Any = None
    trainer: Any = None  # what steps are taken with, made at the first

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """What it is made of, for the record."""

    @abc.abstractmethod
    def load(self, folder: str) -> None:
        """Read the Hugging Face folder; a model loaded before is let go first."""

    @abc.abstractmethod
    def forward(self, ids_BT: np.ndarray) -> np.ndarray:
        """Logits [B, T, V]."""

    @abc.abstractmethod
    def step(self, ids_BT: np.ndarray, targets_BT: np.ndarray) -> float:
        """The loss, before one AdamW step to the rule of AdamWSettings."""

    @abc.abstractmethod
    def generate(self, ids_BT: np.ndarray, new_tokens: int) -> np.ndarray:
        """Prompt and greedy continuation, by means of a cache."""

    @abc.abstractmethod
    def product(self, a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
        """A function that computes a @ b in the framework and waits for it."""


class Samelogits(Subject):
    """One of the three implementations, through the public contract, in native or exact arithmetic."""

    def __init__(self, backend: str, arithmetic: str, threads: int):
        from samelogits.backend import get_backend

        self.backend = get_backend(backend)
        self.arithmetic = arithmetic
        if backend == "torch":
            import torch

            torch.set_num_threads(threads)

    def versions(self) -> dict[str, str]:
        from samelogits import __version__

        facts = self.backend.describe()
        return {"samelogits": __version__, self.backend.name: facts.pop("version"), **facts}

    def load(self, folder: str) -> None:
        import samelogits

        self.model = self.trainer = None
        self.model = samelogits.load(folder, self.backend.name, "float32", "cpu", self.arithmetic)

    def forward(self, ids_BT: np.ndarray) -> np.ndarray:
        return self.model.logits(ids_BT)

    def step(self, ids_BT: np.ndarray, targets_BT: np.ndarray) -> float:
        self.trainer = self.trainer or self.model.trainer(ADAMW)
        return self.trainer.step(ids_BT, targets_BT).loss

    def generate(self, ids_BT: np.ndarray, new_tokens: int) -> np.ndarray:
        return self.model.generate(ids_BT, new_tokens)

    def product(self, a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
        return PRODUCTS[self.backend.name](a, b)


class Transformers(Subject):
    """Hugging Face transformers: GPT2LMHeadModel or LlamaForCausalLM, as the folder's config says, with sdpa."""

    def __init__(self, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self.torch, self.transformers = torch, transformers

    def versions(self) -> dict[str, str]:
        return {"transformers": self.transformers.__version__, "torch": self.torch.__version__, "attention": "sdpa"}

    def load(self, folder: str) -> None:
        self.model = self.trainer = None
        self.model = self.transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=self.torch.float32, attn_implementation="sdpa"
        )

    def forward(self, ids_BT: np.ndarray) -> np.ndarray:
        with self.torch.no_grad():
            return self.model(self.torch.tensor(ids_BT), use_cache=False).logits.numpy()

    def step(self, ids_BT: np.ndarray, targets_BT: np.ndarray) -> float:
        torch, parameters = self.torch, list(self.model.parameters())
        if self.trainer is None:
            self.model.train()
            groups = [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": ADAMW.weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ]
            betas = (ADAMW.beta1, ADAMW.beta2)
            self.trainer = torch.optim.AdamW(groups, lr=ADAMW.learning_rate, betas=betas, eps=ADAMW.eps)
        logits_BTV = self.model(torch.tensor(ids_BT), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), torch.tensor(targets_BT).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, ADAMW.max_grad_norm)
        self.trainer.step()
        self.trainer.zero_grad(set_to_none=True)
        return loss.item()

    def generate(self, ids_BT: np.ndarray, new_tokens: int) -> np.ndarray:
        ids = self.torch.tensor(ids_BT)
        mask = self.torch.ones_like(ids)
        # An end token of -1 never comes, so that the length is the one asked for.
        settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        return self.model.generate(ids, attention_mask=mask, **settings).numpy()

    def product(self, a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
        return PRODUCTS["torch"](a, b)


def _numpy_product(a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    return lambda: a @ b


def _torch_product(a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    import torch

    x, y = torch.tensor(a), torch.tensor(b)
    return lambda: x @ y


def _jax_product(a: np.ndarray, b: np.ndarray) -> Callable[[], Any]:
    import jax.numpy as jnp

    x, y = jnp.asarray(a), jnp.asarray(b)
    return lambda: (x @ y).block_until_ready()


PRODUCTS = {"numpy": _numpy_product, "torch": _torch_product, "jax": _jax_product}


@dataclass(frozen=True)
class Entry:
    """label: what the name stands for. module: what must be importable. make: the adapter, given the threads."""

    label: str
    module: str
    make: Callable[[int], Subject] | None = None

    def obstacle(self) -> str | None:
        """Why it can't be measured here, or None."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        return None if self.make else "benchmarks/subjects.py has no adapter for it"


def _own(arithmetic: str, suffix: str) -> dict[str, Entry]:
    """The three implementations in one arithmetic, by framework and suffix."""
    titles = {"torch": "PyTorch", "jax": "JAX", "numpy": "NumPy"}
    return {
        name + suffix: Entry(f"samelogits, {title}, {arithmetic}", name, partial(Samelogits, name, arithmetic))
        for name, title in titles.items()
    }


# A further peer is one line here and one subclass of Subject.
SUBJECTS = {
    **_own("native", ""),
    **_own("exact", EXACT),
    "transformers": Entry("Hugging Face transformers, PyTorch, sdpa", "transformers", Transformers),
    "keras-hub": Entry("keras-hub, JAX", "keras_hub"),
    "litgpt": Entry("litgpt, PyTorch", "litgpt"),
    "nanogpt": Entry("nanoGPT, PyTorch", "nanogpt"),
}
