"""Each key of a DeepSpeed JSON sets the tree, is read by the engine, has no effect or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megazero.config.deepspeed.extras import CheckpointExtras, Extras, Named, RankExtras
from megazero.config.deepspeed.read import read_deepspeed
from megazero.config.deepspeed.section import (
    AMOUNT,
    ANYTHING,
    BOOL,
    COUNT,
    COUNTS,
    INDICES,
    INTEGER,
    INTERVAL,
    NUMBER,
    OR_NEVER,
    PAIR,
    PLACE,
    SECTION,
    SIZE,
    TEXT,
    TEXTS,
    KeyRow,
)
from megazero.config.deepspeed.table import GROUPS, PYDANTIC, ROWS
from megazero.config.fields import FIELD_BY_PATH
from megazero.config.resolve import build_section
from megazero.config.tree.zero import ZeroConfig
from megazero.errors import ConfigError
from tests.config.deepspeed.data_efficiency_keys import EXAMPLES, LTD, SAMPLED
from tests.config.deepspeed.reading import read
from tests.config.deepspeed.sparse_keys import SPARSE_EXAMPLES
from tests.tables import over_table

# key -> its value, other keys that must stand beside it, and what the tree then holds (besides their effect)
HONOURED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "train_batch_size": (64, {}, {"batch.global_batch_size": 64, "batch.micro_batch_size": 16}),
    "train_micro_batch_size_per_gpu": (3, {}, {"batch.global_batch_size": 12, "batch.micro_batch_size": 3}),
    "gradient_accumulation_steps": (
        2,
        {"train_batch_size": 64},
        {"batch.global_batch_size": 64, "batch.micro_batch_size": 8},
    ),
    "optimizer.type": (
        "SGD",
        {},
        {"optimizer.optimizer": "sgd", "optimizer.weight_decay": 0.0, "optimizer.sgd_momentum": 0.0},
    ),
    "optimizer.params.lr": (1.5e-4, {"optimizer.type": "AdamW"}, {"optimizer.lr": 1.5e-4}),
    "optimizer.params.betas": (
        [0.8, 0.95],
        {"optimizer.type": "adam"},
        {"optimizer.adam_beta1": 0.8, "optimizer.adam_beta2": 0.95},
    ),
    "optimizer.params.eps": (1e-6, {"optimizer.type": "Adam"}, {"optimizer.adam_eps": 1e-6}),
    "optimizer.params.weight_decay": (0.1, {"optimizer.type": "Adam"}, {"optimizer.weight_decay": 0.1}),
    "optimizer.params.momentum": (0.5, {"optimizer.type": "SGD"}, {"optimizer.sgd_momentum": 0.5}),
    "optimizer.params.max_grad_norm": (2, {"optimizer.type": "Adam"}, {"optimizer.clip_grad": 2.0}),
    "optimizer.params.max_coeff": (0.3, {"optimizer.type": "Lamb"}, {"optimizer.lamb_max_coeff": 0.3}),
    "optimizer.params.min_coeff": (0.0, {"optimizer.type": "LAMB"}, {"optimizer.lamb_min_coeff": 0.0}),
    "optimizer.params.bias_correction": (
        False,
        {"optimizer.type": "FusedLamb"},
        {"optimizer.lamb_bias_correction": "none"},
    ),
    "optimizer.params.use_nvlamb": (
        False,
        {"optimizer.type": "Lamb"},
        {"optimizer.lamb_adapt_all": False},
    ),
    "optimizer.params.freeze_step": (
        400,
        {"optimizer.type": "OneBitAdam"},
        {"optimizer.onebit_freeze_step": 400},
    ),
    "optimizer.params.coeff_beta": (
        0.5,
        {"optimizer.type": "OneBitLamb"},
        {"optimizer.onebit_lamb_coeff_beta": 0.5},
    ),
    "optimizer.params.factor_max": (
        3.0,
        {"optimizer.type": "OneBitLamb"},
        {"optimizer.onebit_lamb_factor_max": 3.0},
    ),
    "optimizer.params.factor_min": (
        0.25,
        {"optimizer.type": "onebitlamb"},
        {"optimizer.onebit_lamb_factor_min": 0.25},
    ),
    "optimizer.params.factor_threshold": (
        0.2,
        {"optimizer.type": "OneBitLamb"},
        {"optimizer.onebit_lamb_factor_threshold": 0.2},
    ),
    "optimizer.params.var_freeze_step": (
        500,
        {"optimizer.type": "ZeroOneAdam"},
        {"optimizer.zero_one_var_freeze_step": 500},
    ),
    "optimizer.params.var_update_scaler": (
        8,
        {"optimizer.type": "ZeroOneAdam"},
        {"optimizer.zero_one_var_update_scaler": 8},
    ),
    "optimizer.params.local_step_scaler": (
        100,
        {"optimizer.type": "ZeroOneAdam"},
        {"optimizer.zero_one_local_step_scaler": 100},
    ),
    "optimizer.params.local_step_clipper": (
        4,
        {"optimizer.type": "ZeroOneAdam"},
        {"optimizer.zero_one_local_step_clipper": 4},
    ),
    "optimizer.params.rho": (0.8, {"optimizer.type": "Adadelta"}, {"optimizer.adadelta_rho": 0.8}),
    "optimizer.params.alpha": (0.9, {"optimizer.type": "RMSprop"}, {"optimizer.rmsprop_alpha": 0.9}),
    "optimizer.params.nesterov": (
        False,
        {"optimizer.type": "Muon"},
        {"optimizer.optimizer": "muon", "optimizer.muon_nesterov": False},
    ),
    "optimizer.params.muon_lr": (
        0.02,
        {"optimizer.type": "muon", "optimizer.params.lr": 1e-3},
        {"optimizer.lr": 0.02, "optimizer.muon_scalar_lr": 1e-3},
    ),
    "optimizer.params.adam_lr": (
        2e-3,
        {"optimizer.type": "Muon", "optimizer.params.lr": 1e-3},
        {"optimizer.lr": 1e-3, "optimizer.muon_scalar_lr": 2e-3},
    ),
    "gradient_clipping": (0.5, {}, {"optimizer.clip_grad": 0.5}),
    "fp16.enabled": (True, {}, {"precision.dtype": "fp16", "precision.initial_loss_scale": 65536.0}),
    "fp16.loss_scale": (4096, {"fp16.enabled": True}, {"precision.loss_scale": 4096.0}),
    "fp16.initial_scale_power": (11, {"fp16.enabled": True}, {"precision.initial_loss_scale": 2048.0}),
    "fp16.loss_scale_window": (500, {"fp16.enabled": True}, {"precision.loss_scale_window": 500}),
    "fp16.hysteresis": (3, {"fp16.enabled": True}, {"precision.hysteresis": 3}),
    "fp16.min_loss_scale": (2, {"fp16.enabled": True}, {"precision.min_loss_scale": 2.0}),
    "fp16.fp16_master_weights_and_grads": (
        True,
        {"fp16.enabled": True},
        {"zero.main_params_dtype": "fp16", "zero.grad_accumulation_dtype": "fp16"},
    ),
    "bf16.enabled": (True, {"fp16.enabled": False}, {"precision.dtype": "bf16"}),
    "bf16.bf16_master_weights_and_grads": (
        True,
        {"bf16.enabled": True},
        {"zero.main_params_dtype": "bf16", "zero.grad_accumulation_dtype": "bf16"},
    ),
    "data_types.grad_accum_dtype": ("float32", {}, {"zero.grad_accumulation_dtype": "fp32"}),
    "communication_data_type": ("bf16", {}, {"zero.grad_reduce_dtype": "bf16"}),
    "seed": (7, {}, {"training.seed": 7}),
    "zero_optimization.stage": (3, {}, {"zero.stage": 3}),
    "zero_optimization.reduce_bucket_size": (5e8, {}, {"zero.bucket_size": 500_000_000}),
    "zero_optimization.overlap_comm": (
        False,
        {},
        {"zero.overlap_grad_reduce": False, "zero.overlap_param_gather": False},
    ),
    "zero_optimization.stage3_prefetch_bucket_size": (0, {}, {"zero.prefetch_size": 0}),
    "zero_optimization.stage3_param_persistence_threshold": (
        10,
        {},
        {"zero.param_persistence_threshold": 10},
    ),
    "zero_optimization.stage3_max_live_parameters": (3e9, {}, {"zero.max_live_parameters": 3_000_000_000}),
    "zero_optimization.zero_quantized_weights": (True, {}, {"zero.quantized_weights": "int8"}),
    "zero_optimization.zero_quantized_gradients": (True, {}, {"zero.quantized_gradients": "int4"}),
    "zero_optimization.zero_hpz_partition_size": (8, {}, {"zero.hpz_partition_size": 8}),
    "zero_optimization.offload_optimizer.device": ("cpu", {}, {"offload.optimizer": "cpu"}),
    "zero_optimization.offload_optimizer.nvme_path": ("/local", {}, {"offload.path": "/local"}),
    "zero_optimization.offload_optimizer.ratio": (0.3, {}, {"offload.fraction": 0.3}),
    "zero_optimization.offload_optimizer.pin_memory": (False, {}, {"offload.pin_memory": False}),
    "zero_optimization.offload_param.device": ("nvme", {}, {"offload.parameters": "nvme"}),
    "zero_optimization.offload_param.nvme_path": ("/local", {}, {"offload.path": "/local"}),
    "zero_optimization.offload_param.pin_memory": (False, {}, {"offload.pin_memory": False}),
    "zero_optimization.cpu_offload": (True, {}, {"offload.optimizer": "cpu"}),
    "zero_optimization.cpu_offload_param": (True, {}, {"offload.parameters": "cpu"}),
    "zero_optimization.cpu_offload_params": (True, {}, {"offload.parameters": "cpu"}),
    "zero_optimization.cpu_offload_use_pin_memory": (False, {}, {"offload.pin_memory": False}),
    "aio.block_size": (1048576, {}, {"offload.block_size": 1048576}),
    "aio.queue_depth": (8, {}, {"offload.queue_depth": 8}),
    "activation_checkpointing.partition_activations": (True, {}, {"recompute.partition_activations": True}),
    "activation_checkpointing.cpu_checkpointing": (True, {}, {"recompute.offload": True}),
    "pipeline.activation_checkpoint_interval": (
        2,
        {},
        {"recompute.granularity": "full", "recompute.num_layers": 2},
    ),
    "wall_clock_breakdown": (True, {}, {"logging.wall_clock_breakdown": True}),
    "tensorboard.enabled": (True, {}, {"logging.tensorboard_dir": "DeepSpeedJobName"}),
    "tensorboard.output_path": (
        "runs",
        {"tensorboard.enabled": True},
        {"logging.tensorboard_dir": "runs/DeepSpeedJobName"},
    ),
    "tensorboard.job_name": ("gpt", {"tensorboard.enabled": True}, {"logging.tensorboard_dir": "gpt"}),
    "csv_monitor.enabled": (True, {}, {"logging.csv_dir": "DeepSpeedJobName"}),
    "csv_monitor.output_path": (
        "runs",
        {"csv_monitor.enabled": True, "csv_monitor.job_name": "gpt"},
        {"logging.csv_dir": "runs/gpt"},
    ),
    "csv_monitor.job_name": ("gpt", {"csv_monitor.enabled": True}, {"logging.csv_dir": "gpt"}),
    "wandb.enabled": (True, {}, {"logging.wandb_project": "deepspeed"}),
    "wandb.project": ("p", {"wandb.enabled": True}, {"logging.wandb_project": "p"}),
    "wandb.group": ("g", {"wandb.enabled": True}, {"logging.wandb_group": "g"}),
    "wandb.team": ("t", {"wandb.enabled": True}, {"logging.wandb_entity": "t"}),
    "comet.enabled": (True, {}, {"logging.comet_project": "general"}),
    "comet.project": ("p", {"comet.enabled": True}, {"logging.comet_project": "p"}),
    "comet.workspace": ("w", {"comet.enabled": True}, {"logging.comet_workspace": "w"}),
    "comet.experiment_name": ("n", {"comet.enabled": True}, {"logging.comet_experiment_name": "n"}),
    "comet.online": (False, {"comet.enabled": True}, {"logging.comet_offline_dir": "."}),
    "comms_logger.enabled": (True, {}, {"logging.comms_logger": True}),
    "comms_logger.verbose": (
        True,
        {"comms_logger.enabled": True},
        {"logging.comms_logger": True, "logging.comms_logger_verbose": True},
    ),
    "comms_logger.prof_ops": (
        ["all_reduce", "all_gather_into_tensor"],
        {"comms_logger.enabled": True, "comms_logger.prof_all": False},
        {"logging.comms_logger": True, "logging.comms_logger_ops": ("all_reduce", "all_gather")},
    ),
    "comms_logger.prof_all": (
        False,
        {"comms_logger.enabled": True, "comms_logger.prof_ops": ["all_to_all_single"]},
        {"logging.comms_logger": True, "logging.comms_logger_ops": ("all_to_all",)},
    ),
    "flops_profiler.enabled": (True, {}, {"profiling.flops_profiler": True}),
    **{
        f"flops_profiler.{key}": (
            value,
            {"flops_profiler.enabled": True},
            {"profiling.flops_profiler": True, f"profiling.flops_profiler_{field}": value},
        )
        for key, field, value in (
            ("profile_step", "step", 5),
            ("module_depth", "module_depth", 2),
            ("top_modules", "top_modules", 3),
            ("detailed", "detailed", False),
            ("output_file", "output_file", "flops.txt"),
            ("recompute_fwd_factor", "recompute_fwd_factor", 1.0),
        )
    },
}

HONOURED |= EXAMPLES | SPARSE_EXAMPLES

# key -> its value, other keys that must stand beside it, and what the engine then reads
EXTRA: dict[str, tuple[Any, dict[str, Any], Extras]] = {
    "steps_per_print": (100, {}, Extras(steps_per_print=100)),
    "dump_state": (True, {}, Extras(dump_state=True)),
    "dataloader_drop_last": (True, {}, Extras(dataloader_drop_last=True)),
    "fp16.auto_cast": (True, {"fp16.enabled": True}, Extras(auto_cast=True)),
    "prescale_gradients": (True, {}, Extras(prescale_gradients=True)),
    "fp16.consecutive_hysteresis": (True, {"fp16.enabled": True}, Extras(consecutive_hysteresis=True)),
    "managed_gradient_accumulation": (False, {}, Extras(managed_gradient_accumulation=False)),
    "seq_parallel_communication_data_type": (
        "bf16",
        {},
        Extras(ranks=RankExtras(seq_parallel_communication_data_type="bf16")),
    ),
    "sequence_parallel_size": (2, {}, Extras(ranks=RankExtras(sequence_parallel_size=2))),
    "data_parallel_size": (4, {}, Extras(ranks=RankExtras(data_parallel_size=4))),
    "gradient_predivide_factor": (2, {}, Extras(gradient_predivide_factor=2.0)),
    "zero_allow_untested_optimizer": (True, {}, Extras(zero_allow_untested_optimizer=True)),
    "zero_optimization.leaf_module": (
        {"names": ["experts"]},
        {},
        Extras(sections={"leaf_module": {"names": ["experts"]}}),
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        True,
        {},
        Extras(gather_16bit_weights_on_save=True),
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        True,
        {},
        Extras(gather_16bit_weights_on_save=True),
    ),
    "checkpoint.tag_validation": ("FAIL", {}, Extras(checkpoint=CheckpointExtras("fail"))),
    "checkpoint.use_node_local_storage": (
        True,
        {},
        Extras(checkpoint=CheckpointExtras(use_node_local_storage=True)),
    ),
    "data_efficiency.data_sampling.dynamic_batching": (
        {"enabled": True, "max_tokens": 9},
        {"data_efficiency.enabled": True, "data_efficiency.data_sampling.enabled": True},
        Extras(sections={"dynamic_batching": {"enabled": True, "max_tokens": 9}}),
    ),
    "torch_autocast": (
        {"enabled": True, "dtype": "bf16"},
        {},
        Extras(sections={"torch_autocast": {"enabled": True, "dtype": "bf16"}}),
    ),
    "hybrid_engine": ({"enabled": True}, {}, Extras(sections={"hybrid_engine": {"enabled": True}})),
    "tensor_parallel": ({"autotp_size": 2}, {}, Extras(sections={"tensor_parallel": {"autotp_size": 2}})),
    "scheduler.type": ("WarmupLR", {}, Extras(scheduler=Named("WarmupLR"))),
    "scheduler.params": (
        {"total_num_steps": 90, "warmup_min_lr": "auto", "warmup_num_steps": "auto", "warmup_type": None},
        {"scheduler.type": "WarmupDecayLR"},
        Extras(scheduler=Named("WarmupDecayLR", {"total_num_steps": 90, "warmup_num_steps": "auto"})),
    ),
}

# shape -> a value of it, and one of another type
SAMPLES: dict[Any, tuple[Any, Any]] = {
    BOOL: (True, 2),
    INTEGER: (3, 0.5),
    COUNT: (3, 0),
    INTERVAL: (3, 0),
    OR_NEVER: (3, 0),
    SIZE: (3, -1),
    NUMBER: (0.5, "half"),
    AMOUNT: (0.5, -1),
    PAIR: ([0.5, 0.5], [0.5]),
    COUNTS: ([8, 16], [8, 0]),
    INDICES: ([0, 16], [8, -1]),
    TEXT: ("text", 3),
    TEXTS: (["all_reduce"], [3]),
    PLACE: ("cpu", "gpu"),
    SECTION: ({"enabled": True, "device": "cpu", "deepcompile": True}, True),
}

# refused key -> values that ask for nothing, where they are no booleans and no `enabled` false
HARMLESS: dict[str, Any] = {
    "curriculum_learning.curriculum_type": "seqlen",
    f"{LTD}.random_ltd_schedule.schedule_type": "fixed_linear",
    "optimizer.params.dampening": 0,
    "optimizer.params.lr_decay": 0,
    "optimizer.params.initial_accumulator_value": 0,
    "optimizer.params.momentum_decay": 0.004,
    "gradient_allreduce_op": "Mean",
    "zero_optimization.mics_shard_size": -1,
    "optimizer.params.adam_w_mode": True,
    "optimizer.params.grad_averaging": True,
}


@pytest.mark.parametrize("name", ["nvme_path", "pin_memory"])
def test_what_optimizer_and_parameters_share_must_agree(name: str) -> None:
    values = {"nvme_path": ("/a", "/b"), "pin_memory": (True, False)}[name]
    mine, other = (f"zero_optimization.offload_{what}.{name}" for what in ("param", "optimizer"))
    assert not read({mine: values[0], other: values[0]}).problems
    (problem,) = read({mine: values[0], other: values[1]}).problems
    assert f"`{mine}` must be `{other}`, which is {values[1]!r}, but is {values[0]!r}" in problem


def test_no_device_is_none() -> None:
    found = read({"zero_optimization.offload_optimizer.device": None})
    assert (list(found.problems), found.values.get("offload.optimizer", "none")) == ([], "none")


def fate(row: KeyRow) -> str:
    if row.fields:
        return "honoured"
    if row.extra:
        return "extra"
    return "accepted" if row.accepted else "refused"


def of_fate(wanted: str) -> list[str]:
    return [key for key, row in ROWS.items() if fate(row) == wanted]


def test_every_row_has_an_example() -> None:
    assert sorted(HONOURED) == sorted(of_fate("honoured"))
    assert sorted(EXTRA) == sorted(of_fate("extra"))
    assert sum(map(len, GROUPS.values())) == len(ROWS)


@over_table("key", HONOURED)
def test_honoured(key: str) -> None:
    value, beside, expected = HONOURED[key]
    before, result = read(beside), read({**beside, key: value})
    assert [*result.problems, *result.script_problems, *result.ignored, *result.script_ignored] == []
    changed = result.values.items() - before.values.items()
    assert changed <= expected.items() <= result.values.items()
    assert set(ROWS[key].fields) & {path for path, _ in changed} or key == "gradient_accumulation_steps"
    if ROWS[key].convert is not None:
        assert any(f"`{key}`" in setting.source for setting in result.settings)


@over_table("key", EXTRA)
def test_read_by_the_engine_alone(key: str) -> None:
    value, beside, expected = EXTRA[key]
    result = read({**beside, key: value})
    assert result.problems == []
    assert result.extras == expected
    assert set(result.values) == set(read(beside).values)
    row = ROWS[key]
    assert any(key == each.key for each in result.script_ignored) == bool(row.accepted)
    assert bool(result.script_problems) == (key.startswith("scheduler.") or bool(row.script_refused))


@over_table("key", of_fate("accepted"))
def test_accepted_with_the_reason(key: str) -> None:
    value = "any" if ROWS[key].shape is ANYTHING else SAMPLES[ROWS[key].shape][0]
    value = "fp32" if key == "data_types.param_dtype" else value
    result = read({key: value})
    assert (result.problems, result.values, result.extras) == ([], {}, Extras())
    assert [(each.key, each.reason) for each in result.ignored] == [(key, ROWS[key].accepted)]


@over_table("key", of_fate("refused"))
def test_refused_unless_it_asks_for_nothing(key: str) -> None:
    row = ROWS[key]
    asked = False if HARMLESS.get(key) is True else SAMPLES[row.shape][0]
    on = SAMPLED if row.when else {}
    refusal = read({**on, key: asked})
    (problem,) = refusal.script_problems if key.startswith("optimizer.") else refusal.problems
    assert problem.startswith(f"the DeepSpeed configuration: `{key}` is not accepted")
    assert problem.endswith(f": {row.refused}.")
    if row.only:
        result = read({**on, key: HARMLESS.get(key, {"enabled": False} if row.shape is SECTION else False)})
        assert (result.problems, result.ignored, result.values) == ([], [], read(on).values)


@over_table("key", ROWS)
def test_values_of_another_type_are_told_what_was_expected(key: str) -> None:
    row = ROWS[key]
    if row.shape is ANYTHING:
        return
    result = read({key: "much" if key == "gradient_clipping" else SAMPLES[row.shape][1]})
    assert len(result.problems) == 1
    assert f"`{key}` must be {row.shape.says}" in result.problems[0]
    assert set(row.fields) <= result.broken
    assert read({key: None}).problems == []  # null leaves it out
    dropped = row.auto or key.partition(".")[0] in PYDANTIC
    text = row.shape is TEXT and not (row.only or (row.refused and not row.accepted))
    automatic = read({key: "auto"})
    assert len(automatic.problems + automatic.script_problems) == (0 if dropped or text else 1) + (
        key == "scheduler.type"
    )


@over_table("row", ROWS.values(), ids=lambda row: row.key)
def test_rows_are_sound(row: KeyRow) -> None:
    assert row.fields or row.extra or row.accepted or row.refused
    assert set(row.fields) <= set(FIELD_BY_PATH)
    assert row.when is None or row.when in ROWS
    assert (row.only is None) or row.refused
    for reason in (row.accepted, row.refused, row.script_refused):
        assert reason is None or (len(reason) > 10 and not reason.endswith("."))


def test_lamb_is_as_deepspeeds_fused_lamb_unless_the_json_says_otherwise() -> None:
    """It adapts every tensor, and corrects the learning rate; flags and YAML may still choose the paper's."""
    expected = {
        "optimizer.optimizer": "lamb",
        "optimizer.lamb_bias_correction": "rate",
        "optimizer.lamb_adapt_all": True,
        "optimizer.weight_decay": 0.0,
        "optimizer.sgd_momentum": 0.0,
    }
    read_lamb = read({"optimizer.type": "Lamb"})
    assert read_lamb.values == expected
    assert {s.spec.path for s in read_lamb.settings} == {"optimizer.optimizer"}
    assert read_lamb.extras == Extras(optimizer=Named("Lamb"))
    # DeepSpeedExamples' bing_bert.
    told = {"max_coeff": 0.3, "min_coeff": 0.01, "bias_correction": False, "weight_decay": 0.01, "lr": 11e-3}
    bing = read({"optimizer.type": "Lamb", **{f"optimizer.params.{name}": v for name, v in told.items()}})
    assert bing.problems == []
    assert bing.values == {
        **expected,
        "optimizer.lamb_bias_correction": "none",
        "optimizer.lamb_max_coeff": 0.3,
        "optimizer.lamb_min_coeff": 0.01,
        "optimizer.weight_decay": 0.01,
        "optimizer.lr": 11e-3,
    }


