"""The original BERT (Devlin et al. 2019), whose norms follow each half of a layer, as transformers' Bert.

With the residual taken after the norm, our list of norms is theirs moved on by one place: our first one is
that of their embedding, the input norm of each later layer is the last one of the layer before, and our final
norm is the last one of the last layer.
"""

from __future__ import annotations

from megazero.checkpoint.hf import encoder
from megazero.checkpoint.hf.architecture import pair
from megazero.checkpoint.hf.encoder_classifier import multiple_choice, sequence_classification

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
