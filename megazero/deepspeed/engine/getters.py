"""The engine's getters, one for each key of the JSON: ``engine.zero_reduce_bucket_size()`` and the like.

`ATTRIBUTES` has what is read without a call. They show what the script configured, which says nothing about
whether the key has an effect here; docs/deepspeed_json.md does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.data import IterableDataset

from megazero.config.deepspeed.sections.zero import Aio
from megazero.config.deepspeed.table import ROWS
from megazero.deepspeed.comm.world import process_group
from megazero.deepspeed.config.shown import DTYPES, autocast_dtype, optimizer_name, value_at
from megazero.deepspeed.moe.layer import MoE
from megazero.deepspeed.utils.modules import get_default_autocast_lower_precision_modules

_LEARNING = "data_efficiency.data_sampling.curriculum_learning"
_BESIDE: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "autotuning_enabled": ("autotuning.enabled", False),
        "autotuning_end_profile_step": ("autotuning.end_profile_step", 5),
        "autotuning_metric": ("autotuning.metric", "throughput"),
        "autotuning_start_profile_step": ("autotuning.start_profile_step", 3),
        "cpuadam_cores_perc": ("zero_optimization.offload_optimizer.cpuadam_cores_perc", 0.9),
        "curriculum_learning_config": (_LEARNING, {"enabled": False}),
        "data_efficiency_config": ("data_efficiency", {"enabled": False, "seed": 1234}),
        "data_sampling_config": (
            "data_efficiency.data_sampling",
            {"enabled": False, "num_epochs": 1000, "num_workers": 0, "pin_memory": False},
        ),
        "is_deepcompile_enabled": ("compile.deepcompile", False),
        "is_sanity_checks_enabled": ("enable_sanity_checks", False),
        "optimizer_params": ("optimizer.params", None),
        "pld_params": ("progressive_layer_drop", None),
        "random_ltd_config": ("data_efficiency.data_routing.random_ltd", {"enabled": False}),
        "torch_autocast_enabled": ("torch_autocast.enabled", False),
        "torch_autocast_lower_precision_safe_modules": (
            "torch_autocast.lower_precision_safe_modules",
            get_default_autocast_lower_precision_modules(),
        ),
        "zero_offload_optimizer": ("zero_optimization.offload_optimizer", None),
        "zero_offload_param": ("zero_optimization.offload_param", None),
    }
)
"""Getters of whole sections, and of keys that nothing here reads: path, and DeepSpeed's default."""


def _at(path: str, default: Any, engine: Any) -> Any:
    return value_at(engine.config, path, default)


def _device(section: str, engine: Any) -> str | None:
    place: str | None = value_at(engine.config, f"zero_optimization.{section}.device")
    return None if place == "none" else place


def _tags(engine: Any) -> str:
    return str(value_at(engine.config, "checkpoint.tag_validation", "Warn")).upper()


def _power(engine: Any) -> int:
    return 1 << int(value_at(engine.config, "fp16.initial_scale_power", 16))


def _kept(engine: Any) -> float | None:
    """The share of layers that the module is told to keep now; None without progressive layer dropping."""
    drop = engine.settings.layer_drop
    return None if drop is None else float(drop.kept(engine.global_steps))


def _model_dtype(engine: Any) -> torch.dtype:
    return DTYPES[engine.settings.precision.dtype]


def _data_types(engine: Any) -> tuple[torch.dtype, torch.dtype]:
    """The types of the weights and of the sums of gradients, as the JSON says them."""
    name = value_at(engine.config, "data_types.grad_accum_dtype")
    return _model_dtype(engine), _model_dtype(engine) if name is None else DTYPES[name]


def _sent_dtype(engine: Any) -> torch.dtype:
    """The type in which gradients travel, as the JSON says it."""
    name = value_at(engine.config, "communication_data_type")
    return _model_dtype(engine) if name is None else DTYPES[name]


def _experts(engine: Any) -> list[Any]:
    return [module for module in engine.module.modules() if isinstance(module, MoE)]


