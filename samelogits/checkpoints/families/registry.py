"""Every family that is read from and written to Hugging Face folders."""

from __future__ import annotations

from samelogits.checkpoints.families.arcee import ARCEE
from samelogits.checkpoints.families.bloom import BLOOM
from samelogits.checkpoints.families.codegen import CODEGEN
from samelogits.checkpoints.families.cohere import COHERE
from samelogits.checkpoints.families.cohere2 import COHERE2
from samelogits.checkpoints.families.falcon import FALCON
from samelogits.checkpoints.families.gemma import GEMMA
from samelogits.checkpoints.families.gemma2 import GEMMA2
from samelogits.checkpoints.families.gemma3_text import GEMMA3_TEXT
from samelogits.checkpoints.families.glm import GLM
from samelogits.checkpoints.families.glm4 import GLM4
from samelogits.checkpoints.families.gpt2 import GPT2
from samelogits.checkpoints.families.gpt_bigcode import GPT_BIGCODE
from samelogits.checkpoints.families.gpt_neo import GPT_NEO
from samelogits.checkpoints.families.gpt_neox import GPT_NEOX
from samelogits.checkpoints.families.gptj import GPTJ
from samelogits.checkpoints.families.granite import GRANITE
from samelogits.checkpoints.families.helium import HELIUM
from samelogits.checkpoints.families.llama import LLAMA
from samelogits.checkpoints.families.ministral import MINISTRAL
from samelogits.checkpoints.families.mistral import MISTRAL
from samelogits.checkpoints.families.mixtral import MIXTRAL
from samelogits.checkpoints.families.mpt import MPT
from samelogits.checkpoints.families.nemotron import NEMOTRON
from samelogits.checkpoints.families.olmo import OLMO
from samelogits.checkpoints.families.olmo2 import OLMO2
from samelogits.checkpoints.families.olmo3 import OLMO3
from samelogits.checkpoints.families.olmoe import OLMOE
from samelogits.checkpoints.families.opt import OPT
from samelogits.checkpoints.families.phi import PHI
from samelogits.checkpoints.families.phi3 import PHI3
from samelogits.checkpoints.families.qwen2 import QWEN2
from samelogits.checkpoints.families.qwen3 import QWEN3
from samelogits.checkpoints.families.qwen3_moe import QWEN3_MOE
from samelogits.checkpoints.families.smollm3 import SMOLLM3
from samelogits.checkpoints.families.stablelm import STABLELM
from samelogits.checkpoints.families.starcoder2 import STARCODER2

FAMILIES = {
    family.model_type: family
    for family in (
        GPT2,
        LLAMA,
        MISTRAL,
        MINISTRAL,
        QWEN2,
        QWEN3,
        MIXTRAL,
        QWEN3_MOE,
        OLMOE,
        GEMMA,
        GEMMA2,
        GEMMA3_TEXT,
        PHI3,
        GRANITE,
        SMOLLM3,
        ARCEE,
        HELIUM,
        GPT_BIGCODE,
        GPT_NEO,
        GPTJ,
        CODEGEN,
        OPT,
        BLOOM,
        MPT,
        OLMO,
        OLMO2,
        OLMO3,
        STARCODER2,
        COHERE,
        COHERE2,
        NEMOTRON,
        GLM,
        GLM4,
        STABLELM,
        PHI,
        GPT_NEOX,
        FALCON,
    )
}
