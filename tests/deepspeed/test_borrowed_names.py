"""Names that scripts and DeepSpeed's own tests import do what they say there, not only exist."""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tomllib
import torch
from torch import nn

from megazero.commands import as_deepspeed
from megazero.deepspeed.checkpoint.saved import Renamed
from megazero.deepspeed.comm import backend, collectives
from megazero.deepspeed.comm.log import CommsLogger
from megazero.deepspeed.config import elasticity
from megazero.deepspeed.config.user import DeepSpeedConfig
from megazero.deepspeed.engine import checkpoint
from megazero.deepspeed.legacy.variable_batch import batch_by_seqlens
from megazero.deepspeed.moe import gating
from megazero.deepspeed.moe.layer import EXPERTS, OLD_NAMES, MoE
from megazero.deepspeed.reports.monitor import (
    CometConfig,
    CometMonitor,
    CSVConfig,
    WandbConfig,
    WandbMonitor,
    csvMonitor,
)
from megazero.deepspeed.schedules.choose import (
    add_tuning_arguments,
    get_config_from_args,
    override_1cycle_params,
    override_lr_range_test_params,
)
from megazero.deepspeed.schedules.curriculum import CurriculumScheduler
from megazero.deepspeed.schedules.one_cycle import OneCycle
from megazero.deepspeed.schedules.warmup import WarmupCosineLR, WarmupLR
from megazero.deepspeed.surface import read_names
from megazero.errors import ConfigError
from megazero.mpu.context import solo_context
from tests.deepspeed.user_models import start
from tests.source_tree import ROOT

SECTION = {
    "enabled": True,
    "max_train_batch_size": 10000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "version": 0.1,
}
NODES = {**SECTION, "version": 0.2, "num_gpus_per_node": 8, "model_parallel_size": 4}


def elastic(section: dict, **options):
    return elasticity.compute_elastic_config({"elasticity": section}, "0.19.8", **options)


def test_a_line_of_a_table_has_several_names(tmp_path):
    (tmp_path / "x.csv").write_text(
        "modules,name,home,state,note\na b,pi e,math:,same,\n.,LR=lr KIND=Adam,,same,\n"
    )
    rows = {row.name: row for row in read_names(tmp_path)}
    assert [rows[name].value() for name in ("LR", "KIND")] == ["lr", "Adam"]
    assert rows["pi"].value() == pytest.approx(3.1415927)
    assert rows["e"].modules == ("a", "b")


