"""The engine's getters, one for each key of the JSON: ``engine.zero_reduce_bucket_size()`` and the like.

`ATTRIBUTES` has what is read without a call.

Each line of the table is a name, the key's path, and DeepSpeed's default as JSON. They show what the script
configured, which says nothing about whether the key has an effect here; docs/deepspeed_json.md does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.data import IterableDataset

from megazero.deepspeed.comm.world import process_group
from megazero.deepspeed.config_sections import AIO, DTYPES, autocast_dtype, value_at
from megazero.deepspeed.moe.layer import MoE
from megazero.deepspeed.utils.torch_version import get_default_autocast_lower_precision_modules

_DATA = '{"enabled": false, "num_epochs": 1000, "num_workers": 0, "pin_memory": false}'
_LOWER = json.dumps(get_default_autocast_lower_precision_modules())
_TABLE = f"""
aio_config aio {AIO}
autotuning_enabled autotuning.enabled false
autotuning_end_profile_step autotuning.end_profile_step 5
autotuning_metric autotuning.metric "throughput"
autotuning_start_profile_step autotuning.start_profile_step 3
bf16_master_weights_and_gradients bf16.bf16_master_weights_and_grads false
bf16_optimizer_states bf16.bf16_optimizer_states false
checkpoint_serialization_enabled checkpoint.checkpoint_serialization true
curriculum_learning_config data_efficiency.data_sampling.curriculum_learning {{"enabled": false}}
curriculum_learning_enabled data_efficiency.data_sampling.curriculum_learning.enabled false
data_efficiency_config data_efficiency {{"enabled": false, "seed": 1234}}
data_efficiency_enabled data_efficiency.enabled false
data_sampling_config data_efficiency.data_sampling {_DATA}
data_sampling_enabled data_efficiency.data_sampling.enabled false
cpuadam_cores_perc zero_optimization.offload_optimizer.cpuadam_cores_perc 0.9
dataloader_drop_last dataloader_drop_last false
dump_state dump_state false
flops_profiler_detailed flops_profiler.detailed true
flops_profiler_enabled flops_profiler.enabled false
flops_profiler_module_depth flops_profiler.module_depth -1
flops_profiler_output_file flops_profiler.output_file null
flops_profiler_profile_step flops_profiler.profile_step 1
flops_profiler_recompute_fwd_factor flops_profiler.recompute_fwd_factor 0.0
flops_profiler_top_modules flops_profiler.top_modules 1
fp16_auto_cast fp16.auto_cast false
fp16_master_weights_and_gradients fp16.fp16_master_weights_and_grads false
gradient_predivide_factor gradient_predivide_factor 1.0
is_deepcompile_enabled compile.deepcompile false
is_sanity_checks_enabled enable_sanity_checks false
load_universal_checkpoint checkpoint.load_universal false
log_level log_level null
loss_scale fp16.loss_scale 0.0
memory_breakdown memory_breakdown false
optimizer_legacy_fusion optimizer.legacy_fusion false
optimizer_params optimizer.params null
pld_enabled progressive_layer_drop.enabled false
pld_gamma progressive_layer_drop.gamma 0.001
pld_params progressive_layer_drop null
pld_theta progressive_layer_drop.theta 1.0
random_ltd_config data_efficiency.data_routing.random_ltd {{"enabled": false}}
random_ltd_enabled data_efficiency.data_routing.random_ltd.enabled false
scheduler_name scheduler.type null
scheduler_params scheduler.params null
steps_per_print steps_per_print null
super_offload zero_optimization.offload_optimizer.super_offload false
torch_autocast_enabled torch_autocast.enabled false
torch_autocast_lower_precision_safe_modules torch_autocast.lower_precision_safe_modules {_LOWER}
use_node_local_storage checkpoint.use_node_local_storage false
wall_clock_breakdown wall_clock_breakdown false
zenflow_config zero_optimization.zenflow null
zero_allgather_bucket_size zero_optimization.allgather_bucket_size 500000000
zero_allgather_partitions zero_optimization.allgather_partitions true
zero_allgather_sequential zero_optimization.allgather_sequential false
zero_allow_untested_optimizer zero_allow_untested_optimizer false
zero_compute_grad_norm zero_optimization.compute_grad_norm true
zero_contiguous_gradients zero_optimization.contiguous_gradients true
zero_elastic_checkpoint zero_optimization.elastic_checkpoint false
zero_force_ds_cpu_optimizer zero_force_ds_cpu_optimizer true
zero_gather_16bit_weights_on_model_save zero_optimization.gather_16bit_weights_on_model_save false
zero_hpz_partition_size zero_optimization.zero_hpz_partition_size 1
zero_ignore_unused_parameters zero_optimization.ignore_unused_parameters true
zero_legacy_stage1 zero_optimization.legacy_stage1 false
zero_load_from_fp32_weights zero_optimization.load_from_fp32_weights true
zero_log_trace_cache_warnings zero_optimization.log_trace_cache_warnings false
zero_max_live_parameters zero_optimization.max_live_parameters 1000000000
zero_max_reuse_distance zero_optimization.max_reuse_distance 1000000000
zero_model_persistence_threshold zero_optimization.model_persistence_threshold 9223372036854775807
zero_module_granularity_threshold zero_optimization.module_granularity_threshold 0
zero_multi_rank_bucket_allreduce zero_optimization.use_multi_rank_bucket_allreduce true
zero_offload_optimizer zero_optimization.offload_optimizer null
zero_offload_param zero_optimization.offload_param null
zero_param_persistence_threshold zero_optimization.param_persistence_threshold 100000
zero_parameter_alignment zero_optimization.parameter_alignment false
zero_partial_offload zero_optimization.offload_optimizer.ratio 1.0
zero_prefetch_bucket_size zero_optimization.prefetch_bucket_size 50000000
zero_quantized_gradients zero_optimization.zero_quantized_gradients false
zero_quantized_nontrainable_weights zero_optimization.zero_quantized_nontrainable_weights false
zero_quantized_weights zero_optimization.zero_quantized_weights false
zero_reduce_bucket_size zero_optimization.reduce_bucket_size 500000000
zero_reduce_scatter zero_optimization.reduce_scatter true
zero_round_robin_gradients zero_optimization.round_robin_gradients false
zero_save_muon_momentum_buffer_in_memory zero_optimization.save_muon_momentum_buffer_in_memory false
zero_sub_group_size zero_optimization.sub_group_size 1000000000
"""
_DEEPSPEED_NAMES = ("adam", "adamw", "lamb", "lion", "adagrad", "muon", "muadam", "muadamw", "musgd")


def _at(path: str, default: Any, engine: Any) -> Any:
    return value_at(engine.config, path, default)


def _device(section: str, engine: Any) -> str | None:
    place: str | None = value_at(engine.config, f"zero_optimization.{section}.device")
    return None if place == "none" else place


def _tags(engine: Any) -> str:
    return str(value_at(engine.config, "checkpoint.tag_validation", "Warn")).upper()


def _power(engine: Any) -> int:
    return 1 << int(value_at(engine.config, "fp16.initial_scale_power", 16))


def _optimizer_name(engine: Any) -> str | None:
    name: str | None = value_at(engine.config, "optimizer.type")
    return name.lower() if name is not None and name.lower() in _DEEPSPEED_NAMES else name


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


def _read_table() -> dict[str, Callable[[Any], Any]]:
    rows = (line.split(" ", 2) for line in _TABLE.strip().splitlines())
    return {name: partial(_at, path, json.loads(default)) for name, path, default in rows}


GETTERS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        **_read_table(),
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
        "optimizer_name": _optimizer_name,
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
        "flops_profiler": lambda engine: engine._reporter.profiler,
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
