"""`curriculum_learning` with a user's own module: it is told how many tokens to use, as by DeepSpeed."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from megazero.errors import ConfigError
from megazero.mpu.context import ParallelContext
from tests.deepspeed.user_models import ADAMW, LENGTH, Tied, batch, build, on_ranks, settings, start
from tests.tables import over_table

GROWS = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 1,
    "max_difficulty": 5,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 1},
}
LENGTHS = [2, 3, 4, 5, 5]


class Cut(nn.Module):
    """Uses as many tokens as it is told, like Megatron-DeepSpeed's GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Tied()
        self.told: list[int | None] = []

    def forward(self, tokens: Tensor, labels: Tensor, curriculum_seqlen: int | None = None) -> Tensor:
        self.told.append(curriculum_seqlen)
        return self.model(tokens[:, :curriculum_seqlen], labels[:, :curriculum_seqlen])


def train(engine, context: ParallelContext, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(2):
            loss = engine(*batch(step, micro, context.data.rank))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_module_is_told_the_length_of_each_step_in_training_alone(ranks):
    def work(context: ParallelContext):
        engine = start(context, build(Cut), settings(1, 2, optimizer=ADAMW, curriculum_learning=GROWS))
        train(engine, context, range(5))
        engine.eval()
        engine(*batch(0, 0, 0))
        return engine.module.told

    for told in on_ranks(ranks, work):
        assert told == [length for length in LENGTHS for _ in range(2)] + [None]


def test_the_training_is_that_of_a_script_which_cuts_its_batches():
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.calls = Tied(), 0

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            length = LENGTHS[self.calls // 2]
            self.calls += 1
            return self.model(tokens[:, :length], labels[:, :length])

    def work(model, **more):
        return lambda context: train(
            start(context, build(model), settings(0, 2, optimizer=ADAMW, **more)), context, range(5)
        )

    told, by_hand = on_ranks(1, work(Cut, curriculum_learning=GROWS)), on_ranks(1, work(ByHand))
    assert told == by_hand
    whole = on_ranks(1, work(Tied))
    assert whole != told
    assert whole[0][-1] != told[0][-1]


def test_a_resumed_engine_goes_on_at_its_length(tmp_path):
    def work(context: ParallelContext):
        told = []
        for _ in range(2):
            engine = start(context, build(Cut), settings(1, 2, optimizer=ADAMW, curriculum_learning=GROWS))
            engine.load_checkpoint(str(tmp_path))
            train(engine, context, range(engine.global_steps, engine.global_steps + 2))
            engine.save_checkpoint(str(tmp_path))
            told += engine.module.told
        return told

    assert on_ranks(1, work)[0] == [length for length in LENGTHS[:4] for _ in range(2)]


def test_levels_need_no_minimum():
    levels = {"difficulty": [2, LENGTH], "max_step": [1]}
    section = {"enabled": True, "schedule_type": "fixed_discrete", "schedule_config": levels}

    def work(context: ParallelContext):
        engine = start(context, build(Cut), settings(0, 2, optimizer=ADAMW, curriculum_learning=section))
        train(engine, context, range(2))
        return engine.module.told

    assert on_ranks(1, work)[0] == [2, 2, 5, 5]


@over_table(
    ("change", "said"),
    [
        ({"max_difficulty": None}, "must describe how lengths grow, but does not"),
        ({"min_difficulty": 6}, "must describe how lengths grow, but does not"),
        ({"schedule_type": "fixed_root"}, "with `root_degree` for fixed_root"),
    ],
)
def test_what_says_no_lengths_is_refused(change, said):
    section = {name: value for name, value in {**GROWS, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=said):
        on_ranks(
            1,
            lambda context: start(
                context, build(Cut), settings(0, 2, optimizer=ADAMW, curriculum_learning=section)
            ),
        )


def test_off_is_off():
    off = {**GROWS, "enabled": False}

    def work(context: ParallelContext):
        engine = start(context, build(Cut), settings(0, 2, optimizer=ADAMW, curriculum_learning=off))
        train(engine, context, range(1))
        return engine.module.told

    assert on_ranks(1, work)[0] == [None, None]