def test_elastic_batches():
    batch, ranks = elastic(SECTION)
    assert (batch, len(ranks)) == (9792, 23)
    assert all(any(batch // n % micro == 0 for micro in SECTION["micro_batch_sizes"]) for n in ranks)
    assert elastic(SECTION, world_size=64)[2] == 17
    small = {**SECTION, "max_train_batch_size": 100, "micro_batch_sizes": [8, 10, 12], "min_gpus": 1}
    assert elastic(small)[0] <= 100
    for model, micro, expected in ((1, [4, 8], 4), (2, [4, 8], 8), (4, [8], 8)):
        held = {"max_train_batch_size": 64, "micro_batch_sizes": micro, "min_gpus": 16, "max_gpus": 16}
        batch, _, chosen = elastic({**NODES, **held, "model_parallel_size": model}, world_size=16)
        assert (chosen, batch // (16 // model) % chosen) == (expected, 0)
    # The greatest numbers below these with more divisors than any smaller one.
    assert [elasticity._most_divisible(n) for n in (1, 3, 100, 720720, 10**6)] == [1, 2, 60, 720720, 720720]


def test_what_an_elastic_section_may_not_say(monkeypatch):
    wrong = [{"version": "0.3"}, {"micro_batch_sizes": 5}, {"micro_batch_sizes": [2, 0.5]}, {"min_gpus": -1}]
    wrong += [{"model_parallel_size": 4}, {"max_train_batch_size": 4}, {"enabled": False}]
    for change in wrong:
        with pytest.raises(elasticity.ElasticityError, match="must"):
            elastic({**SECTION, **change})
    with pytest.raises(
        elasticity.ElasticityConfigError, match="`elasticity.micro_batch_sizes` must be given"
    ):
        elastic({"enabled": True, "max_train_batch_size": 8})
    with pytest.raises(elasticity.ElasticityError, match="`target_deepspeed_version` must be 0.3.8 or later"):
        elasticity.compute_elastic_config({"elasticity": SECTION}, "0.2")
    with pytest.raises(elasticity.ElasticityIncompatibleWorldSize, match="but gives 128"):
        elastic(SECTION, world_size=128)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(
        elasticity.ElasticityConfigError, match="`world_size` must be given for a micro-batch"
    ):
        elastic(SECTION, return_microbatch=True)
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert elastic(SECTION, return_microbatch=True)[2] == 17


def test_a_json_takes_its_batch_sizes_from_an_elastic_section(monkeypatch):
    section = {**SECTION, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3], "min_gpus": 1}
    read = DeepSpeedConfig({"elasticity": section})
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu) == (12, 3)
    assert read.gradient_accumulation_steps == 4
    with pytest.raises(elasticity.ElasticityConfigError, match="`train_batch_size` must be left out"):
        DeepSpeedConfig({"train_batch_size": 2, "elasticity": section})
    free = {**section, "ignore_non_elastic_batch_info": True}
    assert DeepSpeedConfig({"train_batch_size": 2, "elasticity": free}).train_batch_size == 12
    monkeypatch.setenv(elasticity.CHOSEN, '{"max_train_batch_size": 27}')
    with pytest.raises(
        elasticity.ElasticityConfigError, match="`elasticity.max_train_batch_size` must be what"
    ):
        DeepSpeedConfig({"elasticity": section})


def test_gates_send_tokens_to_places():
    logits = torch.tensor(
        [[0.11, 0.2, 0.1, 0.3], [0.3, 0.4, 0.11, 0.1], [0.11, 0.1, 0.6, 0.5], [0.1, 0.11, 0.7, 0.8]]
    )

    def places(mask: torch.Tensor) -> list[list[int]]:
        return mask.nonzero().tolist()

    _, weights, mask, counts = gating.topkgating(logits, 2, 1, 1)
    assert places(mask) == [[0, 1, 0], [1, 0, 0], [1, 1, 1], [2, 2, 0], [2, 3, 0], [3, 2, 1], [3, 3, 1]]
    assert counts.tolist() == [1, 2, 2, 3]
    torch.testing.assert_close(weights.sum((1, 2)), torch.ones(4))
    by_place = gating.topkgating(logits, 2, 1, 1, drop_policy="position")[2]
    assert places(by_place) == [[0, 1, 0], [0, 3, 0], [1, 0, 0], [1, 1, 1], [2, 2, 0], [2, 3, 1], [3, 2, 1]]
    one = gating.top1gating(logits, 4.0, 0, use_rts=False)
    assert (one[2].shape[-1], places(one[2])) == (4, [[0, 3, 0], [1, 1, 0], [2, 2, 0], [3, 3, 1]])
    torch.testing.assert_close(one[1].sum((1, 2)), logits.softmax(1).max(1).values)
    unused = gating.top1gating(logits, 1.0, 0, used_token=torch.tensor([1, 0, 1, 0]), use_rts=False)
    assert places(unused[2]) == [[0, 3, 0], [2, 2, 0]]
    two = gating.top2gating(logits, 1, 0, top2_2nd_expert_sampling=False)
    # First choices have the first places: token 3 is before token 0 at no expert but its second.
    assert places(two[2]) == [[0, 1, 1], [0, 3, 0], [1, 0, 0], [1, 1, 0], [2, 2, 0], [3, 2, 1], [3, 3, 1]]
    assert gating.top2gating(logits, 1, 0, drop_tokens=False, top2_2nd_expert_sampling=False)[2].sum() == 8
    even = gating.topkgating(torch.zeros(4, 2), 2, 1, 0)
    assert float(even[0]) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="`min_capacity` must be at most the number of tokens"):
        gating.top1gating(logits, 1, 5)


def test_a_curriculum_grows_in_multiples_and_never_begins_too_low():
    def scheduler(kind: str, low: int, high: int, **details) -> CurriculumScheduler:
        bounds = {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind}
        return CurriculumScheduler({**bounds, "schedule_config": details})

    line = scheduler("fixed_linear", 8, 1024, total_curriculum_step=100, difficulty_step=16)
    assert [line.get_difficulty(step) for step in (0, 50, 100, 200)] == [16, 512, 1024, 1024]
    root = scheduler("fixed_root", 8, 1024, total_curriculum_step=100, difficulty_step=8, root_degree=2)
    assert [root.update_difficulty(step) for step in (0, 25, 100)] == [8, 512, 1024]
    listed = scheduler("fixed_discrete", 1, 3, difficulty=[1, 2, 3], max_step=[5, 10])
    assert [listed.get_difficulty(step) for step in (5, 6, 10, 11)] == [1, 2, 2, 3]
    own = scheduler("custom", 1, 9)
    with pytest.raises(ConfigError, match="`schedule_type` must not be custom without a function"):
        own.get_difficulty(1)
    own.set_custom_get_difficulty(lambda step: 2 * step)
    assert own.update_difficulty(3) == own.get_current_difficulty() == 6
    with pytest.raises(ConfigError, match="must have total_curriculum_step, difficulty_step, but has not"):
        scheduler("fixed_linear", 1, 2)


