"""Log-likelihoods of packed sequences are those of each sequence alone, by a literal reference."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from megazero.config.derive import PipelineShape
from megazero.errors import ConfigError, DataError
from megazero.harness.packing import pack
from megazero.harness.scoring import Scorer, rolling, rolling_windows
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.parts.chunks import build_chunks, schedule_of
from megazero.train.parts.vocabulary import Vocabulary
from tests.inference.samples import GPT2, HYBRID, LLAMA, build
from tests.layouts.layout import VOCABULARY, Layout
from tests.tables import over_table

# Contexts that begin alike, choices of one token and of several, a context within another, a repetition.
HEAD = [5, 17, 3, 44, 8, 21, 9]
PAIRS = [
    (HEAD, [1, 2, 3]),
    (HEAD, [1, 2, 4, 4]),
    (HEAD, [7]),
    (HEAD, [8]),
    (HEAD[:3], [44, 8]),
    ([52], [0, 1, 2]),
    (HEAD, [1, 2, 3]),
    ([*HEAD, 30, 31], [9] * 5),
    ([4] * 40, [2, 3]),
    ([5], []),
]


def literal(model, context: Sequence[int], continuation: Sequence[int], length: int) -> tuple[float, bool]:
    """The rules, word by word, for a sequence alone."""
    tokens = [*context, *continuation][-(length + 1) :][:-1]
    if not continuation:
        return 0.0, True
    with torch.no_grad():
        logits = model(Batch(torch.tensor([tokens])))[:, 0, : model.vocab_size].double()
    rows = logits[len(tokens) - len(continuation) :]
    total, greedy = 0.0, True
    for row, target in zip(rows.tolist(), continuation, strict=True):
        total += row[target] - math.log(sum(math.exp(x) for x in row))
        greedy = greedy and row.index(max(row)) == target
    return total, greedy


def whole(config) -> tuple[StagedModel[Batch], object]:
    model = build(config)
    return StagedModel.whole(model), model


MODELS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "hybrid": HYBRID,
    "windowed": LLAMA.model_copy(update={"window_size": (5, 0)}),
    "alibi": GPT2.model_copy(update={"position_embedding_type": "alibi"}),
}


@pytest.mark.parametrize("tokens", [1, 30, 4096])
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_score_as_each_alone(name, tokens):
    staged, model = whole(MODELS[name])
    scores = Scorer(staged, solo_context(), max_length=24, tokens=tokens).score(PAIRS)
    for (context, continuation), (logprob, greedy) in zip(PAIRS, scores, strict=True):
        expected, likely = literal(model, context, continuation, 24)
        assert logprob == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert greedy == likely


def test_the_most_likely_token_is_greedy_and_another_is_not():
    staged, model = whole(LLAMA)
    with torch.no_grad():
        best = int(model(Batch(torch.tensor([HEAD])))[-1, 0, :53].argmax())
    scores = Scorer(staged, solo_context()).score([(HEAD, [best]), (HEAD, [(best + 1) % 53])])
    assert [score.greedy for score in scores] == [True, False]
    assert scores[0].logprob > scores[1].logprob


def test_padding_of_the_vocabulary_has_no_probability():
    staged, _ = whole(GPT2)  # 53 entries of 64 rows
    scores = Scorer(staged, solo_context()).score([(HEAD, [token]) for token in range(53)])
    assert math.fsum(math.exp(score.logprob) for score in scores) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}, {"dp": 2}, {"dp": 3}, {"pp": 2, "dp": 2}],
    ids=lambda settings: Layout(**settings).name,
)
def test_every_rank_of_every_layout_gets_the_scores_of_one_process(layout):
    layout = Layout(layers=4, shape="llama", **layout)
    (serial,) = scored(layout.serial)
    for scores in scored(layout):
        assert [greedy for _, greedy in scores] == [greedy for _, greedy in serial]
        assert [x for x, _ in scores] == pytest.approx([x for x, _ in serial], rel=1e-5, abs=1e-6)


def scored(layout: Layout) -> list[list[tuple[float, bool]]]:
    """The scores that each rank gets, of rows so short that there are several packs."""
    world, config = ThreadWorld(layout.world_size), layout.config()
    pairs = [([x % VOCABULARY for x in a], [x % VOCABULARY for x in b]) for a, b in PAIRS]

    def work(rank: int) -> list[tuple[float, bool]]:
        context = thread_context(world, layout.grid, rank)
        chunks = build_chunks(config, Vocabulary(VOCABULARY, 64, None, None), context, torch.device("cpu"))
        model = StagedModel(chunks, schedule_of(PipelineShape.of(config)).stage_of, context.pp)
        return list(Scorer(model, context, max_length=24, tokens=20).score(pairs))

    return world.run(work)


def test_replicas_share_the_packs_and_compute_none_twice(monkeypatch):
    computed: list[int] = []
    original = Scorer._scores

    def counted(self, one, targets):
        computed.extend(targets)
        return original(self, one, targets)

    monkeypatch.setattr(Scorer, "_scores", counted)
    scored(Layout(layers=2, shape="llama", dp=3))
    assert sorted(computed) == list(range(len(PAIRS) - 1))  # that without a continuation is known


def test_a_pack_has_each_common_beginning_once():
    rows = [[*HEAD, 1], [*HEAD, 2, 3], HEAD, [*HEAD[:4], 9], [*HEAD, 1], [50]]
    (one,) = pack(rows, 100)
    assert len(one.tokens) == len(HEAD) + 1 + 2 + 1 + 1
    for number, row in enumerate(rows):
        path = [one.tokens[i] for run in one.paths[number] for i in run]
        assert path == row
        assert [one.tokens[i] for i in one.last_rows(number, len(row))] == row
    assert max(len(p.tokens) for p in pack(rows, 9)) == 9


def test_random_packs_hold_their_sequences():
    draw = random.Random(1)
    for _ in range(50):
        rows = [[draw.randrange(3) for _ in range(draw.randint(1, 12))] for _ in range(30)]
        packs = pack(rows, draw.randint(5, 80))
        lengths = [len(one.tokens) for one in packs]
        assert lengths == sorted(lengths, reverse=True)
        seen = {
            n: [one.tokens[i] for run in path for i in run] for one in packs for n, path in one.paths.items()
        }
        assert seen == dict(enumerate(rows))
        for one in packs:
            places = {n: [one.positions[i] for run in path for i in run] for n, path in one.paths.items()}
            assert all(place == list(range(len(rows[n]))) for n, place in places.items())


@over_table(
    ("tokens", "length", "windows"),
    [
        ([], 4, []),
        ([1, 2], 4, [([9], [1, 2])]),
        ([1, 2, 3, 4], 4, [([9], [1, 2, 3, 4])]),
        (list(range(1, 11)), 4, [([9], [1, 2, 3, 4]), ([4], [5, 6, 7, 8]), ([6, 7, 8], [9, 10])]),
        ([1, 2, 3], 1, [([9], [1]), ([1], [2]), ([2], [3])]),
    ],
)
def test_windows_score_each_token_once(tokens, length, windows):
    assert list(rolling_windows(tokens, 9, length)) == windows


def test_a_long_text_is_scored_in_windows():
    staged, model = whole(LLAMA)
    text = [(7 * i) % 53 for i in range(61)]
    scorer = Scorer(staged, solo_context(), max_length=16)
    expected = sum(literal(model, *pair, 16)[0] for pair in rolling_windows(text, 0, 16))
    assert rolling(scorer.score, [text, [], text[:1]], 0, scorer.max_length) == pytest.approx(
        [expected, 0.0, literal(model, [0], text[:1], 16)[0]], rel=1e-5
    )


@over_table(
    ("pair", "message"),
    [
        (([], [1]), "the context of request 0 must have a token"),
        (([1], [2] * 25), "must have at most 24 tokens"),
        (([53], [2]), r"must be in \[0, 53\)"),
        (([1], [-1]), r"must be in \[0, 53\)"),
    ],
)
def test_bad_requests_are_refused(pair, message):
    staged, _ = whole(GPT2)
    with pytest.raises(DataError, match=message):
        Scorer(staged, solo_context()).score([pair])


def test_a_length_beyond_learned_positions_is_refused():
    staged, _ = whole(GPT2)
    with pytest.raises(ConfigError, match="from 1 to the 24 positions"):
        Scorer(staged, solo_context(), max_length=25)
