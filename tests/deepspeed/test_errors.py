"""What `megazero.initialize` and its engine refuse, and what they warn of."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import megazero
from megazero.deepspeed.config.settings import read_settings
from megazero.deepspeed.optimizers.fused import FusedLamb
from megazero.errors import ConfigError, DataError, MegazeroError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.deepspeed.user_models import ADAMW, Tied, batch, build, settings, start
from tests.tables import over_table


def two_betas(model):
    groups = [
        {"params": [model.weight], "betas": (0.9, 0.99)},
        {"params": [model.bias], "betas": (0.8, 0.99)},
    ]
    return FusedLamb(groups, lr=1e-2)


def attempt(config=None, model=None, **arguments):
    model = model or nn.Linear(2, 1)
    arguments = {name: make(model) if callable(make) else make for name, make in arguments.items()}
    return megazero.initialize(model=model, config=config, mpu=solo_context(), **arguments)


BATCH = {"train_batch_size": 4}
TRAINED = {**BATCH, "optimizer": ADAMW}


@over_table(
    ("config", "words"),
    [
        ({**TRAINED, "fp16": {"enable": True}}, "unknown key `fp16.enable`; did you mean `fp16.enabled`"),
        (
            {**BATCH, "train_micro_batch_size_per_gpu": 3, "optimizer": ADAMW},
            "`train_batch_size` must be a multiple of 3",
        ),
        ({"optimizer": ADAMW}, "`train_batch_size` or `train_micro_batch_size_per_gpu` must be given"),
        ({"train_batch_size": "auto", "optimizer": ADAMW}, "`train_batch_size` or"),
        (
            {**BATCH, "optimizer": {"type": "MuAdam", "params": {"lr": 0.1}}},
            "`optimizer.type` must be Adam, AdamW",
        ),
        (
            {**BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "betas": [0.9, 0.99]}}},
            "`optimizer.params.betas` must not be given with SGD; leave it out",
        ),
        (
            {**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "amsgrad": True}}},
            "`amsgrad` must be false for FusedAdam",
        ),
        (
            {**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
            '`optimizer.params.lr` must be a number where a script builds the model, but is "auto"',
        ),
        (
            {
                **BATCH,
                "optimizer": ADAMW,
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            },
            "`scheduler.params.warmup_num_steps` must be a number",
        ),
        (
            {**TRAINED, "scheduler": {"type": "OneCycle", "params": {}}},
            "`scheduler.params.cycle_min_lr` must be given with OneCycle",
        ),
        ({**TRAINED, "scheduler": {"type": "Sawtooth"}}, "`scheduler.type` must be LRRangeTest, OneCycle"),
        ({**TRAINED, "zero_optimization": {"stage": 4}}, "stage"),
        (
            {**TRAINED, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
            "`hpz_partition_size` must divide|`zero_hpz_partition_size` must be the size",
        ),
        ("missing.json", "must name a readable file"),
    ],
)
def test_a_configuration_is_refused(config, words):
    with pytest.raises(ConfigError, match=words):
        attempt(config)


def test_every_problem_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        attempt({"zero_optimization": {"stage": 9, "zenflow": {}, "surprise": 1}, "unknown": 1})
    assert len(caught.value.violations) == 3


@over_table(
    ("arguments", "words"),
    [
        ({"optimizer": two_betas}, "`betas` must be the same in every parameter group of FusedLamb"),
        ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, "LBFGS fails there"),
        ({"optimizer": lambda m: torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)}, "2 of 2 are not"),
        ({"optimizer": lambda m: lambda params: None}, "gives a NoneType"),
        ({"optimizer": lambda m: "adam"}, "but is a str"),
        ({"lr_scheduler": lambda m: lambda optimizer: None}, "`lr_scheduler` must be a schedule"),
    ],
)
def test_an_argument_is_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        attempt(TRAINED, **arguments)


def test_the_model_is_refused_for_what_it_is():
    config = TRAINED
    with pytest.raises(ConfigError, match="`model` must be a torch.nn.Module, but is a NoneType"):
        megazero.initialize(config=config)
    with pytest.raises(ConfigError, match="`weight` must be fp32 where neither fp16 nor bf16 is enabled"):
        attempt(config, nn.Linear(2, 1).half())
    with pytest.raises(ConfigError, match="`` must have dense gradients"):
        attempt(config, nn.Embedding(2, 1, sparse=True))


def test_the_configuration_is_given_once(tmp_path):
    with pytest.raises(ConfigError, match="`config` must be given once, but is given 0 times"):
        attempt(None)
    with pytest.raises(ConfigError, match=r"2 times \(config, config_params\)"):
        attempt(BATCH, config_params=BATCH)


def test_pipeline_stages_are_refused():
    world = ThreadWorld(2)

    def work(rank: int) -> str:
        with pytest.raises(ConfigError) as caught:
            start(thread_context(world, ProcessGrid(pp=2), rank), nn.Linear(2, 1), TRAINED)
        return str(caught.value)

    assert all("`pipeline parallel size` must be 1" in message for message in world.run(work))


def test_keys_without_effect_are_named_in_one_warning(capsys):
    more = {
        "activation_checkpointing": {"partition_activations": True},
        "seed": 3,
        "aio": {"thread_count": 1},
    }
    attempt({**BATCH, "optimizer": ADAMW, **more})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert all(key in lines[0] for key in ("activation_checkpointing.partition_activations", "seed", "aio"))
    assert "requests are under way at a time" in lines[0]


def test_the_order_of_calls_is_kept():
    engine = start(solo_context(), build(Tied), settings(optimizer=ADAMW))
    with pytest.raises(MegazeroError, match="`step` must follow a backward"):
        engine.step()
    loss = engine(*batch(0, 0, 0))
    engine.backward(loss, retain_graph=True)
    with engine.no_sync(), pytest.raises(MegazeroError, match="outside of `no_sync`"):
        engine.step()
    engine.step()
    with pytest.raises(MegazeroError, match="`step` must follow a backward"):
        engine.optimizer.step()
    with pytest.raises(ConfigError, match="`closure` must not be given"):
        engine.optimizer.step(lambda: None)


@over_table(
    ("loss", "shown"),
    [
        (torch.ones(2, requires_grad=True), r"is of shape \(2,\), with gradients"),
        (torch.ones(()), r"is of shape \(\), without gradients"),
        (1.5, "is float"),
    ],
)
def test_a_loss_that_is_none(loss, shown):
    engine = start(solo_context(), build(Tied), settings(optimizer=ADAMW))
    with pytest.raises(MegazeroError, match=f"that requires gradients, but {shown}"):
        engine.backward(loss)


def test_the_same_graph_twice_is_torchs_error():
    engine = start(solo_context(), build(Tied), settings(optimizer=ADAMW))
    loss = engine(*batch(0, 0, 0))
    engine.backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        engine.backward(loss)


def test_an_evaluation_that_fails_leaves_the_model_in_training():
    engine = start(solo_context(), build(Tied), settings(0, 2, optimizer=ADAMW))
    with pytest.raises(DataError, match="ended after 1"):
        engine.eval_batch(iter([batch(0, 0, 0)]))
    assert engine.module.training


def test_an_iterator_that_ends_early():
    engine = start(solo_context(), build(Tied), settings(0, 2, optimizer=ADAMW))
    with pytest.raises(DataError, match="`data_iter` must give 2 micro-batches, but ended after 1"):
        engine.train_batch(iter([batch(0, 0, 0)]))
    with pytest.raises(DataError, match="`data_iter` must be given"):
        engine.train_batch()


def test_groups_that_come_to_differ_are_refused_at_the_step():
    model = build(Tied)
    optimizer = FusedLamb([{"params": [model.up.weight]}, {"params": [model.scale]}], lr=1e-2)
    with pytest.warns(UserWarning, match="frozen"):
        engine = start(solo_context(), model, settings(), optimizer=optimizer)
    engine.backward(engine(*batch(0, 0, 0)))
    engine.optimizer.param_groups[1]["betas"] = (0.5, 0.5)
    with pytest.raises(ConfigError, match="`betas` must be the same"):
        engine.step()


def test_a_file_is_read_as_its_content(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(TRAINED))
    engine, *_ = attempt(str(path))
    assert engine.train_batch_size() == 4


@pytest.mark.parametrize("name", ["seqlen_truncate", "rarity"])
def test_a_curriculum_is_left_to_the_training_scripts(name):
    """A user's script makes its own batches, so nothing here could draw or cut them."""
    on, schedule = {"enabled": True}, {"total_curriculum_step": 9}
    kind = "single_cluster" if name.startswith("seqlen") else "schedule_based"
    metric = {"schedule_type": "fixed_linear", "clustering_type": kind, "min_difficulty": 8}
    learning = {**on, "curriculum_metrics": {name: {**metric, "schedule_config": schedule}}}
    section = {**on, "data_sampling": {**on, "curriculum_learning": learning}}
    config = {"train_micro_batch_size_per_gpu": 1, "data_efficiency": section}
    with pytest.raises(
        ConfigError, match="`data_efficiency.data_sampling.curriculum_learning` must be off for a script"
    ):
        read_settings(config, 1, nn.Linear(1, 1))
