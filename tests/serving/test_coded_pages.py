"""Pages in codes: the same bits in any company, prefixes that are reused, and memory that does not grow."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from megazero.inference.invariant import make_invariant
from megazero.inference.staged import StagedModel
from megazero.ops import native
from megazero.serving.coded_pages import CodedPages
from megazero.serving.engine import Engine, EngineLimits
from megazero.serving.limits import page_bytes
from megazero.serving.page_buffers import PageBuffers, Ragged
from tests.inference.samples import build
from tests.layouts.layout import VOCABULARY, Layout
from tests.serving.mixed_steps import scores
from tests.serving.samples import alone, on_ranks, requests
from tests.serving.test_engine import DRAWN, FEW, LLAMA, Crowd, idle

LAYOUTS = [
    {"shape": "llama"},
    {"shape": "gpt2", "attends": "window"},
    {"shape": "llama", "attends": "sinks"},
    {"shape": "gpt2", "attends": "alibi"},
    {"shape": "llama", "dtype": "bf16"},
    {"shape": "deepseek"},
    {"shape": "gpt2", "tp": 2},
    {"shape": "llama", "pp": 2, "layers": 4},
    {"shape": "llama", "experts": "top2", "dp": 2, "ep": 2},
]


@pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")
@pytest.mark.seconds(4)
@pytest.mark.parametrize("settings", LAYOUTS, ids=lambda settings: Layout(**settings).name)
def test_a_request_has_the_same_bits_alone_and_among_seven(settings):
    page = (32, 16, 64)[LAYOUTS.index(settings) % 3]

    def work(model: StagedModel) -> tuple[bool, float]:
        make_invariant(model)
        rng = random.Random(7)
        texts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 60))] for _ in range(7)]
        text = [rng.randrange(VOCABULARY) for _ in range(150)]
        exact = scores(model, [text], random.Random(1), page)[0]
        model.coded_cache = True
        single = scores(model, [text], random.Random(1), page)[0]
        among = scores(model, [text, *texts], random.Random(2), page)[0]
        return torch.equal(single, among), float((single - exact).abs().mean())

    for equal, wrong in on_ranks(Layout(sequence=192, **settings), work):
        assert equal
        assert 0 < wrong < 0.5


def test_texts_in_a_crowd_are_those_of_each_alone():
    """With prefixes that are reused, and requests that lose their pages and begin again."""
    config = LLAMA.model_copy(update={"seq_length": 96})
    model, wanted = StagedModel.whole(build(config)), requests(5, length=96, sampling=DRAWN)
    wanted = [replace(one, max_tokens=min(60, 95 - len(one.prompt))) for one in wanted]
    model.coded_cache = True
    limits = replace(FEW, max_length=96, page=32, pages=5)  # pages as long as the blocks of `generate`
    expected = alone(model, wanted)
    engine = Engine(model, limits)
    crowd = Crowd(engine, wanted, seed=1)
    crowd.play()
    assert [crowd.tokens[number] for number in range(5)] == expected
    assert engine.counters.preemptions > 0
    assert engine.counters.cached_tokens > 0
    idle(engine)


def test_who_leaves_leaves_nothing_open():
    model = StagedModel.whole(build(LLAMA))
    model.coded_cache = True
    engine = Engine(model, replace(FEW, pages=40))
    sizes = []
    for seed in range(3):
        leaving = Crowd(engine, requests(12, seed), seed, leave=0.15)
        leaving.play()
        idle(engine)
        sizes.append(engine._runner._buffers.bytes)
    places = len(engine._runner._buffers._kept[0].keys)
    assert places <= FEW.max_running + 2
    assert sizes[2] <= sizes[1] + 2 * 16 * 2 * 16 * 4 * 2


def test_bytes_of_pages():
    g, d, e, page = 2, 64, 64, 32
    coded, plain = CodedPages(100, page), PageBuffers(100, page)
    step = Ragged((40,), (0,), ((7, 3),))
    for buffers in (coded, plain):
        buffers.filled(0, step, step.slots(page), torch.randn(40, g, d), torch.randn(40, g, e))
    assert plain.bytes == 100 * page * g * (d + e) * 4
    of_codes = g * (page * (d + e) + 4 * (d + page))
    assert coded.bytes == 100 * of_codes + 2 * page * g * (d + e) * 4
    model = StagedModel.whole(build(LLAMA))  # two layers, two groups of 8 channels
    assert page_bytes(model, 32) == 2 * 2 * 32 * 16 * 4
    model.coded_cache = True
    assert page_bytes(model, 32) == 2 * 2 * (32 * 16 + 4 * (8 + 32))
    assert EngineLimits.of(model, memory=10**6, max_length=4096).pages == 10**6 // 2688
