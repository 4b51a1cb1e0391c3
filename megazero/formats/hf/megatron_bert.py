"""Megatron's BERT (Shoeybi et al. 2019), whose norms precede each half of a layer, as MegatronBert."""

from __future__ import annotations

from megazero.formats.hf import encoder
from megazero.formats.hf.architecture import pair
from megazero.formats.hf.encoder_classifier import multiple_choice, sequence_classification

_BODY = (
    *encoder.EMBEDDING,
    *pair("layers.{i}.input_norm", f"{encoder.LAYER}.attention.ln"),
    *encoder.LINEAR,
    *pair("layers.{i}.mlp_norm", f"{encoder.LAYER}.ln"),
    *pair("final_norm", "bert.encoder.ln"),
)

MEGATRON_BERT_PRETRAINING = encoder.pretraining(
    "MegatronBertForPreTraining", "megatron-bert", _BODY, post_norm=False
)
MEGATRON_BERT_MASKED_LM = encoder.masked_lm(MEGATRON_BERT_PRETRAINING, "MegatronBertForMaskedLM", _BODY)
MEGATRON_BERT_CLASSIFICATION = sequence_classification(
    MEGATRON_BERT_PRETRAINING, "MegatronBertForSequenceClassification", _BODY
)
MEGATRON_BERT_MULTIPLE_CHOICE = multiple_choice(
    MEGATRON_BERT_PRETRAINING, "MegatronBertForMultipleChoice", _BODY
)
