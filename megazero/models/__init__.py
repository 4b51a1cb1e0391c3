"""models: each of them short enough to read in one go. `gpt.py` is GPT in all its shapes, `bert.py` BERT.

`trunk.py` is what they share: embedding and layers. `chunk.py` says what the trainer needs from a model,
`batch.py` and `bert_batch.py` what a micro-batch is, and `flops.py` what blocks cost.
"""

from megazero.models.batch import Batch, TextCollate, random_text
from megazero.models.bert import BERT, bert_blocks
from megazero.models.bert_batch import BertBatch, BertCollate, random_samples
from megazero.models.chunk import Block, ChunkSpan, LanguageModel, ModelChunk
from megazero.models.gpt import GPT, gpt_blocks
from megazero.models.trunk import MaskedBatch, Sequences, Trunk

__all__ = [
    "BERT",
    "GPT",
    "Batch",
    "BertBatch",
    "BertCollate",
    "Block",
    "ChunkSpan",
    "LanguageModel",
    "MaskedBatch",
    "ModelChunk",
    "Sequences",
    "TextCollate",
    "Trunk",
    "bert_blocks",
    "gpt_blocks",
    "random_samples",
    "random_text",
]
