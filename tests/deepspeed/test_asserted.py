"""What DeepSpeed asserts, and what its sections refuse: scripts catch `AssertionError` and `ValueError`."""

from __future__ import annotations

import pytest
import torch
from pydantic import Field, ValidationError
from torch import nn

import megazero
from megazero.deepspeed.config.models import (
    DeepSpeedConfigModel,
    DeepSpeedFP16Config,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    get_bfloat16_config,
    get_config_default,
)
from megazero.deepspeed.config.user import DeepSpeedConfig, zero_config
from megazero.deepspeed.zero.leaf_modules import set_z3_leaf_modules
from megazero.errors import CheckpointError, ConfigError, MegazeroError
from megazero.mpu.context import solo_context
from tests.tables import over_table

ADAM = {"type": "Adam", "params": {"lr": 0.1}}
TRAINED = {"train_batch_size": 1, "optimizer": ADAM}


def engine():
    model = nn.Linear(2, 1)
    return megazero.initialize(model=model, config=TRAINED, mpu=solo_context())[0]


def schedule_of_another():
    model = nn.Linear(2, 1)
    other = torch.optim.lr_scheduler.LambdaLR(torch.optim.Adam(model.parameters()), lambda step: 1.0)
    megazero.initialize(model=model, config=TRAINED, mpu=solo_context(), lr_scheduler=other)


def test_a_schedule_of_another_optimizer_is_warned_about():
    with pytest.warns(UserWarning, match="`lr_scheduler` should be of the optimizer that the engine uses"):
        schedule_of_another()


@over_table(
    ("call", "kind", "words"),
    [
        (lambda: megazero.initialize(config=TRAINED), ConfigError, "`model` must be a torch.nn.Module"),
        (lambda: DeepSpeedConfig({"train_batch_size": 3, **sizes(2, 2)}), ConfigError, "must be"),
        (lambda: zero_config(reduce_bucket_size=0), ConfigError, "reduce_bucket_size"),
        (lambda: set_z3_leaf_modules(nn.Linear(1, 1), [nn.Conv2d]), ConfigError, "`leaf_module_classes`"),
        (lambda: engine().step(), MegazeroError, "`step` must follow a backward"),
        (lambda: engine().save_checkpoint(""), CheckpointError, "`save_dir` must be the path of a folder"),
    ],
    ids=["no model", "batch", "section", "leaves", "step", "folder"],
)
def test_refusals_are_what_deepspeed_raises(call, kind, words):
    with pytest.raises(AssertionError, match=words) as refusal:
        call()
    assert isinstance(refusal.value, kind)
    assert isinstance(refusal.value, ValueError) == (kind is ConfigError)


def sizes(micro, steps):
    return {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}


@over_table(
    ("given", "expected"),
    [((8, 2, None), (8, 2, 4)), ((None, 2, 3), (6, 2, 3)), ((8, None, None), (8, 8, 1)), ((9, 2, 2), None)],
)
def test_batch_sizes_that_a_script_sets_are_completed_anew(given, expected):
    config = DeepSpeedConfig({"train_batch_size": 1})
    names = ("train_batch_size", *sizes(1, 1))
    vars(config).update(zip(names, given, strict=True))
    if expected is None:
        with pytest.raises(AssertionError):
            config._configure_train_batch_size()
    else:
        config._configure_train_batch_size()
        assert tuple(getattr(config, name) for name in names) == expected


def listed(word):
    return [word]


class Section(DeepSpeedConfigModel):
    count: int = 0
    word: str | None = Field(
        None, json_schema_extra={"deprecated": True, "new_param": "words", "new_param_fn": listed}
    )
    words: list[str] | None = None
    named: int = Field(0, alias="alias")


def test_sections_of_scripts():
    assert Section(count=3).count == 3
    assert Section(count="auto").count == get_config_default(Section, "count") == 0
    assert Section(word="a").words == ["a"]
    assert Section(named=1).named == Section(alias=1).named == 1
    assert DeepSpeedFP16Config(loss_scale=128).loss_scale == 128
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline
    assert not DeepSpeedZeroOffloadOptimizerConfig(ratio=0.3).pipeline
    assert isinstance(zero_config(cpu_offload=True).offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert isinstance(zero_config(cpu_offload_param=True).offload_param, DeepSpeedZeroOffloadParamConfig)
    assert zero_config(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save


@over_table(
    ("make", "error"),
    [
        (lambda: Section(count="a"), ValidationError),
        (lambda: Section(typo=1), ValidationError),
        (lambda: Section(word="a", words=["b"]), AssertionError),
        (lambda: get_config_default(Section, "typo"), AssertionError),
        (lambda: DeepSpeedFP16Config(loss_scale=float("inf")), ValidationError),
        (lambda: DeepSpeedFP16Config(loss_scale=-1), ValidationError),
    ],
)
def test_sections_refuse(make, error):
    with pytest.raises(error):
        make()


def test_a_throughput_timer_counts_after_its_warm_up():
    timer = engine().tput_timer
    timer.stop()
    assert (timer.initialized, timer.started, timer.micro_step_count, timer.batch_size) == (
        False,
        False,
        0,
        1,
    )
    for step in range(4):
        timer.start()
        assert (timer.initialized, timer.started) == (True, True)
        assert bool(timer.start_time) == (step >= timer.start_step)
        timer.stop(global_step=True)
    assert timer.micro_step_count == timer.global_step_count == 4
    assert 0 < timer.end_time - timer.start_time <= timer.total_elapsed_time
    assert timer.avg_samples_per_sec() > 0
