"""Queries, keys and values in torch, tokens before heads: [B, T, N, H]."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.detection.torch_linear import bias_of, project
from benchmarks.detection.torch_norms import Norm
from samelogits.config import DecoderConfig

NAMES = [f"self_attn.{letter}_proj" for letter in "qkv"]


class Heads:
    """One fused product, taken apart, and the norms of queries and keys."""

    def __init__(self, config: DecoderConfig, tensors: dict[str, Tensor], wrong: frozenset[str]):
        self.config, self.tensors, self.wrong = config, tensors, wrong
        self.norms = [
            self._norm(f"self_attn.{letter}_norm", f"self_attn.{other}_norm") for letter, other in ("qk", "kq")
        ]

    def _norm(self, name: str, other: str) -> Norm:
        c, wrong = self.config, self.wrong
        norm = Norm(c, self.tensors, other if "SL467" in wrong else name, wrong)
        heads = c.n_heads if name.endswith("q_norm") else c.n_kv_heads
        if "SL465" in wrong:
            norm.weight = None
        if "SL466" in wrong:
            norm.bias = None
        if "SL468" in wrong and norm.weight is not None:
            norm.weight = norm.weight[:1].expand(heads, -1)
        if "SL462" in wrong:
            norm.weight, norm.bias = (
                None if t is None else t.expand(heads, c.d_head) for t in (norm.weight, norm.bias)
            )
            norm = norm.shaped(heads * c.d_head)
        return norm.shaped(heads, c.d_head) if "SL463" in wrong else norm

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as projected."""
        c, wrong, t = self.config, self.wrong, self.tensors
        N, K, H = c.n_heads, c.n_kv_heads, c.d_head
        sizes = [N * H, K * H, K * H]
        biases = [bias_of(t, name, wrong) for name in NAMES]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([x.new_zeros(size) if b is None else b for b, size in zip(biases, sizes, strict=True)])
        qkv = project(x, torch.cat([t[f"{name}.weight"] for name in NAMES]), bias, wrong)
        if wrong & {"SL521", "SL523"}:
            groups = qkv.unflatten(-1, (K, N // K + 2, H))
            q, k, v = groups[..., :-2, :].flatten(-3), groups[..., -2, :].flatten(-2), groups[..., -1, :].flatten(-2)
        elif "SL444" in wrong:
            k, q, v = qkv.split(sizes, dim=-1)
        elif "SL445" in wrong:
            q, v, k = qkv.split(sizes, dim=-1)
        else:
            q, k, v = qkv.split(sizes, dim=-1)
        return self._split(q, N), self._split(k, K), self._split(v, K)

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, normed as the config says."""
        whole = self.config.qk_norm == "projection"
        if "SL462" in self.wrong:
            whole = True
        if "SL463" in self.wrong:
            whole = False
        q, k = (
            self._split(norm(self._joined(x)), x.shape[2]) if whole else norm(x)
            for norm, x in zip(self.norms, (q, k), strict=True)
        )
        return q, k

    def clipped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All three within the limit, if there is one."""
        limit = self.config.clip_qkv
        if limit is None or "SL447" in self.wrong:
            return q, k, v
        q, k = q.clamp(-limit, limit), k.clamp(-limit, limit)
        return q, k, v if "SL448" in self.wrong else v.clamp(-limit, limit)

    def _split(self, x: Tensor, n: int) -> Tensor:
        if "SL443" in self.wrong:
            return x.unflatten(-1, (-1, n)).transpose(-1, -2)
        return x.unflatten(-1, (n, -1))

    def _joined(self, x: Tensor) -> Tensor:
        """The inverse of _split."""
        return (x.transpose(-1, -2) if "SL443" in self.wrong else x).flatten(-2)
