"""Rows of the DeepSpeed table: logging and monitors, and the features that have sections of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from typing import Any, get_args

from megazero.config.deepspeed.row import (
    ANYTHING,
    AUTO,
    BOOL,
    DISABLED,
    INTEGER,
    NOTHING,
    NOTHING_ENABLED,
    NUMBER,
    OR_NEVER,
    SECTION,
    SIZE,
    TEXT,
    TEXTS,
    KeyRow,
    Only,
    Values,
    ValueShape,
    if_enabled,
    ignores,
    only,
    plainly,
    refuses,
    sets,
)
from megazero.config.tree.logging import Operation

_JOB_NAME = "DeepSpeedJobName"  # what DeepSpeed calls a job without a name


def _folder(section: str) -> Callable[[bool, Values], Any]:
    """The folder of a monitor that is on: its output path with the name of the job."""

    def convert(on: bool, values: Values) -> Any:
        if not on:
            return NOTHING
        path = values.get(f"{section}.output_path", "")
        return str(PurePath(path, values.get(f"{section}.job_name", _JOB_NAME)))

    return convert


def _monitor_rows(section: str, field: str) -> tuple[KeyRow, ...]:
    return (
        sets(f"{section}.enabled", BOOL, field, convert=_folder(section)),
        # Parts of the folder that `enabled` sets.
        KeyRow(f"{section}.output_path", TEXT, (field,), when=f"{section}.enabled"),
        KeyRow(f"{section}.job_name", TEXT, (field,), when=f"{section}.enabled"),
    )


_OPERATIONS = "logging.comms_logger_ops"


def _operations(names: tuple[str, ...], values: Values) -> Any:
    """The operations here that torch's names stand for: ``all_gather_into_tensor`` is an all_gather."""
    if values.get("comms_logger.prof_all", True):
        return NOTHING
    known = [name for name in get_args(Operation) if any(given.startswith(name) for given in names)]
    return (*known, *(given for given in names if not given.startswith(tuple(known))))


def _of_flops(
    key: str, shape: ValueShape, field: str, convert: Callable[[Any, Values], Any] = plainly
) -> KeyRow:
    """The row of a key of the section ``flops_profiler``, which counts where that is enabled."""
    path, on = f"flops_profiler.{key}", "flops_profiler.enabled"
    return sets(path, shape, f"profiling.flops_profiler_{field}", convert=convert, when=on)


_LATER = "comes in a later version; leave the section out or set `enabled` to false"
_FIXED_METRICS = "the set of metrics is fixed, and training is the same without it"


def _generates_whole(section: Any) -> bool:
    return DISABLED.holds(section) or section.get("inference_tp_size", 1) in (1, AUTO)


_ROUTING = (
    *("score_func", "score_apply", "top_k", "route_norm", "routed_scaling_factor"),
    *("load_balance_coeff", "num_expert_groups", "num_limited_groups"),
)


def _routes_as_the_model(section: Any) -> bool:
    """Whether a section `expert_parallel` changes where experts lie and nothing that is computed."""
    own = all(section.get(key) in (None, AUTO) for key in _ROUTING) and section.get("route_scale", 1) == 1
    return own or DISABLED.holds(section)


LOGGING_ROWS: tuple[KeyRow, ...] = (
    KeyRow(
        "steps_per_print",
        OR_NEVER,
        extra="steps_per_print",
        accepted="`--log-interval` says how often a line is printed",
    ),
    sets("wall_clock_breakdown", BOOL, "logging.wall_clock_breakdown"),
    *ignores(_FIXED_METRICS, BOOL, "memory_breakdown"),
    *ignores("all messages have one level", TEXT, "log_level"),
    *ignores("DeepSpeed reads no section of this name", ANYTHING, "profiling", "elastic_checkpoint"),
    KeyRow("dump_state", BOOL, extra="dump_state", accepted="`--check-config` prints the resolved settings"),
    KeyRow(
        "dataloader_drop_last",
        BOOL,
        extra="dataloader_drop_last",
        accepted="training always takes whole batches",
    ),
    *_monitor_rows("tensorboard", "logging.tensorboard_dir"),
    *_monitor_rows("csv_monitor", "logging.csv_dir"),
    KeyRow("wandb.enabled", BOOL, ("logging.wandb_project",)),
    sets("wandb.project", TEXT, "logging.wandb_project", when="wandb.enabled", absent="deepspeed"),
    sets("wandb.group", TEXT, "logging.wandb_group", when="wandb.enabled"),
    sets("wandb.team", TEXT, "logging.wandb_entity", when="wandb.enabled"),
    *refuses("use `tensorboard`, `wandb` or `csv_monitor`", SECTION, DISABLED, "comet"),
    sets("comms_logger.enabled", BOOL, "logging.comms_logger"),
    sets("comms_logger.verbose", BOOL, "logging.comms_logger_verbose", when="comms_logger.enabled"),
    # `prof_all` decides whether the list counts.
    KeyRow("comms_logger.prof_all", BOOL, (_OPERATIONS,), when="comms_logger.enabled"),
    sets("comms_logger.prof_ops", TEXTS, _OPERATIONS, convert=_operations, when="comms_logger.enabled"),
    *ignores("groups have names, which say what a call is for", BOOL, "comms_logger.debug"),
    sets("flops_profiler.enabled", BOOL, "profiling.flops_profiler"),
    # A step below 0 never comes.
    _of_flops("profile_step", INTEGER, "step", lambda step, values: max(1, step) if step >= 0 else 2**62),
    _of_flops("module_depth", INTEGER, "module_depth"),
    _of_flops("top_modules", INTEGER, "top_modules"),
    _of_flops("detailed", BOOL, "detailed"),
    _of_flops("output_file", TEXT, "output_file"),
    _of_flops("recompute_fwd_factor", NUMBER, "recompute_fwd_factor"),
)


