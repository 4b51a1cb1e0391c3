"""A pipeline's stages give the tokens of one process, whatever schedule the model was trained with."""

from __future__ import annotations

import pytest
import torch

from megazero.config.derive import PipelineShape
from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.parts.chunks import build_chunks, schedule_of
from megazero.train.parts.vocabulary import Vocabulary
from tests.layouts.layout import VOCABULARY, Layout

PROMPTS = [[5, 17, 3, 44], [52], [0, 1, 2, 7, 7]]


def tokens(layout: Layout) -> list[list[list[int]]]:
    """What each rank draws."""
    world, config = ThreadWorld(layout.world_size), layout.config()
    vocabulary = Vocabulary(VOCABULARY, 64, None, None)

    def work(rank: int) -> list[list[int]]:
        context = thread_context(world, layout.grid, rank)
        chunks = build_chunks(config, vocabulary, context, torch.device("cpu"))
        # Weights that prefer some tokens; chunks of one stage may share one.
        for parameter in {p for chunk in chunks.values() for p in chunk.parameters()}:
            parameter.data.mul_(3.0)
        model = StagedModel(chunks, schedule_of(PipelineShape.of(config)).stage_of, context.pp)
        return generate(model, PROMPTS, max_new_tokens=6, sampling=Sampling(seed=3))

    return world.run(work)


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2},
        {"pp": 4, "untied": True},
        {"pp": 2, "schedule": "interleaved", "virtual": 2},
        {"pp": 2, "tp": 2, "schedule": "zb-v"},
        {"schedule": "zb-v"},
    ],
    ids=lambda settings: Layout(**settings).name,
)
@pytest.mark.parametrize(
    ("letters", "widths"), [("", ""), ("-M*M", ""), ("", "empty")]
)  # with positions from a stage that remembers nothing
def test_every_stage_knows_the_serial_tokens(layout, shape, letters, widths):
    layout = Layout(layers=4, shape=shape, letters=letters, widths=widths, **layout)
    (serial,) = tokens(layout.serial)
    assert len({tuple(row) for row in serial}) == len(PROMPTS)
    assert tokens(layout) == [serial] * layout.world_size