@over_table(
    ("kind", "told", "expected"),
    [
        ("Lion", {}, {"optimizer": "lion", "lion_beta1": 0.9, "lion_beta2": 0.999}),
        ("FusedLion", {"betas": [0.8, 0.9]}, {"optimizer": "lion", "lion_beta1": 0.8, "lion_beta2": 0.9}),
        ("Adagrad", {"eps": 1e-8}, {"optimizer": "adagrad", "adagrad_eps": 1e-8}),
        ("Adadelta", {"eps": 1e-5}, {"optimizer": "adadelta", "adadelta_eps": 1e-5}),
        ("RAdam", {"eps": 1e-5}, {"optimizer": "radam", "adam_eps": 1e-5}),
        ("NAdam", {"betas": [0.8, 0.9]}, {"optimizer": "nadam", "adam_beta1": 0.8, "adam_beta2": 0.9}),
        (
            "Muon",
            {"muon_lr": 0.02, "adam_lr": 3e-4, "momentum": 0.9},
            {
                "optimizer": "muon",
                "lr": 0.02,
                "muon_scalar_lr": 3e-4,
                "muon_momentum": 0.9,
                "muon_nesterov": True,
                "muon_coefficient_type": "simple",
                "muon_scale_mode": "shape_scaling",
            },
        ),
        ("Muon", {}, {"optimizer": "muon", "muon_momentum": 0.95, "muon_nesterov": True}),
    ],
)
def test_other_optimizers_are_those_of_deepspeed(kind: str, told: dict, expected: dict) -> None:
    result = read({"optimizer.type": kind, **{f"optimizer.params.{name}": v for name, v in told.items()}})
    assert result.problems == []
    assert {f"optimizer.{name}": v for name, v in expected.items()}.items() <= result.values.items()


