"""Law 8: the scheduled values of a run that goes on are the unbroken run's, or the run is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from megazero.config.difficulties import Difficulties
from megazero.config.steps import BEGINNING, Progress
from megazero.config.training_plan import TrainingPlan, training_plan_of
from megazero.config.tree.config import Config
from megazero.errors import CheckpointError
from megazero.optim.schedule import UpdateSchedule
from megazero.train.resume.facts import RunFacts
from megazero.train.resume.scheduled import on_schedule
from megazero.train.step.state import TrainState
from tests.config.samples import make_config

pytestmark = pytest.mark.fast

DONE, LENGTH, LONG = 6, 12, 40
_COSINE = {"optimizer.lr_decay_style": "cosine", "optimizer.min_lr": 1e-5}
_METRIC = {"name": "rarity", "schedule_type": "fixed_linear", "min_difficulty": 10, "max_difficulty": 90}
SCHEDULES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "linear": {},
        "cosine": {**_COSINE, "optimizer.lr_warmup_iters": 2},
        "cosine of a given length": {**_COSINE, "optimizer.lr_decay_iters": LENGTH},
        "share of warmup": {**_COSINE, "optimizer.lr_warmup_fraction": 0.2},
        "constant": {"optimizer.lr_decay_style": "constant", "optimizer.lr_warmup_iters": 8},
        "WSD": {"optimizer.lr_decay_style": "WSD", "optimizer.lr_wsd_decay_iters": 4},
        "restarts": {"optimizer.lr_decay_style": "cosine-restarts", "optimizer.lr_cycle_iters": 5},
        "square root": {"optimizer.lr_decay_style": "inverse-square-root"},
        "samples": {**_COSINE, "training.train_iters": None, "training.train_samples": 4 * LENGTH},
        "tokens": {**_COSINE, "optimizer.lr_decay_tokens": 256 * LENGTH, "optimizer.lr_warmup_iters": 8},
        "share of tokens": {"optimizer.lr_decay_tokens": 128 * LENGTH, "optimizer.lr_warmup_fraction": 0.3},
        "decoupled": {"optimizer.decoupled_lr": 2e-3, "optimizer.lr_decay_iters": LENGTH},
        "muon": {"optimizer.optimizer": "muon", "optimizer.muon_scalar_lr": 1e-4, **_COSINE},
        "weight decay": {
            "optimizer.weight_decay_incr_style": "cosine",
            "optimizer.start_weight_decay": 0.01,
            "optimizer.end_weight_decay": 0.1,
            "optimizer.lr_decay_iters": LENGTH,
        },
        "batch ramp": {"batch.global_batch_size": 12, "batch.rampup_batch_size": (4, 4, 60)},
        "batch steps": {
            "batch.step_batch_size_schedule": ("0:4", "32:8"),
            "optimizer.lr_decay_iters": LENGTH,
        },
        "curriculum": {
            "curriculum.seqlen_schedule": "fixed_linear",
            "curriculum.seqlen_min_difficulty": 8,
            "curriculum.seqlen_total_curriculum_step": 10,
            "curriculum.seqlen_difficulty_step": 8,
        },
        "random-LTD": {
            "skipping.random_ltd": True,
            "skipping.random_ltd_min_value": 8,
            "skipping.random_ltd_require_steps": 10,
            "skipping.random_ltd_seq_per_step": 8,
        },
        "layer drop": {"skipping.progressive_layer_drop": True},
        "difficulties": {"data_sampling.curriculum_metrics": ({**_METRIC, "total_curriculum_step": 20},)},
        "distillation": {"distillation.kd": True, "distillation.kd_train_iters": 9},
    }
)
CHANGES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "nothing": {},
        "longer": {"training.train_iters": 2 * LENGTH},
        "more samples": {"training.train_samples": 8 * LENGTH, "training.train_iters": None},
        "longer with the same decay": {
            "training.train_iters": 2 * LENGTH,
            "optimizer.lr_decay_iters": LENGTH,
        },
        "lr": {"optimizer.lr": 1.1e-3},
        "floor": {"optimizer.min_lr": 2e-5},
        "style": {"optimizer.lr_decay_style": "cosine"},
        "warmup": {"optimizer.lr_warmup_iters": 5, "optimizer.lr_warmup_fraction": None},
        "cycles": {"optimizer.lr_cycle_mult": 2.0},
        "final decay": {"optimizer.lr_wsd_decay_iters": 3},
        "shape of the final decay": {"optimizer.lr_wsd_decay_style": "cosine"},
        "weight decay": {"optimizer.weight_decay": 0.2},
        "end of the weight decay": {"optimizer.end_weight_decay": 0.2},
        "Muon's other rate": {"optimizer.muon_scalar_lr": 2e-4},
        "decoupled rate": {"optimizer.decoupled_lr": 3e-3},
        "batch": {"batch.global_batch_size": 8},
        "ramp": {"batch.rampup_batch_size": (4, 4, 40)},
        "lengths": {"curriculum.seqlen_total_curriculum_step": 20},
        "kept tokens": {"skipping.random_ltd_require_steps": 20},
        "layers": {"skipping.pld_gamma": 0.1},
        "metric": {"data_sampling.curriculum_metrics": ({**_METRIC, "total_curriculum_step": 40},)},
        "teacher": {"distillation.kd_train_iters": 10},
    }
)


def facts(config: Config, plan: TrainingPlan, done: Progress, *, old: bool = False) -> RunFacts:
    """A checkpoint's facts; those of earlier versions do not have the derived lengths."""
    lengths = {} if old else {"lengths": asdict(plan.lr), "origin": asdict(plan.steps.began)}
    record = {
        "config": config.model_dump(mode="json"),
        "state": TrainState(done).record(),
        **dict.fromkeys(("scaler", "updates")),
        **{"stream_seed": 1, "global_batch_size": plan.steps.ramp.final, **lengths},
    }
    return RunFacts.model_validate_json(json.dumps(record))


