"""Getters of an engine, such as ``engine.zero_reduce_bucket_size()``: one for each key of the JSON.

They return the configured value, whether or not the key has an effect here (docs/deepspeed_json.md says).
`ATTRIBUTES` are read without a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.data import IterableDataset

from megazero.config.deepspeed.sections.zero import Aio
from megazero.config.deepspeed.table import ROWS
from megazero.deepspeed.comm.world import process_group
from megazero.deepspeed.config.shown import DTYPES, autocast_dtype, optimizer_name, value_at
from megazero.deepspeed.engine.queries import Queries
from megazero.deepspeed.engine.state import EngineState
from megazero.deepspeed.moe.layer import MoE
from megazero.deepspeed.utils.modules import get_default_autocast_lower_precision_modules

_LEARNING = "data_efficiency.data_sampling.curriculum_learning"
_FURTHER: Mapping[str, tuple[str, object]] = MappingProxyType(
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
"""Getters of whole sections and of keys that are never read here -> (path, DeepSpeed's default)."""


def _value(state: EngineState, path: str, default: object = None) -> Any:
    return value_at(state.arguments.config, path, default)


def _getter(path: str, default: object) -> Callable[[EngineState], object]:
    return lambda state: _value(state, path, default)


def _device(section: str, state: EngineState) -> str | None:
    place: str | None = _value(state, f"zero_optimization.{section}.device")
    return None if place == "none" else place


def _tags(state: EngineState) -> str:
    return str(_value(state, "checkpoint.tag_validation", "Warn")).upper()


def _initial_scale(state: EngineState) -> int:
    return 1 << int(_value(state, "fp16.initial_scale_power", 16))


def _layer_keep_share(state: EngineState) -> float | None:
    """The share of layers to keep at this step; None without progressive layer dropping."""
    drop = state.settings.layer_drop
    return None if drop is None else float(drop.kept(state.global_steps))


def _model_dtype(state: EngineState) -> torch.dtype:
    return DTYPES[state.settings.precision.dtype]


def _data_types(state: EngineState) -> tuple[torch.dtype, torch.dtype]:
    """The configured types of the weights and of the gradient sums."""
    name = _value(state, "data_types.grad_accum_dtype")
    return _model_dtype(state), _model_dtype(state) if name is None else DTYPES[name]


def _communication_dtype(state: EngineState) -> torch.dtype:
    """The configured type of gradients in communication."""
    name = _value(state, "communication_data_type")
    return _model_dtype(state) if name is None else DTYPES[name]


def _moe_layers(state: EngineState) -> list[MoE]:
    return [module for module in state.module.modules() if isinstance(module, MoE)]


def _scale_arguments(state: EngineState) -> dict[str, object]:
    return {
        "init_scale": _initial_scale(state),
        "scale_window": _value(state, "fp16.loss_scale_window", 1000),
        "delayed_shift": _value(state, "fp16.hysteresis", 2),
        "consecutive_hysteresis": _value(state, "fp16.consecutive_hysteresis", False),
        "min_scale": _value(state, "fp16.min_loss_scale", 1),
    }


GETTERS: Mapping[str, Callable[[EngineState], object]] = MappingProxyType(
    {
        **{
            str(row.upstream.getter): _getter(row.key, row.upstream.default)
            for row in ROWS.values()
            if row.upstream.getter
        },
        **{name: _getter(path, default) for name, (path, default) in _FURTHER.items()},
        "aio_config": _getter(Aio.at, Aio.defaults()),
        "checkpoint_tag_validation_enabled": lambda state: _tags(state) != "IGNORE",
        "checkpoint_tag_validation_fail": lambda state: _tags(state) == "FAIL",
        "checkpoint_writer_enabled": lambda state: _value(state, "checkpoint.writer") is not None,
        "dynamic_loss_scale": lambda state: _value(state, "fp16.loss_scale", 0) == 0,
        "dynamic_loss_scale_args": _scale_arguments,
        "get_data_types": _data_types,
        "get_pld_theta": _layer_keep_share,
        "initial_dynamic_scale": _initial_scale,
        "is_deepcompile_active": lambda state: False,
        "is_first_weights_partition_group": lambda state: state.settings.zero.stage >= 3,
        "managed_gradient_accumulation": lambda state: state.settings.extras.managed_gradient_accumulation,
        "optimizer_name": lambda state: optimizer_name(state.arguments.config),
        "tensor_parallel_config": lambda state: vars(Queries(state)._config)["tensor_parallel_config"],
        "torch_autocast_dtype": lambda state: autocast_dtype(state.arguments.config),
        "postscale_gradients": lambda state: not _value(state, "prescale_gradients", False),
        "zero_cpu_offload": lambda state: _device("offload_optimizer", state) == "cpu",
        "zero_nvme_offload_optimizer": lambda state: _device("offload_optimizer", state) == "nvme",
        "zero_optimization_partition_gradients": lambda state: state.settings.zero.stage >= 2,
        "zero_optimization_partition_weights": lambda state: state.settings.zero.stage >= 3,
        "zero_overlap_comm": lambda state: value_at(
            state.arguments.config, "zero_optimization.overlap_comm", state.settings.zero.stage == 3
        ),
        "zero_use_cpu_optimizer": lambda state: _device("offload_optimizer", state) in ("cpu", "nvme"),
    }
)
"""Name of a method -> its value for an engine."""

ATTRIBUTES: Mapping[str, Callable[[EngineState], object]] = MappingProxyType(
    {
        "checkpoint_mp_rank": lambda state: state.context.tp.rank,
        "collate_fn": lambda state: state.arguments.collate_fn,
        "communication_data_type": _communication_dtype,
        "flops_profiler": lambda state: state.reporter.profiler,
        "gradient_average": lambda state: _value(state, "gradient_allreduce_op", "mean") == "mean",
        "has_moe_layers": lambda state: bool(_moe_layers(state)),
        "is_iterable_style_dataset": lambda state: lambda data: isinstance(data, IterableDataset),
        "is_map_style_dataset": lambda state: (
            lambda data: hasattr(data, "__getitem__") and hasattr(data, "__len__")
        ),
        "num_experts": lambda state: [layer.num_experts for layer in _moe_layers(state)],
        "param_names": lambda state: {param: name for name, param in state.module.named_parameters()},
        "seq_data_parallel_group": lambda state: process_group(state.context.replica),
        "seq_parallel_group": lambda state: Queries(state).get_sequence_parallel_group(),
        "sequence_parallel_size": lambda state: state.context.groups["cp"].size,
        "training_data": lambda state: state.arguments.training_data,
    }
)
"""Name of an attribute -> its value for an engine."""
