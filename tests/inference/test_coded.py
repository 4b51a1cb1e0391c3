"""Keys and values in 8 bits: literal codes, one meaning for any steps, and logits near the exact ones."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megazero.inference.cache import KeyValueCache
from megazero.inference.coded import BLOCK, GrowingRun, decoded, encoded
from megazero.inference.generate import generate
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.layers.inputs import Attends
from megazero.models.batch import Batch, Places
from megazero.mpu.context import thread_context, with_whole_sequences
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.ops.attention import Pattern
from tests.inference.samples import GPT2, HYBRID, LLAMA, VOCAB, build
from tests.inference.test_deepseek import V3
from tests.inference.test_shared_cache import SHIFTED

LENGTH = 150
LONG = {"seq_length": LENGTH}
WINDOW = LLAMA.model_copy(update={"window_size": (40, 0)})
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "window": WINDOW, "alibi": SHIFTED, "hybrid": HYBRID, "latent": V3}
CONFIGS = {name: config.model_copy(update=LONG) for name, config in CONFIGS.items()}


def test_codes_are_those_of_the_largest_magnitude_along_the_dims():
    x = torch.tensor([[127.0, -1.0, 0.0], [-63.4, 2.0, 0.0]])
    codes, scales = encoded(x, 0)
    assert codes.tolist() == [[127, -64, 0], [-63, 127, 0]]
    assert scales.tolist() == [[1.0, pytest.approx(2 / 127), 1.0]]
    codes, scales = encoded(x, 1)
    assert codes.tolist() == [[127, -1, 0], [-127, 4, 0]]
    assert decoded(codes, scales, torch.float32)[0].tolist() == [127.0, -1.0, 0.0]


def test_what_is_not_finite_stays_so():
    for wrong in (torch.nan, torch.inf):
        assert decoded(*encoded(torch.tensor([1.0, wrong]), 0), torch.float32).isnan().all()


def seen(x: Tensor, at: int, dim: int) -> Tensor:
    """What a row at a position attends to of x [t, b, g, d], by the definition."""
    start = at // BLOCK * BLOCK
    blocks = [x[i : i + BLOCK] for i in range(0, start, BLOCK)]
    scales = [block.abs().amax(dim, keepdim=True) / 127 for block in blocks]
    return torch.cat([*((b / s).round() * s for b, s in zip(blocks, scales, strict=True)), x[start : at + 1]])


@pytest.mark.parametrize("cuts", range(3))
def test_a_run_is_the_codes_of_full_blocks_however_it_grows(cuts):
    dice, rng = torch.Generator().manual_seed(3), random.Random(cuts)
    key, value = (torch.randn(LENGTH, 2, 3, size, generator=dice) for size in (4, 5))
    run, at = GrowingRun(coded=True), 0
    while at < LENGTH:
        stop = min(at + rng.randint(1, 40), (at // BLOCK + 1) * BLOCK, LENGTH)
        run.append(key[at:stop], value[at:stop])
        keys, values = run.read()
        run.settle()
        assert torch.equal(keys, seen(key, stop - 1, 0))
        assert torch.equal(values, seen(value, stop - 1, 3))
        at = stop
    assert (
        sum(x.nbytes for x in run.tensors) == 4 * 32 * 6 * (4 + 5) + 4 * 4 * (6 * 4 + 32 * 6) + 22 * 6 * 9 * 4
    )


def test_blocks_behind_a_window_are_let_go():
    cache, plain = KeyValueCache(1000, coded=True), KeyValueCache(1000)
    near, sizes = Attends(0, True, pattern=Pattern((40, 0), sinks=3)), []
    for at in range(200):
        row = torch.full((1, 1, 1, 2), float(at + 1))
        keys, _ = cache.extend(near, row, row)
        exact, _ = plain.extend(near, row, row)
        sizes.append(cache.bytes)
        if at % 10 == 9:
            assert len(keys) >= len(exact)
            torch.testing.assert_close(keys[-41:], exact[-41:], rtol=0.02, atol=0)
            torch.testing.assert_close(keys[:3], exact[:3], rtol=0.2, atol=0)
    assert max(sizes[168:]) == max(sizes[136:168])


def logits(config, chunk: int, *, coded: bool, context=None) -> Tensor:
    """The logits after each chunk of two texts, [chunks, 2, v]."""
    model = StagedModel({0: build(config, context)}, (0,), SoloGroup("pp", 0), coded_cache=coded)
    texts = torch.randint(VOCAB[0], (2, LENGTH), generator=torch.Generator().manual_seed(1))
    cache, parts = model.new_cache(LENGTH), []
    with torch.inference_mode():
        for start in range(0, LENGTH, chunk):
            stop = min(start + chunk, LENGTH)
            batch = Batch(texts[:, start:stop], places=Places(range(start, stop)))
            parts.append(model.logits(batch, cache))
    return torch.stack(parts)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_do_not_depend_on_how_a_prompt_is_cut_and_are_near_the_exact_ones(name):
    single = logits(CONFIGS[name], 1, coded=True)
    for chunk in (50, LENGTH):
        chunked = logits(CONFIGS[name], chunk, coded=True)
        torch.testing.assert_close(chunked, single[chunk - 1 :: chunk], rtol=1e-3, atol=1e-3)
    exact = logits(CONFIGS[name], 150, coded=False)[-1]
    wrong = (single[-1] - exact).abs().max()
    assert 0 < wrong < 0.1 * exact.std()


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (1, 2)])
def test_ranks_that_share_a_sequence_or_its_heads_give_the_logits_of_one(ranks, tp):
    config, world, grid = CONFIGS["llama"], ThreadWorld(ranks * tp), ProcessGrid(cp=ranks, tp=tp)

    def work(rank: int) -> Tensor:
        context = with_whole_sequences(thread_context(world, grid, rank))
        model = StagedModel(
            {0: build(config, context)}, (0,), SoloGroup("pp", 0), context.groups["cp"], coded_cache=True
        )
        texts = torch.randint(VOCAB[0], (2, LENGTH), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            cache = model.new_cache(LENGTH)
            if ranks > 1:
                cache.block = 64
            return model.logits(Batch(texts, places=Places(range(LENGTH))), cache)

    expected = logits(config, LENGTH, coded=True)[0]
    for given in world.run(work):
        torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-3)


def test_a_batch_gives_the_texts_of_each_prompt_alone():
    model = StagedModel.whole(build(CONFIGS["llama"]))
    model.coded_cache = True
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCAB[0]) for _ in range(count)] for count in (1, 70, 40)]
    how = {"max_new_tokens": 40, "sampling": Sampling(greedy=True)}
    together = generate(model, prompts, **how, prefill_chunk=17)
    assert together == [generate(model, [prompt], **how)[0] for prompt in prompts]
