"""This rank's parts of the model, one per chunk of the pipeline."""

from __future__ import annotations

from dataclasses import replace

import torch

from megazero.config.tree import Config
from megazero.layers import initialize
from megazero.models import MicroBatch, ModelChunk, Slice
from megazero.mpu import ParallelContext
from megazero.train.families import family_of
from megazero.train.placement import placement_of
from megazero.train.programs import schedule_of
from megazero.train.stage_assignment import assign_parts
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
    assigned = assign_parts(config, vocabulary, context)
    whole = Slice(config.model, (vocabulary.size, vocabulary.padded), placement, config.recompute)
    chunks: Chunks = {}
    for number, parts in enumerate(assigned):
        if stage_of[number] != context.pp.rank:
            continue
        tied, copied = {}, set()
        for tie in family.ties(config.model):
            users = [chunk for chunk, own in enumerate(assigned) if any(part in tie.parts for part in own)]
            if number not in users:
                continue
            # In a V-shaped pipeline the first and the last chunk are on the same stage and share one weight.
            here = [chunk for chunk in users if stage_of[chunk] == context.pp.rank]
            if here[0] != number:
                tied[tie.weight] = chunks[here[0]].weight(tie.weight)
            if len(here) < len(users):
                copied.add(tie.weight)
        held = replace(whole, parts=parts, tied=tied, copied=frozenset(copied))
        chunks[number] = family.chunk(held)
        if device is not None:
            initialize(chunks[number], config.training.seed, context.place)
    return chunks
