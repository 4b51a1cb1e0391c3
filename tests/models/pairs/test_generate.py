"""Answers of a T5 are transformers', greedy, from caches of both kinds, on any number of ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megazero.config.derive import PipelineShape
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.inference.text_to_text import answer
from megazero.models.batch import Batch
from megazero.models.pairs import bias
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.parts.chunks import build_chunks, schedule_of
from megazero.train.parts.vocabulary import Vocabulary
from tests.layouts.layout import VOCABULARY, Layout
from tests.models.hf_weights import global_weights
from tests.models.pairs.hf_t5 import t5_model, t5_shape, to_theirs
from tests.models.pairs.test_hf_parity import build

SOURCES = [[7, 3, 9, 1], [5, 8, 30, 31, 2, 40, 1], [11, 1]]
NEW = 12


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_answers_are_those_of_transformers(tied):
    model = t5_shape(untie_embeddings_and_output_weights=not tied)
    ours, theirs = build(model), t5_model(model)
    theirs.load_state_dict(to_theirs(global_weights(ours, solo_context().groups), model))
    mine = answer(
        StagedModel.whole(ours), SOURCES, start=0, end=1, max_new_tokens=NEW, sampling=Sampling(greedy=True)
    )
    for source, tokens in zip(SOURCES, mine, strict=True):
        settings = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, "use_cache": False}
        made = theirs.generate(torch.tensor([source]), **settings)[0, 1:].tolist()
        assert tokens == (made[: made.index(1)] if 1 in made else made)
    assert len(set(map(tuple, mine))) > 1


def answers_on(layout: Layout, **arguments) -> list[list[list[int]]]:
    """What each rank answers with the seed's weights."""
    config, grid = layout.config(), layout.grid
    world, vocabulary = ThreadWorld(layout.world_size), Vocabulary(VOCABULARY, 64, None, None)

    def work(rank: int) -> list[list[int]]:
        context = thread_context(world, grid, rank)
        chunks = build_chunks(config, vocabulary, context, context.device)
        staged = StagedModel(chunks, schedule_of(PipelineShape.of(config)).stage_of, context.pp)
        return answer(staged, SOURCES, start=0, end=1, max_new_tokens=NEW, **arguments)

    return world.run(work)


@pytest.mark.parametrize("shape", ["t5", "t5-megatron"])
@pytest.mark.parametrize(
    "sampling", [Sampling(greedy=True), Sampling(top_k=20, seed=3)], ids=["greedy", "drawn"]
)
def test_answers_are_the_same_on_any_layout(shape, sampling):
    alone = Layout(shape=shape)
    (expected,) = answers_on(alone, sampling=sampling)
    assert any(len(tokens) == NEW for tokens in expected)
    for layout in (Layout(shape=shape, tp=2), Layout(shape=shape, pp=2), Layout(shape=shape, tp=2, pp=4)):
        assert answers_on(layout, sampling=sampling) == [expected] * layout.world_size


def test_a_text_is_answered_alike_in_any_batch():
    model = StagedModel.whole(build(t5_shape()))
    settings = {"start": 0, "end": 1, "max_new_tokens": NEW, "sampling": Sampling(seed=2)}
    together = answer(model, SOURCES, **settings)
    apart = [answer(model, [source], numbers=[i], **settings)[0] for i, source in enumerate(SOURCES)]
    assert together == apart


def test_each_step_equals_a_pass_without_a_cache():
    """The logits of the last position, given all tokens before at once."""
    ours = build(t5_shape())
    tokens = answer(
        StagedModel.whole(ours),
        SOURCES[:1],
        start=0,
        end=1,
        max_new_tokens=NEW,
        sampling=Sampling(greedy=True),
    )[0]
    from megazero.inference.text_to_text import _first_batch

    batch = _first_batch(SOURCES[:1], 0, torch.device("cpu"))
    given = torch.tensor([[0, *tokens[:-1]]])
    with torch.no_grad():
        logits = ours(replace(batch, decoder=Batch(given)))
    assert logits[:, 0, :61].argmax(-1).tolist() == tokens


def test_a_text_is_encoded_once(monkeypatch):
    sides: Counter[bool] = Counter()
    buckets = bias.relative_buckets
    monkeypatch.setattr(
        bias, "relative_buckets", lambda x, **how: sides.update([how["both_ways"]]) or buckets(x, **how)
    )
    ours, calls = build(t5_shape()), Counter()
    for name, module in ours.named_modules():
        if name.endswith(("cross.key_value", "cross.query", "encoder_norm")):
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    answers = answer(StagedModel.whole(ours), SOURCES, start=0, end=60, max_new_tokens=NEW)
    steps = max(map(len, answers))
    assert steps == NEW
    assert {calls[name] for name in calls if not name.endswith("query")} == {1}
    assert {calls[name] for name in calls if name.endswith("query")} == {NEW}
    assert sides == {True: 1, False: NEW}
