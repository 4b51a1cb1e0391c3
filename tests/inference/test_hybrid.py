"""Generation with state-space layers: their states are the cache, and steps give what whole forwards give."""

from __future__ import annotations

import pytest
import torch

from megazero.config.tree.model import ModelConfig
from megazero.inference.cache import KeyValueCache
from megazero.inference.generate import generate
from megazero.inference.staged import StagedModel
from megazero.layers.state_space.convolution import WIDTH
from megazero.models.batch import Batch, Places
from megazero.mpu.context import ParallelContext
from tests.inference.samples import COMMON, HYBRID, PROMPTS, SIZES, VOCAB, build, on_threads
from tests.inference.test_generate import DRAWN, GREEDY, NEW, slowly

LEARNED = ModelConfig(**{**COMMON, "num_layers": 3}, **SIZES, init_method_std=0.4, hybrid_layer_pattern="-MM")
SHAPES = pytest.mark.parametrize("config", [HYBRID, LEARNED], ids=["hybrid", "learned"])


@SHAPES
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_steps_equal_whole_forwards(config, sampling, chunk):
    model = build(config)
    got = generate(model, PROMPTS, max_new_tokens=NEW, sampling=sampling, prefill_chunk=chunk)
    assert got == [slowly(model, prompt, i, sampling) for i, prompt in enumerate(PROMPTS)]


@SHAPES
def test_slices_generate_the_same(config):
    alone = generate(build(config), PROMPTS, max_new_tokens=NEW, sampling=DRAWN)

    def work(context: ParallelContext) -> list[list[int]]:
        model = build(config, context, sequence_parallel=True).without_sequence_parallelism()
        return generate(model, PROMPTS, max_new_tokens=NEW, sampling=DRAWN)

    assert on_threads(2, work) == [alone, alone]


@torch.no_grad()
def test_what_a_mixer_remembers_does_not_grow():
    model, cache = StagedModel.whole(build(HYBRID)), KeyValueCache(40)
    torch.manual_seed(0)
    sizes = []
    for start, length in ((0, 9), (9, 1), (10, 13)):
        tokens = torch.randint(VOCAB[0], (2, length))
        model.logits(Batch(tokens, places=Places(range(start, start + length))), cache)
        sizes.append([sum(x.numel() for x in cache.states[layer]) for layer in (1, 3)])
    channels, n, b = 8 * 4, 5, 2
    each = b * ((WIDTH - 1) * (channels + 2 * 2 * n) + channels * n)
    assert sizes == [[each, each]] * 3
    keys_and_values = 2 * 40 * b * 4 * 8
    assert cache.bytes == 4 * (keys_and_values + 2 * each)
