"""Windows: each target counts once with Megatron's own context, and any layout gives the same scores."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from megazero.config.derive import PipelineShape
from megazero.harness.megatron.wikitext import overlapping
from megazero.harness.scoring import Scorer, rolling
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch
from megazero.models.gpt import GPT
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.parts.chunks import build_chunks, schedule_of
from megazero.train.parts.vocabulary import Vocabulary
from tests.harness.megatron import literal
from tests.inference.test_text import byte_model
from tests.layouts.layout import SEQUENCE, VOCABULARY, Layout


def logits_of(model: GPT) -> literal.Logits:
    def logits(tokens):
        with torch.no_grad():
            return model(Batch(tokens[None]))[:, 0, : model.vocab_size]

    return logits


def test_each_target_counts_once_after_the_tokens_of_megatrons_window():
    for n, s in product(range(2, 40), (1, 2, 3, 5, 8, 13)):
        tokens = list(range(n))
        for o in range(1, s + 1):
            theirs = {
                row[j + 1]: row[: j + 1]
                for row, mask in literal.windows(tokens, s, o, -1)
                for j, counts in enumerate(mask)
                if counts
            }
            ours = [
                (target, [*context, *counted[:place]])
                for context, counted in overlapping(tokens, s, o)
                for place, target in enumerate(counted)
            ]
            assert sorted(theirs) == [target for target, _ in sorted(ours)] == tokens[1:]
            assert dict(ours) == theirs


def test_windows_of_padding_alone_are_skipped():
    """31 of 313 in the reference's example, which their last one of real tokens is not."""
    tokens = [1] * 10_000
    assert len(literal.windows(tokens, 1024, 32, 0)) == 313
    assert len(list(overlapping(tokens, 1024, 32))) == 313 - 31


@pytest.mark.parametrize(("s", "o"), [(12, 1), (12, 5), (12, 12), (7, 6)])
def test_scores_are_the_literal_ones(s, o):
    model, draw = byte_model(), np.random.default_rng(s + o)
    scorer = Scorer(StagedModel.whole(model), solo_context(), max_length=s)
    for n in (2, s, s + 1, s + 2, 3 * s, 3 * s + 1, 3 * s + 2):
        tokens = draw.integers(0, 257, n).tolist()
        want = literal.loss(logits_of(model), literal.windows(tokens, s, o, 256))
        scores = scorer.score(list(overlapping(tokens, s, o)))
        assert -sum(score.logprob for score in scores) == pytest.approx(want, rel=1e-6)


def test_megatron_and_the_harness_agree_where_their_rules_do():
    """Without overlap, on a document that the harness's first token begins and whose windows are all full."""
    s = 9
    scorer = Scorer(StagedModel.whole(byte_model()), solo_context(), max_length=s)
    tokens = np.random.default_rng(0).integers(0, 256, 4 * s).tolist()

    def both(tokens: list[int]) -> list[float]:
        megatron = sum(score.logprob for score in scorer.score(list(overlapping([256, *tokens], s, s))))
        return [megatron, *rolling(scorer.score, [tokens], 256, scorer.max_length)]

    megatron, harness = both(tokens)
    assert megatron == pytest.approx(harness, rel=1e-6)
    # The last window of a shorter one has more context in the harness.
    megatron, harness = both(tokens[:-4])
    assert megatron != pytest.approx(harness, rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 2},
        {"dp": 3},
        {"tp": 2},
        {"pp": 2},
        {"tp": 2, "pp": 2, "dp": 2},
        {"ep": 2, "dp": 2, "experts": "top2"},
    ],
    ids=lambda settings: Layout(**settings).name,
)
def test_any_layout_scores_each_window_once(settings):
    layout = Layout(**settings)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 150).tolist()
    windows = list(overlapping(tokens, SEQUENCE, 7))

    def scores(layout: Layout) -> list[list[float]]:
        world, config = ThreadWorld(layout.world_size), layout.config()

        def work(rank: int) -> list[float]:
            context = thread_context(world, layout.grid, rank)
            chunks = build_chunks(
                config, Vocabulary(VOCABULARY, 64, None, None), context, torch.device("cpu")
            )
            model = StagedModel(chunks, schedule_of(PipelineShape.of(config)).stage_of, context.pp)
            scorer = Scorer(model, context, max_length=SEQUENCE, tokens=3 * SEQUENCE)
            return [score.logprob for score in scorer.score(windows)]

        return world.run(work)

    (alone,) = scores(layout.serial)
    for spread in scores(layout):
        np.testing.assert_allclose(spread, alone, rtol=1e-5)
    assert len(windows) == 20  # in packs of three, which two or three copies do not share evenly