def test_a_section_of_the_tree_is_built_from_the_settings() -> None:
    """What an engine without a command line does."""
    result = read({"zero_optimization.stage": 2, "gradient_clipping": 1})
    assert build_section("zero", result.settings) == ZeroConfig(stage=2)
    with pytest.raises(ConfigError, match=r"`zero.stage` must be 0, 1, 2 or 3, but is `7`"):
        build_section("zero", read({"zero_optimization.stage": 7}).settings)


def test_switches_that_are_off_leave_the_tree_alone() -> None:
    off = {"tensorboard.enabled": False, "wandb.enabled": False, "csv_monitor.enabled": False}
    beside = {
        "tensorboard.output_path": "x",
        "wandb.project": "p",
        "fp16.loss_scale": 9,
        "optimizer.params.lr": 1,
    }
    assert read({**off, **beside}).values == {}
    assert read({"fp16.enabled": False, "fp16.hysteresis": 9}).values == {"precision.dtype": "fp32"}


def test_the_loss_scale_zero_is_dynamic() -> None:
    assert read({"fp16.enabled": True, "fp16.loss_scale": 0}).values["precision.loss_scale"] is None


@over_table(
    ("values", "says"),
    [
        (
            {"fp16.enabled": True, "bf16.enabled": True},
            "`precision.dtype` must be set one way, but the DeepSpeed configuration: `fp16.enabled` says "
            "fp16 and the DeepSpeed configuration: `bf16.enabled` says bf16; keep one of these keys.",
        ),
        (
            {"gradient_clipping": 1, "optimizer.type": "Adam", "optimizer.params.max_grad_norm": 2},
            "`optimizer.clip_grad` must be set one way",
        ),
        (
            {"fp16.initial_scale_power": 2000},
            "not accepted as 2000: fp32 cannot hold a larger scale; choose 16.",
        ),
        ({"optimizer.type": "MuAdam"}, '`optimizer.type` is not accepted as "MuAdam"'),
        (
            {"optimizer.type": "OneBitAdam", "optimizer.params.var_freeze_step": 7},
            "`optimizer.params.var_freeze_step` must not be 7 with OneBitAdam; leave it out.",
        ),
        (
            {"optimizer.type": "OneBitLamb", "optimizer.params.factor_min": 5.0},
            "`optimizer.params.factor_min` must be at most `optimizer.params.factor_max`; lower it.",
        ),
        (
            {"optimizer.type": "AdamW", "optimizer.params.max_coeff": 0.3},
            "`optimizer.params.max_coeff` must not be 0.3 with AdamW; leave it out.",
        ),
        (
            {"optimizer.type": "Adam", "optimizer.params.bias_correction": False},
            "`optimizer.params.bias_correction` must not be false with Adam; leave it out.",
        ),
        (
            {"optimizer.type": "SGD", "optimizer.params.nesterov": True},
            "`optimizer.params.nesterov` must not be true with SGD; leave it out.",
        ),
        (
            {"optimizer.type": "RMSprop", "optimizer.params.momentum": 0.9},
            "`optimizer.params.momentum` must be 0 with RMSprop",
        ),
        (
            {"optimizer.type": "Lamb", "optimizer.params.max_coeff": 0.001},
            "`optimizer.params.min_coeff` must be at most `optimizer.params.max_coeff`; lower it.",
        ),
        (
            {"optimizer.type": "Lamb", "optimizer.params.max_coeff": 0},
            "`optimizer.params.max_coeff` is not accepted as 0: a trust ratio of 0 moves nothing; choose 10.",
        ),
        (
            {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
            "512 is not 4 x 1 x 4 = 16",
        ),
        ({"zero_optimization": 1}, "`zero_optimization` must be an object, but is 1."),
        ({"zero_optimisation": {}}, "unknown key `zero_optimisation`; did you mean `zero_optimization`?"),
        ({"fp16.hysterisis": 2}, "unknown key `fp16.hysterisis`; did you mean `fp16.hysteresis`?"),
        ({"stage": 3}, "unknown key `stage`; did you mean `zero_optimization.stage`?"),
        ({"profiling": {}, "elastic_checkpoint": True, "stage": 1}, "unknown key `stage`; did you mean"),
        (  # a name of older releases, which never went without `stage3_`
            {"zero_optimization.gather_fp16_weights_on_model_save": True},
            "unknown key `zero_optimization.gather_fp16_weights_on_model_save`; did you mean",
        ),
        ({"qwertyuiop": 3}, "unknown key `qwertyuiop`; docs/deepspeed_json.md lists the keys."),
    ],
)
def test_contradictory_and_unknown(values: dict[str, Any], says: str) -> None:
    result = read(values)
    (problem,) = [*result.problems, *result.script_problems]
    assert says in problem


def test_older_names() -> None:
    assert read({"bfloat16.enabled": True}).values == {"precision.dtype": "bf16"}
    assert read({"zero_optimization": True, "allgather_size": 5}).values == {"zero.stage": 1}
    assert read({"zero_optimization.prefetch_bucket_size": 7}).values == {"zero.prefetch_size": 7}
    named = read({"bf16.enabled": False, "bfloat16": {"enabled": True}})
    assert named.values == {"precision.dtype": "fp32"}  # as in DeepSpeed, `bf16` counts
    assert [ignored.key for ignored in named.ignored] == ["bfloat16"]
    both = {"zero_optimization.prefetch_bucket_size": 7, "zero_optimization.stage3_prefetch_bucket_size": 7}
    assert "must be given once, but is given as two names" in read(both).problems[0]


@over_table(("given", "clip"), [(True, 1.0), (False, 0.0), (-1, 0.0), (-0.5, 0.0), (2, 2.0)])
def test_clipping_by_a_switch_or_below_zero(given: Any, clip: float) -> None:
    """They were refused; DeepSpeed clips at 1, or not at all."""
    result = read({"gradient_clipping": given})
    assert result.values == {"optimizer.clip_grad": clip}
    assert not result.problems


def test_unknown_keys_that_deepspeed_leaves_alone() -> None:
    """One line names them for the engine, and each is a reason to refuse the file for a script of ours."""
    told = {
        "gradient_cliping": 1,
        "_comment": "x",
        "cuda_visible_devices": 0,
        "aio.made_up": 1,
        "zzz": {"a": 1},
    }
    result = read(told)
    assert result.problems == []
    assert result.strangers == (
        "unknown keys of the DeepSpeed configuration without effect: `gradient_cliping` (did you mean "
        "`gradient_clipping`?), `aio.made_up`, `zzz`.",
    )
    assert [line.split("`")[1] for line in result.script_problems] == [
        "gradient_cliping",
        "aio.made_up",
        "zzz",
    ]
    assert read({"_comment": "x", "//": "y"}).strangers == ()


def test_a_path_is_no_name() -> None:
    """trl writes such keys beside the section that it means; DeepSpeed does not read them."""
    path = "zero_optimization.reduce_bucket_size"
    result = read_deepspeed({"zero_optimization": {"stage": 3, "reduce_bucket_size": 500}, path: 256.0})
    assert result.problems == []
    assert result.values["zero.bucket_size"] == 500
    assert f"without effect: `{path}`" in result.strangers[0]
    assert [line.split("`")[1] for line in result.script_problems] == [path]


@over_table(
    ("given", "means"),
    [
        ({"overlap_comm": 1}, {"zero.overlap_grad_reduce": True, "zero.overlap_param_gather": True}),
        ({"overlap_comm": "False"}, {"zero.overlap_grad_reduce": False, "zero.overlap_param_gather": False}),
        ({"stage": "2"}, {"zero.stage": 2}),
        ({"stage": True}, {"zero.stage": 1}),
        ({"reduce_bucket_size": "500.0"}, {"zero.bucket_size": 500}),
        ({"offload_optimizer": "auto", "contiguous_gradients": "auto"}, {}),
    ],
)
def test_values_are_read_as_pydantic_reads_them(given: dict[str, Any], means: dict[str, Any]) -> None:
    result = read({"zero_optimization": given})
    assert (result.problems, result.values) == ([], means)


@over_table("value", ["5e8", 1.5, "1.5", "", "many"])
def test_no_integers_for_pydantic_either(value: object) -> None:
    assert (
        "must be an integer, at least 0" in read({"zero_optimization.reduce_bucket_size": value}).problems[0]
    )


@over_table(("value", "every"), [(None, 2**63 - 1), (float("inf"), 2**63 - 1), ("5", 5), (1e99, 2**63 - 1)])
def test_steps_per_print_may_be_never(value: object, every: int) -> None:
    assert read_deepspeed({"steps_per_print": value}).extras.steps_per_print == every


def test_the_arguments_of_an_optimizer_reach_its_class() -> None:
    told = {"lr": "1e-3", "betas": [0.8, 0.9], "lambd": 3, "eps": "auto", "alpha": None}
    result = read({"optimizer": {"type": "ASGD", "params": told}})
    assert result.problems == []
    assert result.extras.optimizer == Named("ASGD", {"lr": 1e-3, "betas": (0.8, 0.9), "lambd": 3})
    assert '`optimizer.type` is not accepted as "ASGD"' in result.script_problems[0]
    assert "unknown key `optimizer.params.lambd`" in result.script_problems[1]


def test_a_type_of_the_parameters_must_be_the_one_that_is_enabled() -> None:
    told = {"data_types.param_dtype": "bfloat16"}
    assert read({**told, "bf16.enabled": True}).problems == []
    assert (
        "`data_types.param_dtype` must be fp32, which is enabled, but is bfloat16" in read(told).problems[0]
    )


def test_without_a_number_of_ranks_the_triangle_stays_open() -> None:
    result = read({"train_batch_size": 64, "gradient_accumulation_steps": 2}, data_parallel=None)
    assert (result.values, result.batch, result.problems) == ({"batch.global_batch_size": 64}, None, [])


# What transformers' documentation shows: everything left to its command line.
EVERYTHING_AUTO = {
    "fp16.enabled": "auto",
    "bf16.enabled": "auto",
    "optimizer.type": "AdamW",
    "optimizer.params.lr": "auto",
    "optimizer.params.betas": "auto",
    "optimizer.params.eps": "auto",
    "optimizer.params.weight_decay": "auto",
    "scheduler.type": "WarmupDecayLR",
    "scheduler.params.warmup_min_lr": "auto",
    "scheduler.params.warmup_max_lr": "auto",
    "scheduler.params.warmup_num_steps": "auto",
    "scheduler.params.total_num_steps": "auto",
    "zero_optimization.stage": 3,
    "zero_optimization.reduce_bucket_size": "auto",
    "zero_optimization.stage3_prefetch_bucket_size": "auto",
    "zero_optimization.stage3_param_persistence_threshold": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def test_auto_is_left_to_what_is_given() -> None:
    result = read(EVERYTHING_AUTO)
    assert result.problems == []
    assert result.values == {"zero.stage": 3, "optimizer.optimizer": "adam", "optimizer.sgd_momentum": 0.0}
    assert result.batch is None
    assert result.extras == Extras(
        optimizer=Named("AdamW", {"lr": "auto"}),
        scheduler=Named("WarmupDecayLR", {"warmup_num_steps": "auto", "total_num_steps": "auto"}),
    )


def test_auto_follows_from_the_hidden_size_and_the_type() -> None:
    result = read(EVERYTHING_AUTO, given={"model.hidden_size": 100, "precision.dtype": "bf16"})
    assert {s.spec.path: s.value for s in result.defaults} == {
        "optimizer.sgd_momentum": 0.0,
        "precision.dtype": "bf16",
        "zero.bucket_size": 10_000,
        "zero.prefetch_size": 9_000,
        "zero.param_persistence_threshold": 1_000,
    }


# The keys of the 36 JSON documents of Megatron-DeepSpeed's examples.
MEGATRON_DEEPSPEED_KEYS = Path(__file__).with_name("keys.txt").read_text(encoding="utf-8").split()


def test_the_list_is_whole() -> None:
    assert len(set(MEGATRON_DEEPSPEED_KEYS)) == 102


@over_table("key", MEGATRON_DEEPSPEED_KEYS)
def test_no_key_of_megatron_deepspeed_is_merely_unknown(key: str) -> None:
    parts = key.split(".")
    assert any(".".join(parts[:depth]) in ROWS for depth in range(1, len(parts) + 1))
    assert not any("unknown" in problem for problem in read({key: None}).problems)
