"""transformers' two kinds of BERT: Bert (Devlin et al. 2019) and MegatronBert (Shoeybi et al. 2019).

Bert's norms follow each half of a layer, MegatronBert's precede it. megazero's precede it in both, and for
Bert take the residual after the norm, so that the sequence of norms is only shifted by one: the embedding's
norm is the first layer's input norm here, the last norm of a layer is the next layer's input norm, and the
last layer's is the final norm.
"""

from __future__ import annotations

from megazero.formats.hf import encoder
from megazero.formats.hf.architecture import pair

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
BERT_CLASSIFICATION = encoder.sequence_classification(
    BERT_PRETRAINING, "BertForSequenceClassification", _BODY
)
BERT_MULTIPLE_CHOICE = encoder.multiple_choice(BERT_PRETRAINING, "BertForMultipleChoice", _BODY)

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
MEGATRON_BERT_CLASSIFICATION = encoder.sequence_classification(
    MEGATRON_BERT_PRETRAINING, "MegatronBertForSequenceClassification", _NORMS_FIRST
)
MEGATRON_BERT_MULTIPLE_CHOICE = encoder.multiple_choice(
    MEGATRON_BERT_PRETRAINING, "MegatronBertForMultipleChoice", _NORMS_FIRST
)
