"""ZeRO, what is offloaded, activation checkpointing and pipeline stages."""

from __future__ import annotations

from typing import Annotated

from megazero.config.deepspeed.section import (
    NOTHING,
    PLACE,
    Anything,
    Bool,
    Convert,
    Count,
    Declared,
    Integer,
    JsonSection,
    Number,
    Object,
    Size,
    Text,
    Values,
    does,
    ignored,
    left_to_flags,
    of_hidden_size,
    only,
    refused,
    sets,
)
from megazero.config.numbers import LARGEST

Place = Annotated[Declared, PLACE]

_FLAT = "gradients are always kept in flat buffers, and are reduce-scattered wherever they are sharded"
_SHARED = "reductions and gathers share the buckets of `reduce_bucket_size`"
_GATHERED = (
    "what stays gathered is decided by `stage3_max_live_parameters` and `stage3_param_persistence_threshold`"
)
_HOOKS = "parameters are found by hooks on their modules, with checks that are always on"
_FILES = "checkpoints do not depend on the layout, and hold the optimizer's own weights"
_WIRE = "gathers go through torch.distributed"
_WHOLE = "a checkpoint always holds whole weights"


def _at_stage_3(place: object, values: Values) -> object:
    """Take the place of parameters at stage 3 alone, as DeepSpeed does."""
    return place if values.get("zero_optimization.stage", 3) == 3 else NOTHING


def _to_cpu(on: bool, values: Values) -> object:
    return _at_stage_3("cpu", values) if on else NOTHING


