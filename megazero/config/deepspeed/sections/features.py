"""Logging and monitors, checkpoints, and the features that have sections of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, get_args

from megazero.config.deepspeed.section import (
    AUTO,
    DISABLED,
    NOTHING,
    NOTHING_ENABLED,
    OR_NEVER,
    TEXTS,
    Anything,
    Bool,
    Convert,
    Declared,
    Integer,
    JsonSection,
    Number,
    Object,
    Only,
    Size,
    Text,
    Values,
    does,
    if_enabled,
    ignored,
    only,
    plainly,
    refused,
    sets,
)
from megazero.config.tree.logging import Operation

_JOB_NAME = "DeepSpeedJobName"  # what DeepSpeed calls a job without a name


class Printing(JsonSection):
    """The keys at the top about what is printed and loaded."""

    heading = "Logging"

    steps_per_print: Annotated[Declared, OR_NEVER] = does(
        None, extra="steps_per_print", accepted="`--log-interval` says how often a line is printed", seen=True
    )
    wall_clock_breakdown: Bool = sets("logging.wall_clock_breakdown", default=False, seen=True)
    memory_breakdown: Bool = ignored(
        "the set of metrics is fixed, and training is the same without it", False, seen=True
    )
    log_level: Text = ignored("all messages have one level", None, seen=True)
    profiling: Anything = ignored("DeepSpeed reads no section of this name")
    elastic_checkpoint: Anything = ignored("DeepSpeed reads no section of this name")
    dump_state: Bool = does(
        False, extra="dump_state", accepted="`--check-config` prints the resolved settings", seen=True
    )
    dataloader_drop_last: Bool = does(
        False, extra="dataloader_drop_last", accepted="training always takes whole batches", seen=True
    )


def _folder_of(section: str, field: str) -> Declared:
    """Declare the `enabled` of a monitor, which sets its folder: the output path with the job's name."""

    def convert(on: bool, values: Values) -> object:
        if not on:
            return NOTHING
        path = values.get(f"{section}.output_path", "")
        return str(PurePath(path, values.get(f"{section}.job_name", _JOB_NAME)))

    return sets(field, convert=convert)


class TensorBoard(JsonSection):
    """`tensorboard`."""

    at, heading, when = "tensorboard", "Logging", "tensorboard.enabled"

    enabled: Bool = _folder_of("tensorboard", "logging.tensorboard_dir")
    output_path: Text = does(fields=("logging.tensorboard_dir",))
    job_name: Text = does(fields=("logging.tensorboard_dir",))


class CsvMonitor(JsonSection):
    """`csv_monitor`."""

    at, heading, when = "csv_monitor", "Logging", "csv_monitor.enabled"

    enabled: Bool = _folder_of("csv_monitor", "logging.csv_dir")
    output_path: Text = does(fields=("logging.csv_dir",))
    job_name: Text = does(fields=("logging.csv_dir",))


class Wandb(JsonSection):
    """`wandb`."""

    at, heading, when = "wandb", "Logging", "wandb.enabled"

    enabled: Bool = does(fields=("logging.wandb_project",))
    project: Text = sets("logging.wandb_project", absent="deepspeed")
    group: Text = sets("logging.wandb_group")
    team: Text = sets("logging.wandb_entity")


def _place(online: bool, values: Values) -> object:
    return NOTHING if online else "."


class Comet(JsonSection):
    """`comet`."""

    at, heading, when = "comet", "Logging", "comet.enabled"

    enabled: Bool = does(fields=("logging.comet_project",))
    project: Text = sets("logging.comet_project", absent="general")
    workspace: Text = sets("logging.comet_workspace")
    experiment_name: Text = sets("logging.comet_experiment_name")
    online: Bool = sets("logging.comet_offline_dir", convert=_place)
    samples_log_interval: Integer = ignored("each step is logged", 100, when="")
    mode: Text = ignored("the environment's COMET_START_MODE says it", when="")
    experiment_key: Text = ignored("the environment's COMET_EXPERIMENT_KEY says it", when="")
    api_key: Text = ignored("the environment's COMET_API_KEY says it", when="")


