"""Generation from mixtures of experts, on ranks that share them."""

from __future__ import annotations

import pytest
import torch

from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.layers.initialize import initialize
from megazero.layers.placement import Placement
from megazero.models.batch import Batch
from megazero.models.chunk import Slice
from megazero.models.gpt import GPT
from megazero.mpu.context import ParallelContext, solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.spec.resolve import model_spec
from tests.inference.samples import GPT2, LLAMA_FOUR_GROUPS, PROMPTS, VOCAB

GREEDY = Sampling(greedy=True)
MIXED = {"num_experts": (4,), "init_method_std": 0.3}
CONFIGS = {
    "softmax": GPT2.model_copy(update=MIXED),
    "biased": LLAMA_FOUR_GROUPS.model_copy(
        update={
            **MIXED,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_shared_expert_intermediate_size": 16,
        }
    ),
    "limited": GPT2.model_copy(update={**MIXED, "moe_expert_capacity_factor": 0.5}),
}


def build(name: str, context: ParallelContext, **options) -> GPT:
    model = GPT(Slice(model_spec(CONFIGS[name]), VOCAB, Placement.of(context, torch.float32, **options)))
    initialize(model, 7, context.place)
    for router in model.routers():
        if CONFIGS[name].moe_router_enable_expert_bias:
            router.bias = torch.tensor([0.3, -0.2, 0.0, 0.1])
    return model


@pytest.mark.parametrize("name", ["softmax", "biased"])
@torch.no_grad()
def test_tokens_with_a_cache_are_those_of_whole_forwards(name):
    model = build(name, solo_context())
    got = generate(model, PROMPTS, max_new_tokens=6, sampling=GREEDY)
    for prompt, new in zip(PROMPTS, got, strict=True):
        row = list(prompt)
        for token in new:
            logits = model(Batch(torch.tensor([row])))[-1, 0, : model.vocab_size]
            assert int(logits.argmax()) == token
            row.append(token)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2), (4, 2, 2)], ids=str)
def test_ranks_that_share_experts_generate_the_same(name, sizes):
    """No rank is idle: a step has four tokens, of which each rank routes its share."""
    tp, ep, etp = sizes
    alone = generate(build(name, solo_context()), PROMPTS, max_new_tokens=6, sampling=GREEDY)
    world, grid = ThreadWorld(tp), ProcessGrid(tp=tp, ep=ep, etp=etp)

    def work(rank: int):
        context = thread_context(world, grid, rank)
        split = build(name, context, sequence_parallel=True).without_sequence_parallelism()
        return [
            generate(m, PROMPTS, max_new_tokens=6, sampling=GREEDY) for m in (build(name, context), split)
        ]

    assert world.run(work) == [[alone, alone]] * tp


def test_generation_drops_nothing():
    """A token must not depend on those that come after it, which a full expert would make it do."""
    limited, free = build("limited", solo_context()), build("softmax", solo_context())
    both = [generate(model, PROMPTS, max_new_tokens=6, sampling=GREEDY) for model in (limited, free)]
    assert both[0] == both[1]
