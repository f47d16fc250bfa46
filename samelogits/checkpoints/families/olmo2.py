"""OLMo 2: Llama with norms of what a layer gives instead of what it reads, and of all queries and all keys as one."""

from __future__ import annotations

from samelogits.checkpoints.families.foreign_config import Field
from samelogits.checkpoints.families.llama import llama_like

OLMO2_NORMS = {"norm_placement": "output", "qk_norm": "projection", "norm_wide": True}
OLMO2_EPS = Field("rms_norm_eps", "norm_eps", 1e-5)

OLMO2 = llama_like("olmo2", "Olmo2ForCausalLM", biases=("attention_bias",), constants=OLMO2_NORMS, fields=(OLMO2_EPS,))
