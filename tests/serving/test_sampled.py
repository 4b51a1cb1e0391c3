"""Many rows at once, each by its own settings: the tokens and bits of each row alone."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megazero.inference.sampling import Sampling, choose_tokens, probabilities
from megazero.serving.sampled import Row, draw, token_scores
from megazero.serving.wanted import NO_PENALTIES, Penalties, Token, Wanted

VOCAB = 97


def settings_of(rng: random.Random) -> Sampling:
    return Sampling(
        temperature=rng.choice([0.3, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 40, 500]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5]),
        greedy=rng.random() < 0.2,
        seed=rng.randrange(5),
        vocab_size=rng.choice([None, 90]),
    )


def rows_of(rng: random.Random, count: int) -> list[Row]:
    rows = []
    for _ in range(count):
        tokens = tuple(rng.randrange(90) for _ in range(rng.randint(1, 9)))
        rows.append(Row(Wanted(tokens[:1], 20, settings_of(rng), number=rng.randrange(7)), list(tokens)))
    return rows


def test_a_crowd_of_rows_draws_what_each_draws_alone():
    rng, logits = random.Random(1), torch.randn(1000, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    logits[::7] = logits[::7].round()  # ties
    rows = rows_of(rng, 1000)
    before = logits.clone()
    together = [token.id for token in draw(logits, rows)]
    alone = [
        int(choose_tokens(row, one.wanted.sampling, [one.wanted.number], len(one.tokens)))
        for row, one in zip(logits.split(1), rows, strict=True)
    ]
    assert together == alone
    assert len(set(together)) > 50
    assert torch.equal(logits, before)


@pytest.mark.slow
def test_what_is_left_to_draw_is_what_transformers_leaves():
    warpers = pytest.importorskip("transformers.generation.logits_process")
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    for _ in range(50):
        sampling, logits = settings_of(rng), torch.randn(20, VOCAB, generator=generator).double() * 3
        scores = warpers.TemperatureLogitsWarper(sampling.temperature)(None, logits)
        if sampling.top_k:
            scores = warpers.TopKLogitsWarper(sampling.top_k)(None, scores)
        if sampling.top_p < 1:
            scores = warpers.TopPLogitsWarper(sampling.top_p)(None, scores)
        if sampling.min_p:
            scores = warpers.MinPLogitsWarper(sampling.min_p)(None, scores)
        torch.testing.assert_close(probabilities(logits, sampling), scores.softmax(-1))


def test_penalties_literally():
    logits = torch.tensor([[2.0, -1.0, 3.0, 0.5]])

    def drawn_from(penalties: Penalties, tokens: list[int]) -> int:
        wanted = Wanted((1, 2), 9, Sampling(greedy=True), penalties=penalties)
        return draw(logits, [Row(wanted, tokens)])[0].id

    assert drawn_from(NO_PENALTIES, [1, 2]) == 2
    assert drawn_from(Penalties(repetition=2.0), [1, 2]) == 0  # 2.0, -2.0, 1.5, 0.5
    assert drawn_from(Penalties(repetition=0.5), [1, 2]) == 2  # 2.0, -0.5, 6.0, 0.5
    assert drawn_from(Penalties(frequency=0.7), [1, 2]) == 2  # the prompt does not count
    assert drawn_from(Penalties(frequency=0.7), [1, 2, 2, 0]) == 2  # 1.3, -1, 2.3 - 0.7 = 1.6 + ...
    assert drawn_from(Penalties(frequency=0.7), [1, 2, 2, 2]) == 0  # 2, -1, 1.6, 0.5
    assert drawn_from(Penalties(presence=1.1), [1, 2, 2, 2]) == 0  # 2, -1, 1.9, 0.5
    assert drawn_from(Penalties(presence=0.9), [1, 2, 2, 2]) == 2  # 2, -1, 2.1, 0.5
    assert drawn_from(Penalties(logit_bias={3: 2.6, 0: -9.0}), [1, 2]) == 3
    assert drawn_from(Penalties(logit_bias={2: -math.inf}), [1, 2]) == 0


def test_a_stop_is_not_drawn_before_its_time():
    logits = torch.tensor([[2.0, 5.0, 1.0]] * 3)
    wanted = Wanted((0,), 9, Sampling(greedy=True), stop_ids=frozenset({1}), min_tokens=2)
    rows = [Row(wanted, [0]), Row(wanted, [0, 2]), Row(wanted, [0, 2, 2])]
    assert [token.id for token in draw(logits, rows)] == [0, 0, 1]


def test_log_probabilities_are_those_before_every_change():
    logits = torch.tensor([[1.0, 2.0, 0.0, 2.0]])
    logs = logits.log_softmax(-1)[0].tolist()
    wanted = Wanted(
        (0,),
        9,
        Sampling(temperature=0.1, top_k=1),
        penalties=Penalties(logit_bias={2: 50.0}),
        logprobs=3,
    )
    other = Wanted((0,), 9, Sampling(greedy=True), logprobs=0)
    silent = Wanted((0,), 9, Sampling(greedy=True))
    drawn = draw(logits.repeat(3, 1), [Row(wanted, [0]), Row(other, [0]), Row(silent, [0])])
    # Of equals the smaller id comes first.
    assert drawn[0] == Token(2, logs[2], ((1, logs[1]), (3, logs[3]), (0, logs[0])))
    assert drawn[1:] == [Token(1, logs[1]), Token(1)]


def test_scores_of_given_tokens():
    logits = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    logs = logits.log_softmax(-1)
    tokens = torch.tensor([0, 2])
    assert token_scores(logits, tokens, 0).tolist() == [[logs[0, 0]], [logs[1, 2]]]
    assert token_scores(logits, tokens, 1).tolist() == [
        [logs[0, 0], 1.0, logs[0, 1]],
        [logs[1, 2], 0.0, logs[1, 0]],
    ]
    assert token_scores(logits, tokens, 9).tolist()[0] == [
        *(logs[0, 0], 1.0, 2.0, 0.0),
        *(logs[0, 1], logs[0, 2], logs[0, 0]),
    ]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7), Sampling(1.5, top_k=5, min_p=0.02)], ids=str)
def test_a_token_tells_what_it_was_drawn_from(sampling):
    """At the temperature, among what truncation leaves: training on it begins with a ratio of 1."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3)) * 8
    rows = [Row(Wanted((1,), 9, sampling, number, as_drawn=True), [1]) for number in range(4)]
    for row, token in zip(logits.double(), draw(logits, rows), strict=True):
        kept = probabilities(row[None], sampling)[0] > 0
        assert [one for one, _ in token.best] == (kept.nonzero()[:, 0].tolist() if sampling.truncates else [])
        among = (row / sampling.temperature).masked_fill(~kept, -torch.inf)
        assert token.logprob == pytest.approx(among.log_softmax(0)[token.id].item(), rel=2e-6, abs=2e-6)
        weights = [math.exp(x) for x in among.tolist()]
        shares = [weight / sum(weights) for weight in weights]
        by_hand = -sum(share * math.log(share) for share in shares if share)
        assert token.entropy == pytest.approx(by_hand, rel=1e-5, abs=1e-6)