def _operations(names: tuple[str, ...], values: Values) -> object:
    """Map torch's names to operations here: ``all_gather_into_tensor`` is an all_gather."""
    if values.get("comms_logger.prof_all", True):
        return NOTHING
    known = [name for name in get_args(Operation) if any(given.startswith(name) for given in names)]
    return (*known, *(given for given in names if not given.startswith(tuple(known))))


class CommsLogger(JsonSection):
    """`comms_logger`."""

    at, heading, when = "comms_logger", "Logging", "comms_logger.enabled"

    enabled: Bool = sets("logging.comms_logger", default=False)
    verbose: Bool = sets("logging.comms_logger_verbose", default=False)
    # It decides whether `prof_ops` has an effect.
    prof_all: Bool = does(True, fields=("logging.comms_logger_ops",))
    prof_ops: Annotated[Declared, TEXTS] = sets("logging.comms_logger_ops", convert=_operations, default=[])
    debug: Bool = ignored("groups have names, which say what a call is for", False, when="")


def _flops(field: str, default: object, convert: Convert = plainly) -> Declared:
    return sets(f"profiling.flops_profiler_{field}", convert=convert, default=default, getter=True)


class FlopsProfiler(JsonSection):
    """`flops_profiler`."""

    at, heading, when = "flops_profiler", "Logging", "flops_profiler.enabled"
    attribute = "flops_profiler_config"

    @classmethod
    def getter_of(cls, name: str) -> str:
        """A getter has the key's name with `flops_profiler_` before it."""
        return f"flops_profiler_{name}"

    enabled: Bool = sets("profiling.flops_profiler", default=False, getter=True)
    # A step below 0 never comes.
    profile_step: Integer = _flops("step", 1, lambda step, values: max(1, step) if step >= 0 else 2**62)
    module_depth: Integer = _flops("module_depth", -1)
    top_modules: Integer = _flops("top_modules", 1)
    detailed: Bool = _flops("detailed", True)
    output_file: Text = _flops("output_file", None)
    recompute_fwd_factor: Number = _flops("recompute_fwd_factor", 0.0)


def _generates_whole(section: Mapping[str, object]) -> bool:
    return DISABLED.holds(section) or section.get("inference_tp_size", 1) in (1, AUTO)


_ROUTING = (
    *("score_func", "score_apply", "top_k", "route_norm", "routed_scaling_factor"),
    *("load_balance_coeff", "num_expert_groups", "num_limited_groups"),
)


def _routes_as_the_model(section: Mapping[str, object]) -> bool:
    """Whether a section `expert_parallel` changes the placement of experts alone, and no number."""
    own = all(section.get(key) in (None, AUTO) for key in _ROUTING) and section.get("route_scale", 1) == 1
    return own or DISABLED.holds(section)


_FEWER_BITS = (
    "training with fewer and fewer bits is not offered here; for a fixed number of bits use "
    "`init_compression` with `compression_training.weight_quantization`, and leave the section out"
)


