"""Rewards: losses against their formulas in float64, and law 1 on every axis."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from megazero.config.derive import padded_vocab_size
from megazero.config.preference.rewards import RewardConfig
from megazero.config.training_plan import training_plan_of
from megazero.models.classifier import SCORES
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.thread_group import ThreadWorld
from megazero.post_training.scores import PairCollate, RewardLoss, shares_of
from megazero.train.build import build_model
from megazero.train.parts.vocabulary import Vocabulary
from megazero.verify.compare import compare
from megazero.verify.record import Record, record_steps
from tests.layouts.layout import SEQUENCE, VOCABULARY, Layout

STEPS = 2
KINDS = {
    "centered": {"center_rewards_coefficient": 0.05},
    "per_token": {"reward_loss": "per_token"},
}
LAYOUTS = [
    Layout(tp=2, dp=2, zero=3, sequence_parallel=True, recompute="full"),
    Layout(cp=2, pp=2, schedule="zb-h1"),
    Layout(tp=2, cp=2, zero=2, sequence_parallel=True),
    Layout(dp=2, ep=2, experts="top2", shape="llama", micro_batch=2),
]


def pairs(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Random pairs with a common beginning; of every fifth, none counts."""
    lengths = rng.integers(5, SEQUENCE + 1, (count, 2))
    lengths[0, 0] = SEQUENCE
    answers = rng.integers(1, 5, count)[:, None].repeat(2, 1)
    tokens = rng.integers(0, VOCABULARY, (count, 2, SEQUENCE))
    common = np.arange(SEQUENCE) < answers[:, :1]
    tokens[:, 1] = np.where(common, tokens[:, 0], tokens[:, 1])
    tokens = np.where(np.arange(SEQUENCE) < lengths[..., None], tokens, 0)
    blank = np.arange(count) % 5 == 4
    lengths[blank], answers[blank], tokens[blank] = 1, 1, 0
    margins = rng.normal(size=count).astype(np.float32)
    return {"tokens": tokens, "lengths": lengths, "answers": answers, "margins": margins}


def config_of(layout: Layout, kind: str):
    config = layout.config(steps=STEPS + 3)
    model = config.model.model_copy(update={"num_classes": 1})
    return config.model_copy(update={"model": model, "reward": RewardConfig(**KINDS[kind])})


def record(config, context) -> Record:
    plan = training_plan_of(config, context.data.size)
    padded = padded_vocab_size(VOCABULARY, config.model, context.tp.size)
    vocabulary = Vocabulary(VOCABULARY, padded, None, None)
    engine = build_model(vocabulary, context, config, plan, RewardLoss(config.reward))
    collate = PairCollate.of(config, VOCABULARY, context, 3)
    size = config.batch.micro_batch_size

    def batches(step):
        total = step.batch_size
        arrays = pairs(np.random.default_rng(step.before.iteration), total)
        if collate.per_token:
            arrays["margins"] = np.zeros_like(arrays["margins"])
        starts = range(context.data.rank * size, total, context.data.size * size)
        rows = [slice(start, start + size) for start in starts]
        return [collate({k: v[r] for k, v in arrays.items()}, tuple(range(r.start, r.stop))) for r in rows]

    return record_steps(engine, plan, STEPS, batches)


@cache
def serial(layout: Layout, kind: str) -> Record:
    return record(config_of(layout, kind), solo_context())


def differences(layout: Layout, kind: str) -> list[str]:
    world, config = ThreadWorld(layout.world_size), config_of(layout, kind)
    records = world.run(lambda rank: record(config, thread_context(world, layout.grid, rank)))
    return [str(d) for d in compare(records, serial(layout.serial, kind)) if d.share > 1]


@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_layout_trains_rewards_like_one_process(number):
    bad = differences(LAYOUTS[number], list(KINDS)[number % 2])
    assert not bad, "\n".join(bad)


