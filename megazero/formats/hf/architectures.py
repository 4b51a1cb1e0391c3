"""All architectures, in the order in which they are tried when a model is written."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megazero.formats.hf.apertus import APERTUS
from megazero.formats.hf.architecture import Architecture
from megazero.formats.hf.bamba import BAMBA
from megazero.formats.hf.bert import (
    BERT_CLASSIFICATION,
    BERT_MASKED_LM,
    BERT_MULTIPLE_CHOICE,
    BERT_PRETRAINING,
    MEGATRON_BERT_CLASSIFICATION,
    MEGATRON_BERT_MASKED_LM,
    MEGATRON_BERT_MULTIPLE_CHOICE,
    MEGATRON_BERT_PRETRAINING,
)
from megazero.formats.hf.bloom import BLOOM
from megazero.formats.hf.cohere import COHERE, COHERE2
from megazero.formats.hf.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megazero.formats.hf.gemma import GEMMA2, GEMMA3
from megazero.formats.hf.gpt2 import GPT2
from megazero.formats.hf.gpt_oss import GPT_OSS
from megazero.formats.hf.granite import GRANITE
from megazero.formats.hf.llama import LLAMA
from megazero.formats.hf.mamba2 import MAMBA2
from megazero.formats.hf.mistral import MISTRAL, MIXTRAL
from megazero.formats.hf.nemotron_h import NEMOTRON_H
from megazero.formats.hf.neox import FALCON, GPT_NEOX
from megazero.formats.hf.olmo import OLMO2, OLMOE
from megazero.formats.hf.opt import OPT
from megazero.formats.hf.phi3 import PHI3
from megazero.formats.hf.qwen import QWEN2, QWEN3, QWEN3_MOE
from megazero.formats.hf.qwen2_moe import QWEN2_MOE
from megazero.formats.hf.scores import scoring
from megazero.formats.hf.smollm3 import SMOLLM3
from megazero.formats.hf.t5 import T5_GENERATION

DECODERS: tuple[Architecture, ...] = (
    GPT2,
    BLOOM,
    LLAMA,
    QWEN2,
    MISTRAL,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    OLMO2,
    OLMOE,
    GEMMA2,
    GEMMA3,
    PHI3,
    GPT_OSS,
    GRANITE,
    DEEPSEEK_V3,
    DEEPSEEK_V2,
    GPT_NEOX,
    FALCON,
    OPT,
    MAMBA2,
    NEMOTRON_H,
    BAMBA,
    COHERE,
    COHERE2,
    SMOLLM3,
    APERTUS,
)
SCORERS = tuple(
    map(scoring, (GPT2, LLAMA, QWEN2, MISTRAL, MIXTRAL, QWEN2_MOE, QWEN3, QWEN3_MOE, GEMMA2, PHI3))
)
ENCODERS: tuple[Architecture, ...] = (
    MEGATRON_BERT_PRETRAINING,
    MEGATRON_BERT_MASKED_LM,
    BERT_PRETRAINING,
    BERT_MASKED_LM,
    MEGATRON_BERT_CLASSIFICATION,
    MEGATRON_BERT_MULTIPLE_CHOICE,
    BERT_CLASSIFICATION,
    BERT_MULTIPLE_CHOICE,
)
ENCODER_DECODERS: tuple[Architecture, ...] = (T5_GENERATION,)
ARCHITECTURES = DECODERS + SCORERS + ENCODERS + ENCODER_DECODERS

_MAMBA1 = "mixers are Mamba's first kind; here they are Mamba-2"
_SHARED = "layers share a block of attention; here each layer has weights of its own"
LACKING: Mapping[str, str] = MappingProxyType(
    {
        "MambaForCausalLM": _MAMBA1,
        "JambaForCausalLM": _MAMBA1,
        "ZambaForCausalLM": _SHARED,
        "Zamba2ForCausalLM": _SHARED,
        "FalconH1ForCausalLM": "layers add a mixer and attention side by side; here a layer is one of them",
    }
)
"""Class in transformers -> the part of its layers that megazero lacks."""
