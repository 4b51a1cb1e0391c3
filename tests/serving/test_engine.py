"""An engine's texts are those of each request alone, whatever else arrives, leaves or is preempted."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from megazero.errors import ConfigError, DataError, NumericsError
from megazero.inference.invariant import make_invariant
from megazero.inference.sampling import Sampling
from megazero.inference.staged import StagedModel
from megazero.models.batch import Batch
from megazero.mpu.context import make_context, solo_context, thread_context, with_whole_sequences
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from megazero.serving.engine import Completed, Counters, Engine, EngineLimits, QueueFullError, complete
from megazero.serving.runner import paged
from megazero.serving.wanted import Ended, Penalties, PromptScores, Token, Wanted
from tests.inference import samples
from tests.inference.samples import VOCAB, build
from tests.inference.test_experts import build as build_experts
from tests.inference.test_generate import SPARSE as SHORT_SPARSE
from tests.layouts.layout import Layout
from tests.serving.samples import GREEDY, alone, ids, on_ranks, requests

LONG = {"seq_length": 48}
GPT2, LLAMA, HYBRID, SPARSE = (
    config.model_copy(update=LONG) for config in (samples.GPT2, samples.LLAMA, samples.HYBRID, SHORT_SPARSE)
)
FEW = EngineLimits(max_length=48, pages=5, page=16, tokens_per_step=12, max_running=5)
"""So few pages that sequences do not fit beside each other for long."""
DRAWN = Sampling(temperature=1.3, top_k=20, top_p=0.95, seed=5)


class Crowd:
    """Sends requests to an engine as steps go by, from its own loop, and listens."""

    def __init__(self, engine: Engine, wanted: list[Wanted], seed: int, leave: float = 0.0):
        self.engine, self.rng, self.leave = engine, random.Random(seed), leave
        self.left = list(enumerate(wanted))
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, Ended] = {}
        self.tickets: dict[int, int] = {}

    def arrive(self) -> None:
        """Submit none, one or several requests."""
        for _ in range(self.rng.choice([0, 0, 1, 3])):
            if self.left:
                number, wanted = self.left.pop(0)
                (self.tickets[number],) = self.engine.submit([wanted], [self.listener(number)])

    def listener(self, number: int):
        def listen(event) -> None:
            assert number not in self.ends, "an event after the end"
            if isinstance(event, Ended):
                self.ends[number] = event
            elif isinstance(event, Token):
                self.tokens[number].append(event.id)
                self.engine.check()
                if self.rng.random() < self.leave:
                    self.engine.cancel(self.tickets[number])
                if self.rng.random() < 0.5:
                    self.arrive()

        return listen

    def play(self) -> None:
        """Run until all have been answered."""

        def until() -> bool:
            self.arrive()
            return not self.left

        self.engine.run(until)


def idle(engine: Engine) -> None:
    """Nothing is held and nobody waits."""
    engine.check()
    now = engine.counters
    assert (now.running, now.waiting, now.pages_used) == (0, 0, 0)


@pytest.mark.parametrize(
    ("config", "sampling"),
    [
        (GPT2, DRAWN),
        (LLAMA, GREEDY),
        pytest.param(GPT2, GREEDY, marks=pytest.mark.slow),
        pytest.param(LLAMA, DRAWN, marks=pytest.mark.slow),
    ],
    ids=["gpt2-drawn", "llama-greedy", "gpt2-greedy", "llama-drawn"],
)
def test_texts_in_a_crowd_are_those_of_each_alone(config, sampling):
    model, wanted = build(config), requests(24, sampling=sampling)
    expected = alone(model, wanted)
    engine = Engine(StagedModel.whole(model), FEW)
    crowd = Crowd(engine, wanted, seed=1)
    crowd.play()
    assert [crowd.tokens[number] for number in range(24)] == expected
    assert {end.reason for end in crowd.ends.values()} == {"length"}
    assert engine.counters.preemptions > 0
    assert engine.counters.cached_tokens > 0
    assert engine.counters.generated_tokens == sum(map(len, expected))
    assert engine.counters.prompt_tokens == sum(len(one.prompt) for one in wanted)
    idle(engine)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_who_leaves_disturbs_nobody_and_what_it_leaves_behind_is_sound(seed):
    """Requests that reuse the pages of those who left half-way get the same texts, too."""
    model, wanted = build(LLAMA), requests(24)
    expected = alone(model, wanted)
    engine = Engine(StagedModel.whole(model), FEW)
    leaving = Crowd(engine, wanted, seed, leave=0.15)
    leaving.play()
    gone = [number for number, end in leaving.ends.items() if end.reason == "cancelled"]
    assert gone
    for number, text in enumerate(expected):
        told = leaving.tokens[number]
        assert told == (text[: len(told)] if number in gone else text)
    idle(engine)
    again = Crowd(engine, wanted, seed)
    again.play()
    assert [again.tokens[number] for number in range(24)] == expected
    idle(engine)


@pytest.mark.parametrize(
    "config", [HYBRID, pytest.param(SPARSE, marks=pytest.mark.slow)], ids=["hybrid", "sparse"]
)
def test_models_without_pages_answer_each_request_on_a_cache_of_its_own(config):
    model, wanted = build(config), requests(6, sampling=DRAWN)
    staged = StagedModel.whole(model)
    assert not paged(staged)
    answers = complete(staged, wanted, FEW)
    assert ids(answers) == alone(model, wanted)


def test_ranks_that_share_sequences():
    wanted = requests(4, sampling=DRAWN)
    expected = alone(build(LLAMA), wanted)
    world, grid = ThreadWorld(2), ProcessGrid(cp=2)

    def work(rank: int) -> list[Completed]:
        context = thread_context(world, grid, rank)
        model = build(LLAMA, with_whole_sequences(context))
        return complete(StagedModel({0: model}, (0,), SoloGroup("pp", 0), context.groups["cp"]), wanted, FEW)

    assert [ids(answers) for answers in world.run(work)] == [expected] * 2


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "pp": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_gives_every_rank_the_same_answers(sizes):
    wanted = requests(6, logprobs=2, prompt_logprobs=1)

    def work(model: StagedModel[Batch]) -> tuple[list[Completed], list[list[int]]]:
        return complete(model, wanted, FEW), alone(model, wanted)

    layout = Layout(layers=4, shape="llama", **sizes)
    ranks = on_ranks(layout, work)
    assert all(answers == ranks[0][0] for answers, _ in ranks)
    ((serial, expected),) = on_ranks(layout.serial, work)
    for answers in (ranks[0][0], serial):
        assert ids(answers) == expected
    for ours, theirs in zip(ranks[0][0], serial, strict=True):
        for one, other in zip(
            [*ours.tokens, *ours.prompt_scores.tokens[1:]],
            [*theirs.tokens, *theirs.prompt_scores.tokens[1:]],
            strict=True,
        ):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def _on_gloo(rank: int, world_size: int) -> list[list[int]]:
    from datetime import timedelta

    from megazero.mpu.torch_group import open_group

    def open_(name: str, ranks: tuple[int, ...]):
        return open_group(name, rank, ranks, timedelta(seconds=60))

    context = make_context(ProcessGrid(tp=world_size), rank, torch.device("cpu"), open_)
    model = StagedModel.whole(build(LLAMA, context))
    return ids(complete(model, requests(6, sampling=DRAWN), FEW))


@pytest.mark.gloo
def test_processes_give_the_texts_of_one(pool):
    assert pool.run(_on_gloo, 2) == [alone(build(LLAMA), requests(6, sampling=DRAWN))] * 2


def test_ranks_that_share_experts():
    wanted, limits = requests(6, length=24, sampling=DRAWN), replace(FEW, max_length=24)
    serial = ids(complete(StagedModel.whole(build_experts("softmax", solo_context())), wanted, limits))
    world, grid = ThreadWorld(2), ProcessGrid(tp=2, ep=2, etp=1)

    def work(rank: int) -> list[list[int]]:
        model = build_experts("softmax", thread_context(world, grid, rank))
        return ids(complete(StagedModel.whole(model), wanted, limits))

    assert world.run(work) == [serial] * 2


def test_a_prompt_is_scored_as_by_one_forward():
    model = build(LLAMA)
    prompt = tuple(range(3, 23))
    limits = EngineLimits(48, 6, 16, tokens_per_step=7, max_running=4)
    answers = complete(
        StagedModel.whole(model),
        [Wanted(prompt, 0, prompt_logprobs=3), Wanted(prompt, 2, GREEDY, prompt_logprobs=0), Wanted((5,), 0)],
        limits,
    )
    with torch.no_grad():
        logs = model(Batch(torch.tensor([prompt])))[:, 0, : VOCAB[0]].log_softmax(-1)
    for answer, best in zip(answers[:2], (3, 0), strict=True):
        scores = answer.prompt_scores.tokens
        assert scores[0] is None
        assert [score.id for score in scores[1:]] == list(prompt[1:])
        for at, score in enumerate(scores[1:]):
            assert score.logprob == pytest.approx(float(logs[at, prompt[at + 1]]), abs=1e-4)
            assert [i for i, _ in score.best] == logs[at].topk(best).indices.tolist()
    assert [(len(answer.tokens), answer.reason) for answer in answers] == [
        (0, "length"),
        (2, "length"),
        (0, "length"),
    ]
    assert answers[2].prompt_scores is None


def test_scores_are_told_once_though_the_request_is_preempted():
    model, wanted = build(GPT2), requests(16, prompt_logprobs=1)
    engine = Engine(StagedModel.whole(model), FEW)
    events: list[list] = [[] for _ in wanted]
    engine.submit(wanted, [mine.append for mine in events])
    engine.run()
    assert engine.counters.preemptions > 0
    for mine, one in zip(events, wanted, strict=True):
        assert [type(event) for event in mine] == [PromptScores, *[Token] * one.max_tokens, Ended]
        assert len(mine[0].tokens) == len(one.prompt)


def test_a_seed_draws_the_same_alone_and_in_a_crowd_and_numbers_differ():
    model = StagedModel.whole(build(GPT2))
    mine = [Wanted((5, 6), 12, Sampling(seed=3), number=number) for number in range(4)]
    crowd = ids(complete(model, [*mine, *requests(12, sampling=DRAWN)], FEW))[:4]
    assert [ids(complete(model, [one], FEW))[0] for one in mine] == crowd
    assert len({tuple(text) for text in crowd}) == 4


def test_with_batch_invariance_log_probabilities_are_equal_bit_for_bit():
    staged = StagedModel.whole(build(LLAMA))
    make_invariant(staged)
    mine = Wanted((5, 17, 3, 44, 8), 12, DRAWN, logprobs=2, prompt_logprobs=1)
    (lonely,) = complete(staged, [mine])
    crowd = complete(staged, [*requests(8, sampling=DRAWN), mine, *requests(4, seed=1)], FEW)
    assert crowd[8] == lonely


def test_a_stop_ends_a_request_and_is_its_last_token():
    model = build(GPT2)
    (free,) = alone(model, [Wanted((5, 17, 3), 12, DRAWN)])
    stop = free[4]
    first = free.index(stop)
    staged = StagedModel.whole(model)
    (answer,) = complete(staged, [Wanted((5, 17, 3), 12, DRAWN, stop_ids=frozenset({stop}))])
    assert (ids([answer])[0], answer.reason) == (free[: first + 1], "stop")
    late = Wanted((5, 17, 3), 12, DRAWN, stop_ids=frozenset({stop}), min_tokens=12)
    (answer,) = complete(staged, [late])
    assert (len(answer.tokens), answer.reason) == (12, "length")
    assert stop not in ids([answer])[0]


def test_padding_of_the_vocabulary_is_never_drawn():
    model = build(LLAMA)
    with torch.no_grad():
        model.head.weight[VOCAB[0] :] = 1e3 * model.head.weight[0]
    for sampling in (GREEDY, DRAWN):
        for answer in complete(StagedModel.whole(model), requests(6, sampling=sampling, logprobs=60)):
            for token in answer.tokens:
                assert token.id < VOCAB[0]
                assert sorted(i for i, _ in token.best) == list(range(VOCAB[0]))


def test_an_engine_waits_for_requests_and_stops_from_another_thread():
    engine = Engine(StagedModel.whole(build(GPT2)), FEW)
    thread = threading.Thread(target=engine.run, args=(lambda: False,))
    thread.start()
    done, events = threading.Event(), []

    def listen(event) -> None:
        events.append(event)
        if isinstance(event, Ended):
            done.set()

    engine.submit([Wanted((5,), 3, GREEDY)], [listen])
    assert done.wait(10)
    engine.cancel(0)  # it has ended
    engine.cancel(99)
    engine.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(event) for event in events] == [Token, Token, Token, Ended]
    idle(engine)


def test_what_runs_when_an_engine_stops_ends_as_cancelled():
    engine = Engine(StagedModel.whole(build(GPT2)), FEW)
    ends = []

    def listen(event) -> None:
        if isinstance(event, Ended):
            ends.append(event.reason)
        else:
            engine.stop()

    engine.submit([Wanted((5,), 20, GREEDY)] * 9, [listen] * 9)
    engine.run(lambda: False)
    assert ends == ["cancelled"] * 9
    idle(engine)
    with pytest.raises(QueueFullError, match="`engine` must be running"):
        engine.submit([Wanted((5,), 1)], [listen])


def test_followers_live_through_idle_times_and_end_with_the_first_rank(monkeypatch):
    monkeypatch.setattr("megazero.serving.engine._BEAT", 0.01)
    rounds = iter(range(8))

    def work(model: StagedModel[Batch]) -> float | None:
        engine = Engine(model, FEW)
        before = engine.answered
        engine.run(lambda: next(rounds, None) is None)
        return engine.answered - before

    assert all(later > 0 for later in on_ranks(Layout(layers=2, shape="llama", tp=2), work))


def test_an_error_ends_all_requests_with_its_message():
    staged = StagedModel.whole(build(GPT2))
    engine = Engine(staged, FEW)

    def broken(*_):
        raise RuntimeError("the device is lost")

    staged.run = broken
    ends = []
    engine.submit([Wanted((5,), 20, GREEDY)] * 9, [ends.append] * 9)
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.run()
    assert ends == [Ended("error", "the device is lost")] * 9
    idle(engine)


def test_logits_that_are_not_finite_end_the_request_alone():
    model = build(GPT2)
    with torch.no_grad():
        model.head.weight[7] = float("nan")  # tied: every logit of id 7 is bad
    engine, ends = Engine(StagedModel.whole(model), FEW), []
    engine.submit([Wanted((5,), 3, GREEDY)], [ends.append])
    engine.run()
    assert ends[0].reason == "error"
    assert ends[0].message.startswith("`logits` must be finite, but those at position 1 of the request")
    idle(engine)
    with pytest.raises(NumericsError, match="`logits` must be finite"):
        complete(StagedModel.whole(model), [Wanted((5,), 3, GREEDY)])


def test_what_can_never_run_is_refused_at_the_door():
    engine = Engine(StagedModel.whole(build(GPT2)), EngineLimits(48, 1, 16, max_waiting=2))
    ignored = [lambda event: None] * 3
    with pytest.raises(ConfigError, match=r"at most 16, the lesser of the context of 48 .* but is 9 \+ 8"):
        engine.submit([Wanted((1,) * 9, 8)], ignored[:1])
    with pytest.raises(DataError, match=r"`tokens` must lie in \[0, 53\), but .* range from 1 to 53"):
        engine.submit([Wanted((1, 53), 1)], ignored[:1])
    with pytest.raises(DataError, match="range from -1 to 1"):
        engine.submit([Wanted((1,), 1, penalties=Penalties(logit_bias={-1: 1.0}))], ignored[:1])
    with pytest.raises(QueueFullError, match="`waiting requests` must be at most 2, but would be 3"):
        engine.submit([Wanted((1,), 1)] * 3, ignored)
    assert engine.counters == Counters(pages=1)
    assert engine.submit([Wanted((1,), 1)] * 2, ignored[:2]) == [0, 1]


def test_bad_limits_and_requests_have_a_sentence():
    model = build(GPT2)
    with pytest.raises(
        ConfigError, match="`max_length` must be at most 48, the model's positions, but is 49"
    ):
        Engine(StagedModel.whole(model), EngineLimits(49))
    for bad, message in (
        ({"pages": 0}, "`pages` must be at least 1, but is 0"),
        ({"page": 20}, "`page` must be a multiple of 16, but is 20"),
        ({"max_running": 9, "tokens_per_step": 8}, r"`max_running` must be at most `tokens_per_step` \(8\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineLimits(**bad)
    with pytest.raises(ConfigError, match="`prompt` must have a token"):
        Wanted((), 1)
    with pytest.raises(ConfigError, match="`max_tokens` must be at least 0, but is -1"):
        Wanted((1,), -1)
    with pytest.raises(ConfigError, match="`repetition` must be positive, but is 0"):
        Penalties(repetition=0.0)


def test_limits_follow_from_the_model_and_memory():
    staged = StagedModel.whole(build(LLAMA))
    # Two layers of two groups of 8 channels, keys and values, float32.
    page = 32 * 2 * 2 * 2 * 8 * 4
    assert EngineLimits.of(staged, memory=10 * page) == EngineLimits(48, 10, 32)
    assert EngineLimits.of(staged, memory=1).pages == 2
    assert EngineLimits.of(staged).pages == 128


def test_nothing_wanted_is_nothing_told():
    assert complete(StagedModel.whole(build(GPT2)), []) == []