def scheduled(config: Config, plan: TrainingPlan, places: Sequence[Progress], asked: bool) -> list[object]:
    """All that is scheduled for the step after each place; `asked` leaves out the batch size."""
    updates, drop, end = UpdateSchedule.of(config.optimizer, plan), config.skipping, LONG
    difficulties = Difficulties.of(config.data_sampling)
    if config.distillation.kd and config.distillation.kd_train_iters:
        end = config.distillation.kd_train_iters
    rows: list[object] = [drop.progressive_layer_drop and (drop.pld_theta, drop.pld_gamma)]
    for here in places:
        step = plan.at(here)
        rows += [updates.rates(here), updates.weight_decay.at(here), updates.scalar_peak]
        rows += [None if asked else step.batch_size, step.sequence_length, step.kept_tokens]
        rows += [here.iteration < end, difficulties and difficulties.at(here)]
    return rows


def walk(plan: TrainingPlan, start: Progress) -> Iterator[Progress]:
    while start.iteration < LONG:
        yield start
        start = plan.at(start).after


def same(one: tuple[Config, TrainingPlan], other: tuple[Config, TrainingPlan], start: Progress) -> bool:
    """Whether both have the same values from `start` on, but for a batch size that always is the same."""
    asked = all(len(plan.steps.ramp.sizes) == 1 for _, plan in (one, other))
    places = list(walk(one[1], start))
    return scheduled(*one, places, asked) == scheduled(*other, places, asked)


def resumed(
    schedule: str, change: Mapping[str, Any], *, old: bool = False, **flags: bool
) -> tuple[tuple[Config, TrainingPlan], tuple[Config, TrainingPlan], Progress, Any]:
    """The unbroken run, the changed one, where it goes on, and what it goes on with: an error if refused."""
    before, plan, run = stopped(schedule, old)
    done = plan.before(DONE)
    after = make_config(
        {**base(schedule), **change, **{f"checkpoint.{flag}": on for flag, on in flags.items()}}
    )
    ours = training_plan_of(after, 1, done)
    try:
        result: Any = on_schedule(after, ours, run, Path("run"))
    except CheckpointError as error:
        result = error
    return (before, plan), (after, ours), done, result