def _scale_arguments(engine: Any) -> dict[str, Any]:
    at = partial(value_at, engine.config)
    return {
        "init_scale": _power(engine),
        "scale_window": at("fp16.loss_scale_window", 1000),
        "delayed_shift": at("fp16.hysteresis", 2),
        "consecutive_hysteresis": at("fp16.consecutive_hysteresis", False),
        "min_scale": at("fp16.min_loss_scale", 1),
    }


GETTERS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        **{
            str(row.upstream.getter): partial(_at, row.key, row.upstream.default)
            for row in ROWS.values()
            if row.upstream.getter
        },
        **{name: partial(_at, path, default) for name, (path, default) in _BESIDE.items()},
        "aio_config": partial(_at, Aio.at, Aio.defaults()),
        "checkpoint_tag_validation_enabled": lambda engine: _tags(engine) != "IGNORE",
        "checkpoint_tag_validation_fail": lambda engine: _tags(engine) == "FAIL",
        "checkpoint_writer_enabled": lambda engine: value_at(engine.config, "checkpoint.writer") is not None,
        "dynamic_loss_scale": lambda engine: value_at(engine.config, "fp16.loss_scale", 0) == 0,
        "dynamic_loss_scale_args": _scale_arguments,
        "get_data_types": _data_types,
        "get_pld_theta": _kept,
        "initial_dynamic_scale": _power,
        "is_deepcompile_active": lambda engine: False,
        "is_first_weights_partition_group": lambda engine: engine.zero_optimization_stage() >= 3,
        "managed_gradient_accumulation": lambda engine: engine.settings.extras.managed_gradient_accumulation,
        "optimizer_name": lambda engine: optimizer_name(engine.config),
        "tensor_parallel_config": lambda engine: engine._config.tensor_parallel_config,
        "torch_autocast_dtype": lambda engine: autocast_dtype(engine.config),
        "postscale_gradients": lambda engine: not value_at(engine.config, "prescale_gradients", False),
        "zero_cpu_offload": lambda engine: _device("offload_optimizer", engine) == "cpu",
        "zero_nvme_offload_optimizer": lambda engine: _device("offload_optimizer", engine) == "nvme",
        "zero_optimization_partition_gradients": lambda engine: engine.zero_optimization_stage() >= 2,
        "zero_optimization_partition_weights": lambda engine: engine.zero_optimization_stage() >= 3,
        "zero_overlap_comm": lambda engine: value_at(
            engine.config, "zero_optimization.overlap_comm", engine.zero_optimization_stage() == 3
        ),
        "zero_use_cpu_optimizer": lambda engine: _device("offload_optimizer", engine) in ("cpu", "nvme"),
    }
)
"""Name -> what it answers of an engine."""

ATTRIBUTES: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "checkpoint_mp_rank": lambda engine: engine.context.tp.rank,
        "collate_fn": lambda engine: engine.given.collate_fn,
        "communication_data_type": _sent_dtype,
        "flops_profiler": lambda engine: engine._state.reporter.profiler,
        "gradient_average": lambda engine: value_at(engine.config, "gradient_allreduce_op", "mean") == "mean",
        "has_moe_layers": lambda engine: bool(_experts(engine)),
        "is_iterable_style_dataset": lambda engine: lambda data: isinstance(data, IterableDataset),
        "is_map_style_dataset": lambda engine: (
            lambda data: hasattr(data, "__getitem__") and hasattr(data, "__len__")
        ),
        "num_experts": lambda engine: [layer.num_experts for layer in _experts(engine)],
        "param_names": lambda engine: {param: name for name, param in engine.module.named_parameters()},
        "seq_data_parallel_group": lambda engine: process_group(engine.context.replica),
        "seq_parallel_group": lambda engine: engine.get_sequence_parallel_group(),
        "sequence_parallel_size": lambda engine: engine.context.groups["cp"].size,
        "training_data": lambda engine: engine.given.training_data,
    }
)
"""Name -> what an engine has under it, to read."""
