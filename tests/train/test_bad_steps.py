"""Runs whose numbers stop being finite: they end with an error, and what was saved before stays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.folder import saved_iterations
from megazero.config.resolve import parse_config
from megazero.config.steps import Progress, Step
from megazero.errors import NumericsError
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain, pretrain_on
from megazero.train.resume import keepers
from megazero.train.step.engine import Engine, Outcome
from megazero.train.step.state import TrainState

SMALL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1e-2 --mock-data "
    "--vocab-size 32 --micro-batch-size 1 --global-batch-size 2 --eval-iters 0 --log-interval 1 "
    "--train-iters 12 --save-interval 2 --keep-last 99"
)
EXPLODES = "--lr 1e30 --clip-grad 0 --lr-decay-style constant"  # the second step's gradients are not finite


def flags(folder: Path, extra: str = "") -> list[str]:
    return [*f"{SMALL} {extra}".split(), "--save", str(folder)]


def saved(folder: Path) -> list[int]:
    return sorted(saved_iterations(folder))


@pytest.mark.parametrize(("extra", "row"), [("", 5), ("--max-skipped-updates 3", 3)])
def test_a_row_of_bad_steps_ends_the_run(tmp_path, capsys, extra, row):
    with pytest.raises(
        NumericsError,
        match=rf"`max_skipped_updates` is reached: {row} updates in a row .* iteration {row + 1},",
    ):
        pretrain(parse_config(flags(tmp_path, f"{EXPLODES} {extra}")).config)
    assert saved(tmp_path) == [2]  # one bad step may be a chance; none is saved after the second
    assert capsys.readouterr().out.count("update skipped, a gradient is inf or NaN") == row
    assert NumericsError("").exit_code not in (0, 2)


def test_what_is_written_in_the_background_is_finished_first(tmp_path):
    with pytest.raises(NumericsError):
        pretrain(parse_config(flags(tmp_path, f"{EXPLODES} --async-save")).config)
    assert saved(tmp_path) == [2]


def bad_at(monkeypatch, iterations: set[int]) -> None:
    """Let these steps end as if a gradient had not been finite, though nothing else is changed."""
    whole, attempted, here = Engine.update, Engine.attempt, [0]

    def attempt(self, batches, progress, timers):
        here[0] = progress.iteration + 1
        return attempted(self, batches, progress, timers)

    def update(self, *args, **rest):
        result = whole(self, *args, **rest)
        return replace(result, outcome=Outcome.NOT_FINITE) if here[0] in iterations else result

    monkeypatch.setattr(Engine, "attempt", attempt)
    monkeypatch.setattr(Engine, "update", update)


def test_a_checkpoint_that_is_due_waits_for_the_end_of_the_row(tmp_path, monkeypatch):
    bad_at(monkeypatch, {3, 4, 5, 8})
    state = pretrain(parse_config(flags(tmp_path)).config)
    assert saved(tmp_path) == [2, 6, 8, 10, 12]
    assert (state.skipped, state.bad_in_a_row) == (4, 0)


def test_the_end_of_a_run_in_a_row_is_not_saved(tmp_path, monkeypatch, capsys):
    bad_at(monkeypatch, {11, 12})
    pretrain(parse_config(flags(tmp_path)).config)
    assert saved(tmp_path) == [2, 4, 6, 8, 10]
    assert "iteration 12 is not saved: 2 updates in a row were skipped" in capsys.readouterr().out


def test_a_resumed_run_counts_on(tmp_path, monkeypatch):
    bad_at(monkeypatch, set(range(2, 30)))
    argv = flags(tmp_path, "--train-iters 2 --lr-decay-iters 9 --max-skipped-updates 2")
    assert pretrain(parse_config(argv).config).bad_in_a_row == 1
    with pytest.raises(NumericsError, match="iteration 3,"):
        pretrain(parse_config([*argv, "--train-iters", "9", "--load", str(tmp_path)]).config)


def test_the_search_for_a_loss_scale_is_no_row_and_uses_up_no_warmup(tmp_path):
    """Halved from 2^40 at each overflow, it takes many more steps than five; the rate stood at its end once.

    A run that goes on in the middle of the search has the same rates.
    """
    extra = "--fp16 --initial-loss-scale 1099511627776 --hysteresis 1 --train-iters 30 --lr-warmup-iters 10"
    rates = []
    for step in ("", f"--load {tmp_path} --ckpt-step 4"):
        metrics = tmp_path / f"{len(rates)}.jsonl"
        argv = flags(tmp_path, f"{extra} {step} --metrics-jsonl {metrics}")
        state = pretrain(parse_config(argv).config)
        assert state.skipped == state.not_updated.iteration > 15
        assert saved(tmp_path)[0] == 2
        records = map(json.loads, metrics.read_text().splitlines())
        rates.append({line["iteration"]: (line["learning_rate"], line["skipped"]) for line in records})
    whole, resumed = rates
    assert {iteration: whole[iteration] for iteration in resumed} == resumed
    made = [rate for rate, skipped in whole.values() if not skipped]
    assert made[:3] == pytest.approx([0, 1e-3, 2e-3])
    assert {rate for rate, skipped in whole.values() if skipped} == {0}


@pytest.mark.parametrize("kind", ["weight", "exp_avg"])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, monkeypatch, kind):
    """On any rank: here the second of two, from the fourth step on."""
    honest, world = keepers.parts_to_write, ThreadWorld(2, timeout=60)

    def poisoned(optimizer, context, **rest):
        parts = honest(optimizer, context, **rest)
        if context.rank == 1 and optimizer.updates >= 4:
            next(part for part in parts if part.key.kind == kind).tensor.view(-1)[0] = torch.nan
        return parts

    monkeypatch.setattr(keepers, "parts_to_write", poisoned)
    config = parse_config(flags(tmp_path, "--zero-stage 1"), world_size=2).config

    def rank(number: int) -> Exception | None:
        try:
            pretrain_on(config, thread_context(world, ProcessGrid(dp=2), number))
        except NumericsError as error:
            return error

    for error in world.run(rank):
        assert "must be finite to be saved, but rank 1 holds inf or NaN after iteration 4;" in str(error)
        assert ("/exp_avg`" in str(error)) == (kind == "exp_avg")
    assert saved(tmp_path) == [2]


def test_steps_that_count_nothing_neither_end_a_row_nor_add_to_it():
    step = Step(Progress(), 2, 1, 8)
    state = TrainState().after(step, True, bad=True).after(step, True)
    assert (state.bad_in_a_row, state.skipped) == (1, 2)
    assert state.after(step, True, bad=True).bad_in_a_row == 2
    assert state.after(step, False).bad_in_a_row == 0


def test_schedules_of_updates_stand_while_samples_go_on():
    """Whatever the reason; what earlier versions skipped has moved them on, and still has."""
    outcomes = [True, False, True, True, False]
    for state in (TrainState(), TrainState(Progress(9, 36, 288), skipped=4)):
        before = state
        for skipped in outcomes:
            state = state.after(Step(state.progress, 2, 1, 8), skipped)
        assert state.progress - before.progress == Progress(5, 10, 80)
        assert state.updated - before.updated == Progress(2, 4, 32)
        assert state.skipped == before.skipped + 3
