"""Two kinds of BERT in transformers: the original (Devlin et al. 2019), Megatron's (Shoeybi et al. 2019).

In the original, transformers' Bert, norms follow each half of a layer. As the residual comes after the norm,
our list of norms is theirs moved on by one place: our first one is that of their embedding, the input norm of
each later layer is the last one of the layer before, and our final norm is the last one of the last layer. In
Megatron's, transformers' MegatronBert, norms precede each half.
"""

from __future__ import annotations

from megazero.formats.hf import encoder
from megazero.formats.hf.architecture import pair
from megazero.formats.hf.encoder_classifier import multiple_choice, sequence_classification

_BODY = (
    *encoder.EMBEDDING,
    *pair("layers.0.input_norm", "bert.embeddings.LayerNorm"),
    *pair("layers.{i}.input_norm", "bert.encoder.layer.{i-1}.output.LayerNorm"),
    *encoder.LINEAR,
    *pair("layers.{i}.mlp_norm", f"{encoder.LAYER}.attention.output.LayerNorm"),
    *pair("final_norm", "bert.encoder.layer.{last}.output.LayerNorm"),
)

BERT_PRETRAINING = encoder.pretraining("BertForPreTraining", "bert", _BODY, post_norm=True)
BERT_MASKED_LM = encoder.masked_lm(BERT_PRETRAINING, "BertForMaskedLM", _BODY)
BERT_CLASSIFICATION = sequence_classification(BERT_PRETRAINING, "BertForSequenceClassification", _BODY)
BERT_MULTIPLE_CHOICE = multiple_choice(BERT_PRETRAINING, "BertForMultipleChoice", _BODY)

_NORMS_FIRST = (
    *encoder.EMBEDDING,
    *pair("layers.{i}.input_norm", f"{encoder.LAYER}.attention.ln"),
    *encoder.LINEAR,
    *pair("layers.{i}.mlp_norm", f"{encoder.LAYER}.ln"),
    *pair("final_norm", "bert.encoder.ln"),
)

MEGATRON_BERT_PRETRAINING = encoder.pretraining(
    "MegatronBertForPreTraining", "megatron-bert", _NORMS_FIRST, post_norm=False
)
MEGATRON_BERT_MASKED_LM = encoder.masked_lm(
    MEGATRON_BERT_PRETRAINING, "MegatronBertForMaskedLM", _NORMS_FIRST
)
MEGATRON_BERT_CLASSIFICATION = sequence_classification(
    MEGATRON_BERT_PRETRAINING, "MegatronBertForSequenceClassification", _NORMS_FIRST
)
MEGATRON_BERT_MULTIPLE_CHOICE = multiple_choice(
    MEGATRON_BERT_PRETRAINING, "MegatronBertForMultipleChoice", _NORMS_FIRST
)
