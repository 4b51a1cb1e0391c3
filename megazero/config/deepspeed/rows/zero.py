"""Rows of the DeepSpeed table: ZeRO, activation checkpointing and pipeline stages."""

from __future__ import annotations

from megazero.config.deepspeed.row import (
    ANYTHING,
    BOOL,
    INTEGER,
    NOTHING,
    SECTION,
    SIZE,
    KeyRow,
    ignores,
    left_to_flags,
    of_hidden_size,
    only,
    refuses,
    sets,
)

_FROZEN = "frozen weights are kept as they are; `zero_quantized_weights` lets them travel as codes at stage 3"


def _zero(*names: str) -> tuple[str, ...]:
    return tuple(f"zero_optimization.{name}" for name in names)


AT_STAGE_3 = frozenset(_zero("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"))
"""Keys that DeepSpeed gives to its engine of stage 3 alone."""

ZERO_ROWS: tuple[KeyRow, ...] = (
    sets("zero_optimization.stage", INTEGER, "zero.stage", auto=left_to_flags),
    sets(
        "zero_optimization.reduce_bucket_size",
        SIZE,
        "zero.bucket_size",
        auto=of_hidden_size(lambda hidden: hidden * hidden),
    ),
    *ignores(
        "reductions and gathers share the buckets of `reduce_bucket_size`",
        SIZE,
        *_zero("allgather_bucket_size"),
    ),
    sets(
        "zero_optimization.overlap_comm",
        BOOL,
        "zero.overlap_grad_reduce",
        "zero.overlap_param_gather",
        convert=lambda on, values: (on, on),
        auto=left_to_flags,
    ),
    sets(
        "zero_optimization.stage3_prefetch_bucket_size",
        SIZE,
        "zero.prefetch_size",
        auto=of_hidden_size(lambda hidden: int(0.9 * hidden * hidden)),
    ),
    sets(
        "zero_optimization.stage3_param_persistence_threshold",
        SIZE,
        "zero.param_persistence_threshold",
        auto=of_hidden_size(lambda hidden: 10 * hidden),
    ),
    sets("zero_optimization.stage3_max_live_parameters", SIZE, "zero.max_live_parameters"),
    *ignores(
        "what stays gathered is decided by `stage3_max_live_parameters` and "
        "`stage3_param_persistence_threshold`",
        INTEGER,
        *_zero(
            "stage3_max_reuse_distance",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
        ),
    ),
    sets(
        "zero_optimization.zero_hpz_partition_size",
        SIZE,
        "zero.hpz_partition_size",
        convert=lambda n, _: n or 1,
    ),
    # The codes that DeepSpeed has for them; the flags have others.
    sets(
        "zero_optimization.zero_quantized_weights",
        BOOL,
        "zero.quantized_weights",
        convert=lambda on, _: "int8" if on else "none",
    ),
    sets(
        "zero_optimization.zero_quantized_gradients",
        BOOL,
        "zero.quantized_gradients",
        convert=lambda on, _: "int4" if on else "none",
    ),
    *ignores(_FROZEN, BOOL, *_zero("zero_quantized_nontrainable_weights")),
    *refuses(
        "use `zero_hpz_partition_size`, which keeps gathers within a node",
        INTEGER,
        only(-1, 0),
        *_zero("mics_shard_size"),
    ),
    *refuses(
        "leave it out with `mics_shard_size`", BOOL, only(False), *_zero("mics_hierarchical_params_gather")
    ),
    *ignores(
        "gradients are always kept in flat buffers, and are reduce-scattered wherever they are sharded",
        BOOL,
        *_zero(
            "contiguous_gradients",
            "reduce_scatter",
            "allgather_partitions",
            "round_robin_gradients",
            "use_multi_rank_bucket_allreduce",
            "legacy_stage1",
            "parameter_alignment",
            "stage3_use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
        ),
    ),
    *ignores(
        "a parameter without a gradient takes part with zeros", BOOL, *_zero("ignore_unused_parameters")
    ),
    *ignores(
        "checkpoints do not depend on the layout, and hold the optimizer's own weights",
        BOOL,
        *_zero("elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint"),
    ),
    *(
        KeyRow(
            key,
            BOOL,
            extra="gather_16bit_weights_on_save",
            accepted="a checkpoint always holds whole weights",
        )
        for key in _zero(
            "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"
        )
    ),
    *ignores(
        "parameters are found by hooks on their modules, with checks that are always on",
        BOOL,
        *_zero(
            "override_module_apply",
            "memory_efficient_linear",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
        ),
    ),
    *ignores(
        "gathers go through torch.distributed", ANYTHING, *_zero("sdma_allgather", "sdma_allgather_max_numel")
    ),
    # Examples misspell them; older releases passed over both, and only speed depends on the right ones.
    *ignores("no key has this name: `overlap_comm` is meant", ANYTHING, *_zero("comm_overlap")),
    *ignores(
        "no key has this name: `stage3_param_persistence_threshold` is meant",
        ANYTHING,
        *_zero("stage3_param_persitance_threshold"),
    ),
    *refuses("use `--finetune`, for weights alone", BOOL, only(False), *_zero("ignore_missing_optim_state")),
    *ignores("the norm of the gradients is always computed", BOOL, *_zero("compute_grad_norm")),
    *refuses(
        "codes of gradients are sent without what they left out before; leave it out",
        SECTION,
        None,
        *_zero("zeropp_loco_param"),
    ),
    *ignores(
        "reductions and gathers share the buckets of `zero_optimization.reduce_bucket_size`",
        SIZE,
        "allgather_size",
    ),
    KeyRow(
        "zero_optimization.leaf_module",
        SECTION,
        extra="sections.leaf_module",
        accepted="every rank runs all layers of the models that flags build",
    ),
    *ignores("it matters only with the Muon optimizer", BOOL, *_zero("save_muon_momentum_buffer_in_memory")),
    *ignores("sharded parameters are always gathered", BOOL, "disable_allgather"),
    KeyRow(
        "zero_allow_untested_optimizer",
        BOOL,
        extra="zero_allow_untested_optimizer",
        accepted="every optimizer that flags offer is tested with every stage",
    ),
)