def test_tokens_that_count_are_those_from_the_first_difference_to_the_longer_end():
    tokens = np.array(
        [
            [[5, 6, 7, 8, 0, 0], [5, 6, 9, 0, 0, 0]],  # differ at 2, the longer one has 4
            [[5, 6, 0, 0, 0, 0], [5, 6, 7, 8, 9, 0]],  # one is the beginning of the other
            [[5, 6, 7, 7, 0, 0], [5, 4, 7, 7, 0, 0]],  # differ once: what follows counts too
            [[5, 0, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]],  # do not differ
        ]
    )
    lengths = np.array([[4, 3], [2, 5], [4, 4], [1, 1]])
    third = np.float32(1 / 3)
    assert shares_of(tokens, lengths).tolist() == [
        [0, 0, 0.5, 0.5, 0, 0],
        [0, 0, third, third, third, 0],
        [0, third, third, third, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]


def built(kind: str):
    """The chunk of one process, and a batch of five pairs, the last of which does not count."""
    config, context = config_of(Layout(shape="llama"), kind), solo_context()
    plan = training_plan_of(config, 1)
    vocabulary = Vocabulary(VOCABULARY, VOCABULARY, None, None)
    unpadded = config.model.model_copy(update={"make_vocab_size_divisible_by": 1})
    config = config.model_copy(update={"model": unpadded})
    engine = build_model(vocabulary, context, config, plan, RewardLoss(config.reward))
    (chunk,) = engine.executor.chunks.values()
    arrays = pairs(np.random.default_rng(1), 5)
    return chunk, PairCollate.of(config, VOCABULARY, context, None)(arrays, tuple(range(5))), arrays


def every_score(chunk, batch) -> torch.Tensor:
    """Scores of all tokens, float64 [n, 2, s], by another way through the same layers."""
    everything = torch.arange(batch.tokens.numel())
    with torch.no_grad():
        scores = chunk.student.head(chunk.student.hidden(batch.rows), replace(batch.rows, pooled=everything))
    return scores.double().view(batch.tokens.shape[1], -1, 2).permute(1, 2, 0)


def test_pairwise_terms_are_the_formulas_in_float64():
    chunk, batch, arrays = built("centered")
    with torch.no_grad():
        result = chunk.run(batch)
    scores, lengths = every_score(chunk, batch), torch.from_numpy(arrays["lengths"])
    last = scores.gather(2, (lengths - 1)[..., None])[..., 0]
    torch.testing.assert_close(result.outputs[SCORES].double(), last, rtol=0, atol=1e-6)
    chosen, rejected = last[:4].unbind(1)
    margins = torch.from_numpy(arrays["margins"][:4]).double()
    wanted = {
        "reward": -(1 / (1 + torch.exp(-(chosen - rejected - margins)))).log().sum(),
        "center": ((chosen + rejected) ** 2).sum(),
        "accuracy": (chosen > rejected).double().sum(),
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
    }
    assert {name: value.item() for name, value in result.terms.items()} == pytest.approx(
        {name: value.item() for name, value in wanted.items()}, abs=1e-6
    )
    assert batch.counts["pairs"] == 4.0
    assert [(t.name, t.coefficient, t.over) for t in chunk.terms] == [
        ("reward", 1.0, "pairs"),
        ("center", 0.05, "pairs"),
        ("accuracy", 0.0, "pairs"),
        ("reward_chosen", 0.0, "pairs"),
        ("reward_rejected", 0.0, "pairs"),
    ]


def test_per_token_terms_are_deepspeed_chat_s_in_float64():
    chunk, batch, arrays = built("per_token")
    with torch.no_grad():
        result = chunk.run(batch)
    scores, wanted = every_score(chunk, batch), 0.0
    for pair in range(4):
        rows, lengths = arrays["tokens"][pair], arrays["lengths"][pair]
        shorter = int(lengths.min())
        first = next((t for t in range(shorter) if rows[0, t] != rows[1, t]), shorter)
        difference = scores[pair, 0, first : lengths.max()] - scores[pair, 1, first : lengths.max()]
        wanted += -(1 / (1 + torch.exp(-difference))).log().mean().item()
    assert result.terms["reward"].item() == pytest.approx(wanted, abs=1e-6)
    last = scores.gather(2, (torch.from_numpy(arrays["lengths"]) - 1)[..., None])[..., 0]
    torch.testing.assert_close(result.outputs[SCORES].double(), last, rtol=0, atol=1e-6)


def test_the_end_of_a_row_is_its_length_whatever_the_tokens_are():
    """A padding id inside a text is no end, and what pads a row changes nothing."""
    chunk, batch, _ = built("centered")
    ends = batch.rows.pooled // len(batch.tokens)
    padded = torch.arange(batch.tokens.shape[1]) > ends[:, None]
    other = replace(batch, rows=replace(batch.rows, tokens=torch.where(padded, 7, batch.tokens)))
    assert padded.any()
    with torch.no_grad():
        assert torch.equal(chunk.run(batch).outputs[SCORES], chunk.run(other).outputs[SCORES])