class Told(nn.Module):
    """Keeps the keyword that the engine gives."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)

    def forward(self, x, curriculum_seqlen=None):
        self.told = curriculum_seqlen
        return self.layer(x).mean()


def engine_of(**config):
    told = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "train_batch_size": 1, **config}
    return start(solo_context(), Told(), told)


def test_a_script_decides_the_lengths_of_a_custom_curriculum():
    bounds = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 1, "max_difficulty": 9}
    engine = engine_of(curriculum_learning={**bounds, "schedule_type": "custom"})
    with pytest.raises(ConfigError, match="without a function"):
        engine(torch.ones(1, 2))
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 10 * step})
    engine(torch.ones(1, 2))
    assert engine.module.told == 10
    with pytest.raises(ConfigError, match="for the metric seqlen alone"):
        engine.set_custom_curriculum_learning_schedule({"rarity": len})
    with pytest.raises(ConfigError, match="must be custom for a schedule of the script"):
        engine_of().set_custom_curriculum_learning_schedule(lambda step: step)


def test_a_loss_scale_is_shown_and_gradients_of_the_script_count():
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}
    engine = engine_of(fp16=fp16)
    weight, scale = engine.module.layer.weight, engine.optimizer.loss_scale_config
    assert (scale.dynamic_loss_scale, scale.scale_window, scale.min_loss_scale) == (True, 2, 1)
    seen = []
    for value in (torch.inf, 1.0, 1.0, 1.0):
        weight.grad = torch.full_like(weight, value)
        engine.step()
        seen.append((scale.cur_scale, scale.cur_iter, scale.last_overflow_iter))
    assert seen == [(8.0, 1, 0), (8.0, 2, 0), (8.0, 3, 0), (16.0, 4, 0)]
    scale.cur_scale = 2.0
    assert engine.optimizer.cur_scale == 2.0
    plain = engine_of(gradient_clipping=0.0)
    before = plain.module.layer.weight.detach().clone()
    plain.module.layer.weight.grad = torch.ones(1, 2)
    plain.step()
    torch.testing.assert_close(plain.module.layer.weight.detach(), before - 0.5)


def test_old_names_of_experts_are_read(tmp_path, monkeypatch):
    def engine(seed: int):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), MoE(4, nn.Linear(4, 4), num_experts=2))
        return start(
            solo_context(),
            model,
            {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}},
        )

    def old(name: str) -> str:
        for before, now in OLD_NAMES.items():
            name = name.replace(now, before)
        return name

    first, second = engine(0), engine(1)
    weights = first.module_state_dict()
    assert f"1.{EXPERTS}.1.weight" in weights
    assert "1.deepspeed_moe.gate.wg.weight" in weights
    first.save_checkpoint(tmp_path)
    opened = checkpoint.open_saved

    def in_old_names(*args, **kwargs):
        saved = opened(*args, **kwargs)
        names = {key.name: old(key.name) for key in saved.source.shapes}
        assert "1.experts.1.weight" in names.values()
        renamed = replace(saved, source=Renamed(saved.source, names))
        object.__setattr__(renamed, "renamed", lambda model: saved)
        return renamed

    monkeypatch.setattr(checkpoint, "open_saved", in_old_names)
    second.load_checkpoint(tmp_path)
    torch.testing.assert_close(second.module_state_dict(), weights)
    third = engine(2)
    third.load_module_state_dict({"module": {old(name): value for name, value in weights.items()}})
    torch.testing.assert_close(third.module_state_dict(), weights)
    plain = nn.Sequential(nn.Linear(4, 4), MoE(4, nn.Linear(4, 4), num_experts=2))
    plain.load_state_dict({old(name): value for name, value in weights.items()})
    torch.testing.assert_close(dict(plain.state_dict()), dict(weights))
    assert plain[1].experts[1] is plain[1].experts["1"]


def test_monitors_and_schedules_have_the_attributes_of_their_settings(tmp_path):
    monitor = csvMonitor(CSVConfig(enabled=True, output_path=str(tmp_path), job_name="job"))
    assert (monitor.enabled, monitor.output_path, monitor.job_name) == (True, str(tmp_path), "job")
    wandb = WandbMonitor(WandbConfig(group="g", team="t"))
    assert (wandb.group, wandb.team, wandb.project) == ("g", "t", "deepspeed")
    assert not hasattr(wandb, "job_name")
    assert CometMonitor(CometConfig()).samples_log_interval == 100
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.warns(UserWarning, match="log is taken"):
        warmup = WarmupCosineLR(optimizer, 20, warmup_num_steps=10, warmup_type="other")
    assert (warmup.warmup_type, warmup.warmup_num_steps) == ("log", 10)
    with pytest.raises(ValueError, match="`warmup_num_steps` must be a positive integer, but is -5"):
        WarmupLR(optimizer, warmup_num_steps=-5)
    assert WarmupLR(optimizer, 0.1, 0.3, 5).delta_lrs == pytest.approx([0.2])
    with pytest.warns(UserWarning, match="does not cycle"):
        assert (
            OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=3, cycle_second_step_size=1).step_ratio
            == 0.75
        )


def test_flags_of_schedules_reach_their_arguments():
    parser = add_tuning_arguments(argparse.ArgumentParser())
    for words, on in (([], False), (["--cycle_momentum", "--lr_range_test_staircase"], True)):
        flags, cycle, ranges = parser.parse_args(["--lr_schedule", "OneCycle", *words]), {}, {}
        override_1cycle_params(flags, cycle)
        override_lr_range_test_params(flags, ranges)
        assert cycle["cycle_momentum"] is ranges["lr_range_test_staircase"] is on
        assert "cycle_second_step_size" not in cycle
        assert get_config_from_args(flags) == ({"type": "OneCycle", "params": cycle}, None)


def test_the_log_of_calls_gives_a_copy_and_a_backend_the_functions(monkeypatch):
    log = CommsLogger()
    log.comms_dict = {"all_reduce": {1024: [3, [3.0, 1.0, 2.0], [1.0] * 3, [2.0] * 3]}}
    raw = log.get_raw_data()
    raw["all_reduce"][1024][1].clear()
    assert log.get_operation_summary("all_reduce")[1024]["avg_latency_ms"] == 2.0
    calls = []
    monkeypatch.setattr(
        backend, "init_distributed", lambda *args, **kwargs: calls.append((args, kwargs["rank"]))
    )
    monkeypatch.setattr(backend.world, "get_world_size", lambda: 1)
    made = backend.TorchBackend("gloo", rank=0, world_size=1)
    assert calls == [(("gloo",), 0)]
    assert made.all_reduce is collectives.all_reduce
    assert made.single_gpu_mode
    with pytest.raises(AttributeError, match="'TorchBackend' object has no attribute 'sing'"):
        _ = made.sing


def test_every_sample_is_in_a_batch():
    for count, tokens in ((5, 100), (6, 10), (9, 20)):
        parts, _, _ = batch_by_seqlens([5] * count, tokens)
        assert sorted(number for _, ids in parts for number in ids) == list(range(count))


def test_deepspeed_and_ds_report_are_commands(monkeypatch, capsys):
    project = tomllib.loads((ROOT / "scripts/deepspeed_commands/pyproject.toml").read_text())["project"]
    assert {home.partition(":")[2] for home in project["scripts"].values()} == {"deepspeed", "ds_report"}
    assert {home.partition(":")[0] for home in project["scripts"].values()} == {as_deepspeed.__name__}
    script = str(ROOT / "examples_3d/deepspeed/gan.py")
    assert as_deepspeed.deepspeed(["--num_gpus", "2", "--dry_run", script, "--steps", "3"]) == 0
    assert capsys.readouterr().out.count("megazero.deepspeed") >= 1
    assert as_deepspeed.deepspeed(["--num_gpus", "2", "--dry_run", "--no_python", "hostname"]) == 0
    assert "megazero.deepspeed" not in capsys.readouterr().out
    asked = SimpleNamespace(words=None)
    monkeypatch.setattr(as_deepspeed.env, "main", lambda words: setattr(asked, "words", words) or 0)
    assert as_deepspeed.ds_report(["--hide_operator_status", "--json"]) == 0
    assert asked.words == ["--json"]
