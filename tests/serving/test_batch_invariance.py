"""The law: log-probabilities have the same bits alone, among others, and in training's forward."""

from __future__ import annotations

import random

import pytest
import torch

from megazero.config.derive import PipelineShape
from megazero.inference.invariant import make_invariant
from megazero.inference.staged import StagedModel
from megazero.mpu.context import thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops import native
from megazero.train.parts.chunks import build_chunks, schedule_of
from megazero.train.parts.vocabulary import Vocabulary
from tests.layouts.layout import VOCABULARY, Layout
from tests.serving.mixed_steps import scores, trained

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")

LAYOUTS = [
    {"shape": "gpt2"},
    {"shape": "llama"},
    {"shape": "llama", "dtype": "bf16"},
    {"shape": "llama", "variant": "qwen"},
    {"shape": "llama", "variant": "gpt-oss", "experts": "top2"},
    {"shape": "gpt2", "variant": "cohere"},
    {"shape": "gpt2", "attends": "window"},
    {"shape": "llama", "attends": "every-other"},
    {"shape": "llama", "attends": "sinks"},
    {"shape": "gpt2", "attends": "alibi"},
    {"shape": "gpt2", "experts": "top2"},
    {"shape": "llama", "experts": "biased"},
    {"shape": "llama", "experts": "shared"},
    {"shape": "deepseek"},
    {"shape": "deepseek-lite"},
    {"shape": "gpt2", "tp": 2},
    {"shape": "llama", "tp": 4},
    {"shape": "gpt2", "pp": 2, "layers": 4},
    {"shape": "llama", "tp": 2, "pp": 2, "layers": 4},
    {"shape": "deepseek", "tp": 2},
    {"shape": "llama", "experts": "top2", "dp": 2, "ep": 2},
    {"shape": "llama", "experts": "shared", "tp": 4, "ep": 2, "etp": 2},
    {"shape": "gpt2", "experts": "top2", "tp": 4, "ep": 4, "etp": 1, "dispatcher": "allgather"},
]


def differing(settings: dict[str, object], others: int, page: int) -> list[str]:
    """How the first of some texts fares differently from how it does alone, over all ranks."""
    layout = Layout(sequence=192, **{name: value for name, value in settings.items() if name != "invariant"})
    world, config = ThreadWorld(layout.world_size), layout.config()

    def work(rank: int) -> list[str]:
        context = thread_context(world, layout.grid, rank)
        chunks = build_chunks(config, Vocabulary(VOCABULARY, 64, None, None), context, torch.device("cpu"))
        for parameter in {p for chunk in chunks.values() for p in chunk.parameters()}:
            parameter.data.mul_(3.0)
        model = StagedModel(chunks, schedule_of(PipelineShape.of(config)).stage_of, context.pp)
        if settings.get("invariant", True):
            make_invariant(model)
        rng = random.Random(others)
        texts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 60))] for _ in range(others)]
        text = [rng.randrange(VOCABULARY) for _ in range(150)]
        alone = scores(model, [text], random.Random(1), page)[0]
        among = scores(model, [text, *texts], random.Random(2), page)[0]
        forward = trained(model, text)
        pairs = {"among others": among, "in training's forward": forward}
        return [name for name, other in pairs.items() if not torch.equal(alone, other)]

    return sorted({line for lines in world.run(work) for line in lines})


@pytest.mark.seconds(8)
@pytest.mark.parametrize("settings", LAYOUTS, ids=lambda settings: Layout(**settings).name)
def test_a_request_among_seven(settings):
    page = (16, 32, 64)[LAYOUTS.index(settings) % 3]
    assert differing(settings, 7, page) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [LAYOUTS[i] for i in (0, 1, 6, 10, 11, 16)], ids=lambda settings: Layout(**settings).name
)
def test_a_request_among_sixty_three(settings):
    assert differing(settings, 63, 32) == []


def test_without_it_there_are_other_bits():
    """Or the sweep would show nothing."""
    ordinary = {"shape": "gpt2", "invariant": False}
    assert differing(ordinary, 7, 16) != []
