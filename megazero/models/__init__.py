"""models: each of them short enough to read in one go. `gpt.py` is GPT in all its shapes.

`chunk.py` says what the trainer needs from a model, `batch.py` what a micro-batch of text is, and `flops.py`
what blocks cost.
"""

from megazero.models.batch import Batch, TextCollate, random_text
from megazero.models.chunk import Block, ChunkSpan, LanguageModel, ModelChunk
from megazero.models.gpt import GPT, gpt_blocks

__all__ = [
    "GPT",
    "Batch",
    "Block",
    "ChunkSpan",
    "LanguageModel",
    "ModelChunk",
    "TextCollate",
    "gpt_blocks",
    "random_text",
]