class Features(JsonSection):
    """The sections that are read elsewhere, or not at all."""

    heading = "Other features"

    compression_training: Object = does(
        convert=if_enabled,
        accepted="`init_compression` reads it",
        script_refused="`init_compression` compresses models of your own; leave the section out",
    )
    quantize_training: Object = refused(_FEWER_BITS, NOTHING_ENABLED)
    eigenvalue: Object = refused(_FEWER_BITS, NOTHING_ENABLED)
    weight_quantization: Object = refused("weights that are trained are not quantized; leave the section out")
    elasticity: Object = does(
        convert=if_enabled,
        accepted="`initialize` takes the batch sizes from it",
        script_refused="batch sizes do not adapt to the number of ranks; leave the section out",
    )
    autotuning: Object = does(
        convert=if_enabled,
        accepted="`megazero tune` and `megazero launch --autotuning run` read it",
        script_refused="a training does not tune itself; `megazero tune` and `megazero launch --autotuning "
        "run` read the section, so leave it out here",
    )
    amp: Object = refused("automatic mixed precision is not offered; use `fp16` or `bf16`", DISABLED)
    torch_autocast: Object = does(
        convert=if_enabled,
        extra="sections.torch_autocast",
        script_refused="weights and products have one type; use `--bf16`, and leave the section out",
    )
    hybrid_engine: Object = does(
        {
            "enabled": False,
            "max_out_tokens": 512,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
            "enable_cuda_graph": False,
        },
        extra="sections.hybrid_engine",
        accepted="a training script does not generate",
        only=Only("`enabled` false or `inference_tp_size` 1", _generates_whole),
        refused="`tensor_parallel.autotp_size` slices the layers for training and generation alike; leave "
        "`inference_tp_size` out",
        attribute=True,
    )
    compile: Object = does(
        {"deepcompile": False, "passes": None},
        accepted="`engine.compile` compiles the forward alone, between gathers that stay as they are",
        only=Only("`passes` without autosp", lambda section: "autosp" not in (section.get("passes") or ())),
        refused="the compiler does not share sequences; do it with `UlyssesSPAttentionHF` or "
        "`DistributedAttention`, and leave the pass out",
        attribute="compile_config",
    )
    tensor_parallel: Object = does(
        {"autotp_size": 0, "tp_overlap_comm": False, "preset_model": None, "partition_config": None},
        extra="sections.tensor_parallel",
        script_refused="cut layers with `--tensor-model-parallel-size`; leave the section out",
        attribute="tensor_parallel_config",
    )
    expert_parallel: Object = does(
        convert=if_enabled,
        accepted="the model's own layers run, each rank with all experts, which stage 3 shards",
        only=Only("it leaves the routing to the model", _routes_as_the_model),
        refused="the model's own router decides; set it there, and leave the key out",
        script_refused="share experts with `--num-experts` and `--expert-model-parallel-size`; leave the "
        "section out",
    )
    use_data_before_expert_parallelism: Bool = refused(
        "the ranks that share a layer's experts are neighbours, and replicas of them lie further apart; "
        "leave it out",
        only(False),
        False,
        attribute="use_data_before_expert_parallel_",
    )
    nebula: Object = refused("checkpoints are files; leave the section out", DISABLED)
    datastates_ckpt: Object = refused("checkpoints are files; leave the section out")
    msamp: Object = refused("MS-AMP is not used; leave the section out", DISABLED)
    graph_harvesting: Bool = ignored("kernels are launched one by one")
    inference: Object = ignored("`init_inference` and `tp_model_init` are given theirs")
    timers: Object = ignored("timers are set by `wall_clock_breakdown`")
    disable_python_gc: Bool = ignored("garbage collection is left to Python", False, attribute=True)
    vocabulary_size: Size = ignored("the model determines the size of the vocabulary")


_ANY_LAYOUT = "a checkpoint is whole or invisible, and loads on any layout"


class Checkpoint(JsonSection):
    """`checkpoint`."""

    at, heading = "checkpoint", "Other features"

    load_universal: Anything = ignored(
        _ANY_LAYOUT, False, getter="load_universal_checkpoint", attribute="load_universal_checkpoint"
    )
    parallel_write: Anything = ignored(_ANY_LAYOUT)
    writer: Anything = ignored(_ANY_LAYOUT, None)
    checkpoint_serialization: Anything = ignored(_ANY_LAYOUT, True, getter="checkpoint_serialization_enabled")
    tag_validation: Text = does(
        "Warn",
        convert=lambda mode, values: mode.lower(),
        extra="checkpoint.tag_validation",
        accepted="all ranks save under the number of the iteration",
        only=only("Warn", "Ignore", "Fail"),
        refused="choose Warn, Ignore or Fail",
    )
    use_node_local_storage: Bool = does(
        False,
        extra="checkpoint.use_node_local_storage",
        accepted="all ranks write to `--save`, which every node must see",
        seen=True,
    )
