"""models: each of them short enough to read in one go. `gpt.py` is GPT in all its shapes, `bert.py` BERT.

`classifier.py` puts a classifier on either, `distilled.py` a teacher beside a GPT, and `sample_losses.py`
computes the loss of each sample. `trunk.py` has the embedding and the layers, which all models share,
and `layer.py` says what a layer consists of.
`chunk.py` says what the trainer needs from a model, `language_model.py` what inference needs. `batch.py`,
`bert_batch.py` and `classifier_batch.py` define micro-batches, and `flops.py` counts what blocks cost.
"""

from megazero.models.batch import Batch, Collate, MicroBatch, RowPlace, TextCollate, random_text
from megazero.models.bert import BERT, bert_blocks
from megazero.models.bert_batch import BertBatch, BertCollate, random_samples
from megazero.models.chunk import EMBEDDING, HEAD, Block, ModelChunk, Part, Slice, Tie
from megazero.models.classifier import (
    OWN,
    PRETRAINING_ONLY,
    SCORES,
    Classifier,
    FirstTokenClassifier,
    LastTokenClassifier,
)
from megazero.models.classifier_batch import ClassifierCollate, LabelledBatch, random_labelled
from megazero.models.distilled import DistilledChunk
from megazero.models.gpt import GPT, gpt_blocks
from megazero.models.language_model import LanguageModel, MaskedLanguageModel, MeasuredModel
from megazero.models.sample_losses import SampleLosses
from megazero.models.trunk import Trunk

__all__ = [
    "BERT",
    "EMBEDDING",
    "GPT",
    "HEAD",
    "OWN",
    "PRETRAINING_ONLY",
    "SCORES",
    "Batch",
    "BertBatch",
    "BertCollate",
    "Block",
    "Classifier",
    "ClassifierCollate",
    "Collate",
    "DistilledChunk",
    "FirstTokenClassifier",
    "LabelledBatch",
    "LanguageModel",
    "LastTokenClassifier",
    "MaskedLanguageModel",
    "MeasuredModel",
    "MicroBatch",
    "ModelChunk",
    "Part",
    "RowPlace",
    "SampleLosses",
    "Slice",
    "TextCollate",
    "Tie",
    "Trunk",
    "bert_blocks",
    "gpt_blocks",
    "random_labelled",
    "random_samples",
    "random_text",
]
