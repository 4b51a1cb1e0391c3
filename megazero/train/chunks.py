"""This rank's parts of the model, one per chunk of the pipeline."""

from __future__ import annotations

import torch

from megazero.config.tree import Config
from megazero.layers import initialize
from megazero.models import ChunkSpan, MicroBatch, ModelChunk
from megazero.mpu import ParallelContext
from megazero.train.families import family_of
from megazero.train.placement import placement_of
from megazero.train.programs import schedule_of
from megazero.train.stage_assignment import assign_layers
from megazero.train.vocabulary import Vocabulary

Chunks = dict[int, ModelChunk[MicroBatch]]
"""This rank's parts of the model, by their numbers along the model."""


def build_chunks(
    config: Config, vocabulary: Vocabulary, context: ParallelContext, device: torch.device | None = None
) -> Chunks:
    """This rank's parts of the model: shapes only, on the meta device, or the seed's weights on `device`.

    Raises:
        ConfigError: the layers cannot be assigned to the stages as configured.
    """
    family = family_of(config.model)
    placement = placement_of(config, context, device or torch.device("meta"))
    stage_of = schedule_of(config).stage_of
    tied = family.ties(config.model)
    vocab = vocabulary.size, vocabulary.padded
    chunks: Chunks = {}
    for number, layers in enumerate(assign_layers(config, vocabulary, context)):
        if stage_of[number] != context.pp.rank:
            continue
        first, last = number == 0, number == len(stage_of) - 1
        span = ChunkSpan(layers, first, last, shared=first and tied and stage_of[0] != stage_of[-1])
        # In a V-shaped pipeline the first and the last chunk are on the same stage and share one weight.
        weight = chunks[0].tied_weight if last and not first and tied and 0 in chunks else None
        chunks[number] = family.chunk(config.model, vocab, placement, config.recompute, span, weight)
        if device is not None:
            initialize(chunks[number], config.training.seed, context.place)
    return chunks