class Zero(JsonSection):
    """`zero_optimization`."""

    at, heading = "zero_optimization", "ZeRO"

    @classmethod
    def getter_of(cls, name: str) -> str:
        """A getter has the key's name with `zero_` before it, and without `stage3_`."""
        return name if name.startswith("zero_") else f"zero_{name.removeprefix('stage3_')}"

    stage: Integer = sets("zero.stage", auto=left_to_flags, default=0)
    reduce_bucket_size: Size = sets(
        "zero.bucket_size",
        auto=of_hidden_size(lambda hidden: hidden * hidden),
        default=500_000_000,
        getter=True,
    )
    allgather_bucket_size: Size = ignored(_SHARED, 500_000_000, getter=True)
    overlap_comm: Bool = sets(
        "zero.overlap_grad_reduce",
        "zero.overlap_param_gather",
        convert=lambda on, values: (on, on),
        auto=left_to_flags,
        default=None,
    )
    stage3_prefetch_bucket_size: Size = sets(
        "zero.prefetch_size",
        auto=of_hidden_size(lambda hidden: int(0.9 * hidden * hidden)),
        default=50_000_000,
        getter=True,
    )
    stage3_param_persistence_threshold: Size = sets(
        "zero.param_persistence_threshold",
        auto=of_hidden_size(lambda hidden: 10 * hidden),
        default=100_000,
        getter=True,
    )
    stage3_max_live_parameters: Size = sets("zero.max_live_parameters", default=1_000_000_000, getter=True)
    stage3_max_reuse_distance: Integer = ignored(_GATHERED, 1_000_000_000, getter=True)
    stage3_model_persistence_threshold: Integer = ignored(_GATHERED, LARGEST, getter=True)
    stage3_module_granularity_threshold: Integer = ignored(_GATHERED, 0, getter=True)
    zero_hpz_partition_size: Size = sets(
        "zero.hpz_partition_size", convert=lambda n, _: n or 1, default=1, getter=True
    )
    # The codes that DeepSpeed has for them; the flags have others.
    zero_quantized_weights: Bool = sets(
        "zero.quantized_weights", convert=lambda on, _: "int8" if on else "none", default=False, getter=True
    )
    zero_quantized_gradients: Bool = sets(
        "zero.quantized_gradients", convert=lambda on, _: "int4" if on else "none", default=False, getter=True
    )
    zero_quantized_nontrainable_weights: Bool = ignored(
        "frozen weights are kept as they are; `zero_quantized_weights` lets them travel as codes at stage 3",
        False,
        getter=True,
    )
    mics_shard_size: Integer = refused(
        "use `zero_hpz_partition_size`, which keeps gathers within a node", only(-1, 0)
    )
    mics_hierarchical_params_gather: Bool = refused("leave it out with `mics_shard_size`", only(False))
    contiguous_gradients: Bool = ignored(_FLAT, True, getter=True)
    reduce_scatter: Bool = ignored(_FLAT, True, getter=True)
    allgather_partitions: Bool = ignored(_FLAT, True, getter=True)
    round_robin_gradients: Bool = ignored(_FLAT, False, getter=True)
    use_multi_rank_bucket_allreduce: Bool = ignored(_FLAT, True, getter="zero_multi_rank_bucket_allreduce")
    legacy_stage1: Bool = ignored(_FLAT, False, getter=True)
    parameter_alignment: Bool = ignored(_FLAT, False, getter=True)
    stage3_use_all_reduce_for_fetch_params: Bool = ignored(_FLAT, False)
    stage3_allgather_sequential: Bool = ignored(_FLAT, False, getter=True)
    ignore_unused_parameters: Bool = ignored(
        "a parameter without a gradient takes part with zeros", True, getter=True
    )
    elastic_checkpoint: Bool = ignored(_FILES, False, getter=True)
    load_from_fp32_weights: Bool = ignored(_FILES, True, getter=True)
    pipeline_loading_checkpoint: Bool = ignored(_FILES, False)
    stage3_gather_16bit_weights_on_model_save: Bool = does(
        False,
        extra="gather_16bit_weights_on_save",
        accepted=_WHOLE,
        getter=True,
    )
    stage3_gather_fp16_weights_on_model_save: Bool = does(
        False, extra="gather_16bit_weights_on_save", accepted=_WHOLE
    )
    override_module_apply: Bool = ignored(_HOOKS, True)
    memory_efficient_linear: Bool = ignored(_HOOKS, True)
    log_trace_cache_warnings: Bool = ignored(_HOOKS, False, getter=True)
    enable_sanity_checks: Bool = ignored(_HOOKS, False)
    sdma_allgather: Anything = ignored(_WIRE)
    sdma_allgather_max_numel: Anything = ignored(_WIRE)
    # Examples misspell them; older releases passed over both, and only speed depends on the right ones.
    comm_overlap: Anything = ignored("no key has this name: `overlap_comm` is meant")
    stage3_param_persitance_threshold: Anything = ignored(
        "no key has this name: `stage3_param_persistence_threshold` is meant"
    )
    ignore_missing_optim_state: Bool = refused("use `--finetune`, for weights alone", only(False))
    compute_grad_norm: Bool = ignored("the norm of the gradients is always computed", True, getter=True)
    zeropp_loco_param: Object = refused(
        "codes of gradients are sent without what they left out before; leave it out"
    )
    leaf_module: Object = does(
        extra="sections.leaf_module", accepted="every rank runs all layers of the models that flags build"
    )
    save_muon_momentum_buffer_in_memory: Bool = ignored(
        "it matters only with the Muon optimizer", False, getter=True
    )
    zenflow: Object = refused(
        "every gradient takes part in every update; leave it out, and use `offload_optimizer` alone",
        default=None,
        getter="zenflow_config",
    )
    sub_group_size: Size = ignored("the optimizer steps bucket by bucket", 1_000_000_000, getter=True)
    cpu_offload: Bool = sets(
        "offload.optimizer", convert=lambda on, _: "cpu" if on else NOTHING, default=None
    )
    cpu_offload_param: Bool = sets("offload.parameters", convert=_to_cpu, default=None)
    cpu_offload_params: Bool = sets("offload.parameters", convert=_to_cpu)
    cpu_offload_use_pin_memory: Bool = sets("offload.pin_memory", default=None)


AT_STAGE_3 = frozenset(
    f"{Zero.at}.{name}"
    for name in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
)
"""Keys that DeepSpeed gives to its engine of stage 3 alone."""


class BesideZero(JsonSection):
    """The keys at the top that belong to ZeRO."""

    heading = "ZeRO"

    allgather_size: Size = ignored(
        "reductions and gathers share the buckets of `zero_optimization.reduce_bucket_size`"
    )
    disable_allgather: Bool = ignored("sharded parameters are always gathered", False, attribute=True)
    zero_allow_untested_optimizer: Bool = does(
        False,
        extra="zero_allow_untested_optimizer",
        accepted="every optimizer that flags offer is tested with every stage",
        seen=True,
    )
    zero_force_ds_cpu_optimizer: Bool = ignored("every optimizer updates where its state is", True, seen=True)


_BUFFERS = "buffers are as large as a bucket's state, and there are as many as are in use at a time"
_ALWAYS = "the next bucket is always read, and the last one written, while one is updated"
_ONE_BY_ONE = "requests are started one by one, and always overlap"
_THREADS = "`queue_depth` requests are under way at a time, each in a thread"


