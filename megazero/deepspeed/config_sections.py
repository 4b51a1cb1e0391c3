"""Sections of a JSON as objects with DeepSpeed's attributes and defaults; nothing here reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from megazero.config.deepspeed.row import AUTO
from megazero.deepspeed.monitor import get_monitor_config
from megazero.deepspeed.sparse.section import sparse_section

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        **{"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16},
        **{"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16},
    }
)
AIO = (
    '{"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": false, '
    '"overlap_events": true, "use_gds": false}'
)
# An attribute, its section in the JSON, and the section's defaults.
_OBJECTS = """
activation_checkpointing_config activation_checkpointing {"partition_activations": false, \
"contiguous_memory_optimization": false, "cpu_checkpointing": false, "number_checkpoints": null, \
"synchronize_checkpoint_boundary": false, "profile": false}
compile_config compile {"deepcompile": false, "passes": null}
flops_profiler_config flops_profiler {"enabled": false, "recompute_fwd_factor": 0.0, "profile_step": 1, \
"module_depth": -1, "top_modules": 1, "detailed": true, "output_file": null}
hybrid_engine hybrid_engine {"enabled": false, "max_out_tokens": 512, "inference_tp_size": 1, \
"release_inference_cache": false, "pin_parameters": true, "tp_gather_partition_size": 8, \
"enable_cuda_graph": false}
tensor_parallel_config tensor_parallel {"autotp_size": 0, "tp_overlap_comm": false, "preset_model": null, \
"partition_config": null}
timers_config timers.throughput {"enabled": true, "synchronized": true}
"""
_MAPPINGS = f"""
aio_config aio {AIO}
checkpoint_config checkpoint {{"tag_validation": "WARN", "checkpoint_serialization": true, "writer": null}}
pipeline pipeline {{"stages": "auto", "partition": "best", "seed_layers": false, \
"activation_checkpoint_interval": 0, "pipe_partitioned": true, "grad_partitioned": true}}
"""
_VALUES = """
buffer_dtype data_types.buffer_dtype null
data_efficiency_enabled data_efficiency.enabled false
disable_allgather disable_allgather false
disable_python_gc disable_python_gc false
grad_accum_dtype data_types.grad_accum_dtype null
keep_in_fp32_modules data_types.keep_in_fp32_modules "auto"
load_universal_checkpoint checkpoint.load_universal false
log_level log_level null
managed_gradient_accumulation managed_gradient_accumulation true
optimizer_legacy_fusion optimizer.legacy_fusion false
param_dtype data_types.param_dtype null
torch_autocast_enabled torch_autocast.enabled false
torch_autocast_lower_precision_safe_modules torch_autocast.lower_precision_safe_modules null
use_data_before_expert_parallel_ use_data_before_expert_parallelism false
use_node_local_storage checkpoint.use_node_local_storage false
"""


class ConfigSection(SimpleNamespace):
    """A section as an object; `model_dump` and its like give it as DeepSpeed's models do."""

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """The section as a dictionary, sections within it likewise; options have no effect."""
        return {k: v.model_dump() if isinstance(v, ConfigSection) else v for k, v in vars(self).items()}

    dict = model_dump

    def model_dump_json(self, **options: Any) -> str:
        """The section as the text of a JSON; options are those of `json.dumps`."""
        return json.dumps(self.model_dump(), **options)


def value_at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path of a JSON's content, with or without ``stage3_``; "auto" is the default."""
    node: Any = config
    *parents, last = path.split(".")
    for key in parents:
        node = node.get(key) if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping):
        return default
    value = node.get(f"stage3_{last}", node.get(last, default))
    if isinstance(default, dict) and isinstance(value, Mapping):
        return {**default, **value}
    return default if value == AUTO else value


def autocast_dtype(given: Mapping[str, Any]) -> torch.dtype | None:
    """The type of products that `torch_autocast` names; None if it is off or names none."""
    name = value_at(given, "torch_autocast.dtype")
    on = value_at(given, "torch_autocast.enabled", False)
    return DTYPES[str(name).removeprefix("torch.")] if on and name is not None else None


def sections_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Attribute -> value, for all of `DeepSpeedConfig` that only shows what a JSON has.

    Args:
        given: the JSON's content.
    """
    shown: dict[str, Any] = {}
    for name, path, default in _rows(_OBJECTS):
        section = value_at(given, path, default)
        own = {key: value for key, value in section.items() if value != AUTO}
        shown[name] = ConfigSection(**{**default, **own})
    for name, path, default in (*_rows(_MAPPINGS), *_rows(_VALUES)):
        shown[name] = value_at(given, path, default)
    tags = str(value_at(given, "checkpoint.tag_validation", "Warn")).upper()
    kept = ("checkpoint_serialization", "writer")
    shown["checkpoint_config"] = {
        "tag_validation": tags,
        **{key: shown["checkpoint_config"][key] for key in kept},
    }
    shown["checkpoint_tag_validation_enabled"] = tags != "IGNORE"
    shown["checkpoint_tag_validation_fail"] = tags == "FAIL"
    shown["torch_autocast_dtype"] = autocast_dtype(given)
    shown["seq_parallel_communication_data_type"] = DTYPES[
        value_at(given, "seq_parallel_communication_data_type", "fp32")
    ]
    shown["sparse_attention"] = sparse_section(given)
    shown["monitor_config"] = get_monitor_config(given)
    log = value_at(given, "comms_logger", {"enabled": False})
    shown["comms_config"] = ConfigSection(comms_logger_enabled=log["enabled"])
    if log["enabled"]:
        defaults = {"verbose": False, "prof_all": True, "debug": False, "prof_ops": []}
        shown["comms_config"].comms_logger = ConfigSection(**{**defaults, **log})
    return shown


def _rows(table: str) -> list[tuple[str, str, Any]]:
    rows = (line.split(" ", 2) for line in table.strip().splitlines())
    return [(name, path, json.loads(default)) for name, path, default in rows]