def _every(interval: int, values: object) -> object:
    return ("full", interval) if interval else NOTHING


def _checkpointing(*names: str) -> tuple[str, ...]:
    return tuple(f"activation_checkpointing.{name}" for name in names)


ACTIVATION_ROWS: tuple[KeyRow, ...] = (
    sets("activation_checkpointing.partition_activations", BOOL, "recompute.partition_activations"),
    sets("activation_checkpointing.cpu_checkpointing", BOOL, "recompute.offload"),
    *ignores(
        "memory housekeeping is left to torch",
        BOOL,
        *_checkpointing("contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile"),
    ),
    *ignores(
        "`--recompute-method` and `--recompute-num-layers` say which layers are recomputed",
        INTEGER,
        *_checkpointing("number_checkpoints"),
    ),
)

PIPELINE_ROWS: tuple[KeyRow, ...] = (
    sets(
        "pipeline.activation_checkpoint_interval",
        SIZE,
        "recompute.granularity",
        "recompute.num_layers",
        convert=_every,
    ),
    *ignores(
        "stages are set by `--pipeline-model-parallel-size` and `--pipeline-partition`",
        ANYTHING,
        "pipeline.stages",
        "pipeline.partition",
    ),
    *ignores(
        "initial weights depend on the seed and the parameter's name alone", BOOL, "pipeline.seed_layers"
    ),
    *ignores(
        "how stages send to each other changes only the speed",
        BOOL,
        "pipeline.pipe_partitioned",
        "pipeline.grad_partitioned",
        "pipeline.use_reentrant",
    ),
)
