"""A small BERT with a WordPiece vocabulary, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from megazero.config.derive import PipelineShape
from megazero.config.tree.config import Config
from megazero.config.tree.model import ModelConfig
from megazero.data.tokenizers.base import Tokenizer
from megazero.data.tokenizers.build import TokenizerSpec, build_tokenizer
from megazero.inference.fill import MaskFiller
from megazero.inference.staged import StagedModel
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.parts.chunks import build_chunks, schedule_of
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary
from tests.layouts.layout import Layout

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "capital",
    "of",
    "is",
    "paris",
    "france",
    "berlin",
    ".",
    ",",
    "##s",
    "a",
    "in",
    "it",
]
MODEL = ModelConfig(
    family="bert",
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    init_method_std=0.3,
    make_vocab_size_divisible_by=8,
)


def word_pieces(folder: Path) -> Tokenizer:
    """The tokenizer of these words; Megatron's [BOS] and [EOS] follow them."""
    path = folder / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n")
    return build_tokenizer(TokenizerSpec("BertWordPieceLowerCase", vocab_file=str(path)))


def config_for(layout: Layout, model: ModelConfig = MODEL) -> Config:
    """The configuration of a layout for this model."""
    return layout.config().model_copy(update={"model": model})


def on_ranks(layout: Layout, tokenizer: Tokenizer, work, model: ModelConfig = MODEL) -> list:
    """``work(filler)`` on every rank, all with the weights of one seed."""
    config, world = config_for(layout, model), ThreadWorld(layout.world_size)
    size = tokenizer.vocab_size
    vocabulary = Vocabulary(size, -(-size // (8 * layout.tp)) * 8 * layout.tp, None, tokenizer)

    def on_rank(rank: int):
        context = thread_context(world, layout.grid, rank)
        chunks = build_chunks(config, vocabulary, context, torch.device("cpu"))
        staged = StagedModel(chunks, schedule_of(PipelineShape.of(config)).stage_of, context.pp)
        collate = family_of(config.model).samples.collate(config, size, solo_context(), None)
        return work(MaskFiller(staged, tokenizer, collate))

    return world.run(on_rank)
