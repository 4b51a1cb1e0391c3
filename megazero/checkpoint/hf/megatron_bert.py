"""Megatron's BERT (Shoeybi et al. 2019), whose norms precede each half of a layer, as MegatronBert."""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.hf import encoder
from megazero.checkpoint.hf.architecture import Architecture
from megazero.checkpoint.hf.encoder_classifier import multiple_choice, sequence_classification

_BODY = (
    *encoder.EMBEDDING,
    *encoder.pair("layers.{i}.input_norm", f"{encoder.LAYER}.attention.ln"),
    *encoder.LINEAR,
    *encoder.pair("layers.{i}.mlp_norm", f"{encoder.LAYER}.ln"),
    *encoder.pair("final_norm", "bert.encoder.ln"),
)
_OURS_FIXED = (*encoder.OURS_FIXED, ("apply_residual_connection_post_layernorm", False))

MEGATRON_BERT_PRETRAINING = Architecture(
    name="MegatronBertForPreTraining",
    model_type="megatron-bert",
    auto="AutoModelForPreTraining",
    prefix="bert.",
    rules=(*_BODY, *encoder.BINARY_HEAD, *encoder.MASKED_HEAD),
    copies=encoder.COPIES,
    ignored=encoder.IGNORED,
    renamed=encoder.RENAMED,
    settings=encoder.SETTINGS,
    fixed=encoder.FIXED,
    ours_fixed=(*_OURS_FIXED, ("bert_binary_head", True)),
    limits=encoder.LIMITS,
    seen=encoder.heads_seen,
)
MEGATRON_BERT_MASKED_LM = replace(
    MEGATRON_BERT_PRETRAINING,
    name="MegatronBertForMaskedLM",
    auto="AutoModelForMaskedLM",
    rules=(*_BODY, *encoder.MASKED_HEAD),
    blank=encoder.BLANK,
    ours_fixed=(*_OURS_FIXED, ("bert_binary_head", False)),
)
MEGATRON_BERT_CLASSIFICATION = sequence_classification(
    MEGATRON_BERT_PRETRAINING, "MegatronBertForSequenceClassification", _BODY
)
MEGATRON_BERT_MULTIPLE_CHOICE = multiple_choice(
    MEGATRON_BERT_PRETRAINING, "MegatronBertForMultipleChoice", _BODY
)