def base(schedule: str) -> dict[str, Any]:
    size = {} if schedule == "batch steps" else {"batch.global_batch_size": 4}
    return {"training.train_iters": LENGTH, **size, **SCHEDULES[schedule]}


@cache
def stopped(schedule: str, old: bool) -> tuple[Config, TrainingPlan, RunFacts]:
    """A run, and what its checkpoint says."""
    config = make_config(base(schedule))
    plan = training_plan_of(config, 1)
    return config, plan, facts(config, plan, plan.before(DONE), old=old)


def sound(schedule: str, change: str) -> bool:
    """Whether rules would let the change be made to this schedule."""
    ramps = {
        "ramp": "batch ramp",
        "lengths": "curriculum",
        "kept tokens": "random-LTD",
        "layers": "layer drop",
    }
    own = {"metric": "difficulties", "teacher": "distillation", "end of the weight decay": "weight decay"}
    needed = {**ramps, **own, "Muon's other rate": "muon", "cycles": "restarts"}.get(change)
    return needed in (None, schedule) and (change, schedule) != ("batch", "batch steps")


def test_what_is_scheduled_goes_on_or_is_refused_by_name() -> None:
    """A longer run once took another decay, and said that its length had changed."""
    gone_on = set()
    for schedule in SCHEDULES:
        for name, change in CHANGES.items():
            if not sound(schedule, name):
                continue
            unbroken, changed, done, result = resumed(schedule, change)
            where = f"{schedule}, {name}"
            if isinstance(result, CheckpointError):
                assert "--override-opt_param-scheduler" in str(result), where
                assert " -> " in str(result), where
                alike = changed[1].lr.unit == unbroken[1].lr.unit and same(changed, unbroken, BEGINNING)
                assert not alike, f"{where} is refused without a cause: {result}"
            else:
                assert same(result[:2], unbroken, done), f"{where} changes what is scheduled"
                gone_on.add((schedule, name))
    assert {name for name in SCHEDULES if (name, "nothing") in gone_on} == {*SCHEDULES}
    assert {name for name in SCHEDULES if (name, "longer") in gone_on} == {
        *("cosine of a given length", "constant", "tokens", "decoupled", "batch steps"),
    }
    assert ("linear", "longer with the same decay") in gone_on


def test_a_checkpoint_without_lengths_and_one_s_wish() -> None:
    """Earlier versions saved settings alone, from which lengths follow; either schedule can be asked for."""
    longer = CHANGES["longer"]
    for schedule in ("cosine", "weight decay", "decoupled"):
        *_, new = resumed(schedule, longer)
        *_, old = resumed(schedule, longer, old=True)
        assert str(old) == str(new) or old == new
        _, changed, done, taken = resumed(schedule, longer, override_opt_param_scheduler=True)
        assert same(taken[:2], changed, done)
        for old_too in (False, True):
            unbroken, _, done, kept = resumed(
                schedule, longer, old=old_too, use_checkpoint_opt_param_scheduler=True
            )
            assert same(kept[:2], unbroken, done)
            assert kept[1].end.iteration == 2 * LENGTH
            if schedule != "decoupled":
                assert "--use-checkpoint-opt_param-scheduler" in kept[2][0]


def test_a_schedule_that_began_in_the_middle_is_the_same_at_each_resume() -> None:
    """A warmup in iterations is counted from where its batch size began, not from the last resume."""
    settings = {"optimizer.lr_decay_tokens": 4096, "optimizer.lr_warmup_iters": 7}
    first, second = (make_config({**settings, "batch.global_batch_size": size}) for size in (4, 8))
    began = training_plan_of(first, 1).before(3)
    plan = training_plan_of(second, 1, began)
    run = facts(second, plan, plan.before(9))
    again = training_plan_of(second, 1, plan.before(9), run.origin)
    assert run.origin == again.steps.began == began
    assert again.lr == plan.lr != training_plan_of(second, 1, plan.before(9)).lr
    assert on_schedule(second, again, run, Path("run")) == (second, again, [])
    assert training_plan_of(first, 1, began, plan.before(9)).steps.began == began
