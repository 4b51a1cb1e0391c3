"""Generation whose keys and values several ranks share: the tokens of one rank, in a share of its memory."""

from __future__ import annotations

import pytest
import torch

from megazero.inference.cache import SharedCache
from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.layers.inputs import Attends
from megazero.mpu.context import thread_context, with_whole_sequences
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.attention import Pattern
from tests.inference.samples import GPT2, HYBRID, LLAMA, build
from tests.layouts.variants import VARIANTS

PROMPTS = [list(range(1, 12)), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [7] * 14]
WINDOW = LLAMA.model_copy(
    update={"window_size": (3, 0), "window_attn_skip_freq": (0, 1), "window_sink_tokens": 2}
)
GEMMA = LLAMA.model_copy(update=VARIANTS["gemma"])
SHIFTED = GPT2.model_copy(update={"position_embedding_type": "alibi", "softmax_type": "learnable"})


def shared(config, ranks: int, tp: int, **how) -> list:
    """The tokens on each rank, and how many bytes each keeps."""
    world, grid = ThreadWorld(ranks * tp), ProcessGrid(cp=ranks, tp=tp)

    def work(rank: int):
        context = thread_context(world, grid, rank)
        model = build(config, with_whole_sequences(context))
        staged = StagedModel({0: model}, (0,), SoloGroup("pp", 0), context.groups["cp"])
        caches = []
        make = staged.new_cache
        staged.new_cache = lambda length: caches.append(SharedCache(staged.sharers, 2)) or caches[-1]
        assert isinstance(make(5), SharedCache)
        return generate(staged, PROMPTS, max_new_tokens=9, sampling=Sampling(), **how), caches[0].bytes

    return world.run(work)


@pytest.mark.parametrize(
    "config",
    [GPT2, LLAMA, WINDOW, SHIFTED, GEMMA, HYBRID],
    ids=["gpt2", "llama", "window", "alibi", "gemma", "hybrid"],
)
@pytest.mark.parametrize(("ranks", "tp", "chunk"), [(2, 1, None), (3, 1, 4), (2, 2, 3)])
def test_the_tokens_are_those_of_one_rank(config, ranks, tp, chunk):
    alone = generate(build(config), PROMPTS, max_new_tokens=9, sampling=Sampling())
    answers = shared(config, ranks, tp, prefill_chunk=chunk)
    assert [tokens for tokens, _ in answers] == [alone] * (ranks * tp)


def test_each_rank_keeps_its_share():
    whole = 2 * 2 * len(PROMPTS) * (14 + 8) * GPT2.hidden_size * 4  # keys and values of two layers
    kept = [size for _, size in shared(GPT2, 2, 1)]
    assert sum(kept) == whole
    assert max(kept) <= whole / 2 * 1.1


def test_blocks_are_dealt_in_turn_and_let_go_behind_a_window():
    solo = SoloGroup()
    cache, keys = SharedCache(solo, 4), torch.arange(10.0).view(10, 1, 1, 1)
    start, runs = cache.extend(Attends(0, True), keys[:3], keys[:3])
    assert (start, [(run.start, len(run.keys)) for run in runs]) == (0, [(0, 3)])
    start, runs = cache.extend(Attends(0, True), keys[3:], keys[3:])
    assert (start, [(run.start, len(run.keys)) for run in runs]) == (3, [(0, 4), (4, 4), (8, 2)])
    assert torch.cat([run.keys for run in runs]).equal(keys)
    narrow = SharedCache(solo, 2)
    for position in range(10):
        row = keys[position : position + 1]
        _, runs = narrow.extend(Attends(0, True, pattern=Pattern((3, 0), sinks=1)), row, row)
        seen = {run.start + i for run in runs for i in range(len(run.keys))}
        assert seen >= {0, *range(max(0, position - 3), position + 1)}
        assert len(seen) <= 2 + 6