FEATURE_ROWS: tuple[KeyRow, ...] = (
    KeyRow(
        "compression_training",
        SECTION,
        convert=if_enabled,
        accepted="`init_compression` reads it",
        script_refused="`init_compression` compresses models of your own; leave the section out",
    ),
    *refuses(
        "training with fewer and fewer bits is not offered here; for a fixed number of bits use "
        "`init_compression` with `compression_training.weight_quantization`, and leave the section out",
        SECTION,
        NOTHING_ENABLED,
        "quantize_training",
        "eigenvalue",
    ),
    *refuses(
        "weights that are trained are not quantized; leave the section out",
        SECTION,
        None,
        "weight_quantization",
    ),
    KeyRow(
        "elasticity",
        SECTION,
        convert=if_enabled,
        accepted="`initialize` takes the batch sizes from it",
        script_refused="batch sizes do not adapt to the number of ranks; leave the section out",
    ),
    KeyRow(
        "autotuning",
        SECTION,
        convert=if_enabled,
        accepted="`megazero tune` and `megazero launch --autotuning run` read it",
        script_refused="a training does not tune itself; `megazero tune` and `megazero launch --autotuning "
        "run` read the section, so leave it out here",
    ),
    *refuses(
        "automatic mixed precision is not offered; use `fp16` or `bf16`",
        SECTION,
        DISABLED,
        "amp",
    ),
    KeyRow(
        "torch_autocast",
        SECTION,
        convert=if_enabled,
        extra="sections.torch_autocast",
        script_refused="weights and products have one type; use `--bf16`, and leave the section out",
    ),
    KeyRow(
        "hybrid_engine",
        SECTION,
        extra="sections.hybrid_engine",
        accepted="a training script does not generate",
        only=Only("`enabled` false or `inference_tp_size` 1", _generates_whole),
        refused="`tensor_parallel.autotp_size` slices the layers for training and generation alike; leave "
        "`inference_tp_size` out",
    ),
    KeyRow(
        "compile",
        SECTION,
        accepted="`engine.compile` compiles the forward alone, between gathers that stay as they are",
        only=Only("`passes` without autosp", lambda section: "autosp" not in (section.get("passes") or ())),
        refused="the compiler does not share sequences; do it with `UlyssesSPAttentionHF` or "
        "`DistributedAttention`, and leave the pass out",
    ),
    KeyRow(
        "tensor_parallel",
        SECTION,
        extra="sections.tensor_parallel",
        script_refused="cut layers with `--tensor-model-parallel-size`; leave the section out",
    ),
    KeyRow(
        "expert_parallel",
        SECTION,
        convert=if_enabled,
        accepted="the model's own layers run, each rank with all experts, which stage 3 shards",
        only=Only("it leaves the routing to the model", _routes_as_the_model),
        refused="the model's own router decides; set it there, and leave the key out",
        script_refused="share experts with `--num-experts` and `--expert-model-parallel-size`; leave the "
        "section out",
    ),
    *refuses(
        "the ranks that share a layer's experts are neighbours, and replicas of them lie further apart; "
        "leave it out",
        BOOL,
        only(False),
        "use_data_before_expert_parallelism",
    ),
    *refuses("checkpoints are files; leave the section out", SECTION, DISABLED, "nebula"),
    *refuses("checkpoints are files; leave the section out", SECTION, None, "datastates_ckpt"),
    *refuses("fp8 is not offered here; leave the section out", SECTION, DISABLED, "msamp"),
    *ignores("kernels are launched one by one", BOOL, "graph_harvesting"),
    *ignores("`init_inference` and `tp_model_init` are given theirs", SECTION, "inference"),
    *ignores("timers are set by `wall_clock_breakdown`", SECTION, "timers"),
    *ignores(
        "a checkpoint is whole or invisible, and loads on any layout",
        ANYTHING,
        "checkpoint.load_universal",
        "checkpoint.parallel_write",
        "checkpoint.writer",
        "checkpoint.checkpoint_serialization",
    ),
    sets(
        "checkpoint.tag_validation",
        TEXT,
        convert=lambda mode, values: mode.lower(),
        extra="checkpoint.tag_validation",
        accepted="all ranks save under the number of the iteration",
        only=only("Warn", "Ignore", "Fail"),
        refused="choose Warn, Ignore or Fail",
    ),
    KeyRow(
        "checkpoint.use_node_local_storage",
        BOOL,
        extra="checkpoint.use_node_local_storage",
        accepted="all ranks write to `--save`, which every node must see",
    ),
    *ignores("garbage collection is left to Python", BOOL, "disable_python_gc"),
    *ignores("the model determines the size of the vocabulary", SIZE, "vocabulary_size"),
)