class OffloadOptimizer(JsonSection):
    """`offload_optimizer`."""

    at, heading = "zero_optimization.offload_optimizer", "Offload"

    device: Place = sets("offload.optimizer", default="none")
    nvme_path: Text = sets("offload.path", default=None)
    ratio: Number = sets("offload.fraction", default=1.0, getter="zero_partial_offload")
    pin_memory: Bool = sets("offload.pin_memory", default=True)
    buffer_count: Size = ignored(_BUFFERS, 4)
    pipeline_read: Bool = ignored(_ALWAYS, False)
    pipeline_write: Bool = ignored(_ALWAYS, False)
    pipeline: Bool = ignored(_ALWAYS)
    fast_init: Bool = ignored("state is made in its place", False)
    cpuadam_cores_perc: Number = ignored("OMP_NUM_THREADS says how many cores update")
    super_offload: Bool = refused(
        "updates are never made before the norm is known; set it to false", only(False), False, getter=True
    )


def _shared(field: str, name: str, default: object) -> Declared:
    """Declare a key of `offload_param` that sets the field of its namesake of `offload_optimizer`, too.

    The two must not differ.
    """
    own, optimizers = f"zero_optimization.offload_param.{name}", f"{OffloadOptimizer.at}.{name}"
    convert: Convert = lambda value, values: NOTHING if optimizers in values else value  # noqa: E731

    def faults(value: object, values: Values) -> list[str]:
        other = values.get(optimizers, value)
        if other == value:
            return []
        return [f"`{own}` must be `{optimizers}`, which is {other!r}, but is {value!r}"]

    return sets(field, convert=convert, faults=faults, default=default)


class OffloadParam(JsonSection):
    """`offload_param`."""

    at, heading = "zero_optimization.offload_param", "Offload"

    device: Place = sets("offload.parameters", convert=_at_stage_3, default="none")
    nvme_path: Text = _shared("offload.path", "nvme_path", None)
    pin_memory: Bool = _shared("offload.pin_memory", "pin_memory", True)
    buffer_count: Size = ignored(_BUFFERS, 5)
    buffer_size: Size = ignored(_BUFFERS, 100_000_000)
    max_in_cpu: Size = ignored(_BUFFERS, 1_000_000_000)


class Aio(JsonSection):
    """`aio`."""

    at, heading, attribute, mapping = "aio", "Offload", "aio_config", True

    block_size: Count = sets("offload.block_size", default=1_048_576)
    queue_depth: Count = sets("offload.queue_depth", default=8)
    thread_count: Count = ignored(_THREADS)
    intra_op_parallelism: Count = ignored(_THREADS, 1)
    single_submit: Bool = ignored(_ONE_BY_ONE, False)
    overlap_events: Bool = ignored(_ONE_BY_ONE, True)
    use_gds: Bool = refused(
        "state is updated on the host, so the device does not read the disk; set it to false",
        only(False),
        False,
    )


_MEMORY = "memory housekeeping is left to torch"


class ActivationCheckpointing(JsonSection):
    """`activation_checkpointing`."""

    at, heading = "activation_checkpointing", "Activation checkpointing"
    attribute = "activation_checkpointing_config"

    partition_activations: Bool = sets("recompute.partition_activations", default=False)
    cpu_checkpointing: Bool = sets("recompute.offload", default=False)
    contiguous_memory_optimization: Bool = ignored(_MEMORY, False)
    synchronize_checkpoint_boundary: Bool = ignored(_MEMORY, False)
    profile: Bool = ignored(_MEMORY, False)
    number_checkpoints: Integer = ignored(
        "`--recompute-method` and `--recompute-num-layers` say which layers are recomputed", None
    )


_STAGES = "stages are set by `--pipeline-model-parallel-size` and `--pipeline-partition`"
_SENT = "how stages send to each other changes only the speed"


class Pipeline(JsonSection):
    """`pipeline`."""

    at, heading, attribute, mapping = "pipeline", "Pipeline", "pipeline", True

    activation_checkpoint_interval: Size = sets(
        "recompute.granularity",
        "recompute.num_layers",
        convert=lambda interval, values: ("full", interval) if interval else NOTHING,
        default=0,
    )
    stages: Anything = ignored(_STAGES, "auto")
    partition: Anything = ignored(_STAGES, "best")
    seed_layers: Bool = ignored("initial weights depend on the seed and the parameter's name alone", False)
    pipe_partitioned: Bool = ignored(_SENT, True)
    grad_partitioned: Bool = ignored(_SENT, True)
    use_reentrant: Bool = ignored(_SENT)
