"""Windows: each target counts once with Megatron's own context, and any layout gives the same scores."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from megazero.config.derive import PipelineShape
from megazero.errors import NumericsError
from megazero.harness.megatron.wikitext import overlapping, rolling
from megazero.harness.megatron.windows import Window, score
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch
from megazero.models.gpt import GPT
from megazero.mpu.context import thread_context
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.parts.chunks import build_chunks, schedule_of
from megazero.train.parts.vocabulary import Vocabulary
from tests.harness.megatron import literal
from tests.inference.test_text import byte_model
from tests.layouts.layout import SEQUENCE, VOCABULARY, Layout

ALONE = SoloGroup("data", 0)


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
                (window.tokens[j], window.tokens[:j])
                for window in overlapping(tokens, s, o)
                for j in range(len(window.tokens) - window.counted, len(window.tokens))
            ]
            assert sorted(theirs) == [target for target, _ in sorted(ours)] == tokens[1:]
            assert dict(ours) == theirs


def test_windows_of_padding_alone_are_skipped():
    """31 of 313 in the reference's example, which their last one of real tokens is not."""
    tokens = [1] * 10_000
    assert len(literal.windows(tokens, 1024, 32, 0)) == 313
    assert len(list(overlapping(tokens, 1024, 32))) == 313 - 31


def test_the_harness_cuts_the_same_windows():
    utils = pytest.importorskip("lm_eval.utils")
    for n, s in product(range(1, 40), (1, 2, 3, 8, 13)):
        pairs = map(utils.make_disjoint_window, utils.get_rolling_token_windows(list(range(n)), -1, s, 1))
        ours = [
            (list(w.tokens[: len(w.tokens) - w.counted]), list(w.tokens[-w.counted :]))
            for w in rolling(range(n), -1, s)
        ]
        assert ours == [(list(context), list(continuation)) for context, continuation in pairs]


@pytest.mark.parametrize(("s", "o"), [(12, 1), (12, 5), (12, 12), (7, 6)])
def test_scores_are_the_literal_ones(s, o):
    model, draw = byte_model(), np.random.default_rng(s + o)
    staged = StagedModel.whole(model)
    for n in (2, s, s + 1, s + 2, 3 * s, 3 * s + 1, 3 * s + 2):
        tokens = draw.integers(0, 257, n).tolist()
        want = literal.loss(logits_of(model), literal.windows(tokens, s, o, 256))
        scores = score(list(overlapping(tokens, s, o)), staged, batch_size=3, copies=ALONE)
        assert scores[:, 0].sum() == pytest.approx(want, rel=1e-6)


def test_megatron_and_the_harness_agree_where_their_rules_do():
    """Without overlap, on a document that the harness's first token begins and whose windows are all full."""
    model, s = byte_model(), 9
    tokens = np.random.default_rng(0).integers(0, 256, 4 * s).tolist()
    scorer = partial(score, model=StagedModel.whole(model), batch_size=2, copies=ALONE)
    theirs = scorer(list(overlapping([256, *tokens], s, s)))
    np.testing.assert_allclose(theirs, scorer(list(rolling(tokens, 256, s))), rtol=1e-6)
    # The last of a shorter one has more context in the harness.
    short = [
        scorer(list(w))[-1, 0] for w in (overlapping([256, *tokens[:-4]], s, s), rolling(tokens[:-4], 256, s))
    ]
    assert short[0] != pytest.approx(short[1], rel=1e-3)


def test_only_what_counts_must_be_most_likely():
    model = byte_model()
    row = [5, 7]
    for _ in range(4):
        row.append(int(logits_of(model)(torch.tensor(row))[-1].argmax()))
    wrong = [*row[:-1], (row[-1] + 1) % 257]
    scores = score(
        [Window(row, 4), Window(row, 5), Window(wrong, 2), Window(wrong[:-1], 1)],
        StagedModel.whole(model),
        batch_size=4,
        copies=ALONE,
    )
    assert scores[:, 1].tolist() == [0, 1, 1, 0]


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

    def scores(layout: Layout) -> list[np.ndarray]:
        world, config = ThreadWorld(layout.world_size), layout.config()

        def work(rank: int) -> np.ndarray:
            context = thread_context(world, layout.grid, rank)
            chunks = build_chunks(
                config, Vocabulary(VOCABULARY, 64, None, None), context, torch.device("cpu")
            )
            stage_of = schedule_of(PipelineShape.of(config)).stage_of
            return score(windows, StagedModel(chunks, stage_of, context.pp), 3, context.data)

        return world.run(work)

    (alone,) = scores(layout.serial)
    for spread in scores(layout):
        np.testing.assert_allclose(spread, alone, rtol=1e-5)
    assert len(windows) % (3 * layout.grid.dp) != 0


def test_a_model_that_is_damaged():
    model = byte_model()
    next(model.parameters()).data.fill_(float("nan"))
    with pytest.raises(NumericsError, match="`loss` must be finite"):
        score([Window([1, 2], 1)], StagedModel.whole(model), 1, ALONE)
