"""Requests for small models, and engines on any layout of threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megazero.config.derive import PipelineShape
from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.serving.engine import Completed
from megazero.serving.wanted import Wanted
from megazero.train.parts.chunks import build_chunks, schedule_of
from megazero.train.parts.vocabulary import Vocabulary
from tests.layouts.layout import VOCABULARY, Layout

GREEDY = Sampling(greedy=True)


def requests(count: int, seed: int = 0, length: int = 48, **settings: Any) -> list[Wanted]:
    """Random prompts, some with a beginning in common, for a context of `length` tokens."""
    rng = random.Random(seed)
    common = [rng.randrange(50) for _ in range(length - 15)]
    made = []
    for number in range(count):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 12))]
        if rng.random() < 0.3:
            prompt = common[: rng.randint(1, length - 15)] + prompt[:1]
        new = rng.randint(1, min(30, length - len(prompt)))
        made.append(Wanted(tuple(prompt), new, number=number, **{"sampling": GREEDY, **settings}))
    return made


def alone(model: Any, wanted: Sequence[Wanted]) -> list[list[int]]:
    """The tokens of each request by `generate`, one by one."""
    return [
        generate(
            model,
            [one.prompt],
            max_new_tokens=one.max_tokens,
            sampling=one.sampling,
            numbers=[one.number],
        )[0]
        for one in wanted
    ]


def ids(completed: Sequence[Completed]) -> list[list[int]]:
    """The tokens of each answer."""
    return [[token.id for token in one.tokens] for one in completed]


def on_ranks(layout: Layout, work: Callable[[StagedModel], Any]) -> list[Any]:
    """``work(model)`` on each rank of a layout, with weights that prefer some tokens."""
    world, config = ThreadWorld(layout.world_size), layout.config()

    def run(rank: int) -> Any:
        context = thread_context(world, layout.grid, rank)
        vocabulary = Vocabulary(VOCABULARY, 64, None, None)
        chunks = build_chunks(config, vocabulary, context, torch.device("cpu"))
        for parameter in {p for chunk in chunks.values() for p in chunk.parameters()}:
            parameter.data.mul_(3.0)
        return work(StagedModel(chunks, schedule_of(PipelineShape.of(config)).stage_of, context.pp))

    return world.run(run)
