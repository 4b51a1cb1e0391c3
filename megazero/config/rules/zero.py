"""Rules about ZeRO, the types of gradients and weights, and what activation recompute keeps."""

from __future__ import annotations

from megazero.config.rules.rule import Case, Rule

_GRADIENT_TYPES = ("zero.grad_reduce_dtype", "zero.grad_accumulation_dtype")


def _hpz_divides(case: Case) -> bool:
    return case.data_parallel is None or case.data_parallel % case.config.zero.hpz_partition_size == 0


ZERO_RULES: tuple[Rule, ...] = (
    Rule(
        "hpz_needs_stage_3",
        ("zero.hpz_partition_size", "zero.stage"),
        "`hpz_partition_size` must be left at 1 unless the ZeRO stage is 3",
        "add `--zero-stage 3` or leave it out",
        lambda c: c.config.zero.hpz_partition_size == 1 or c.config.zero.stage == 3,
    ),
    Rule(
        "hpz_divides_data_parallel",
        ("zero.hpz_partition_size",),
        "`hpz_partition_size` must divide the data-parallel size",
        "set it to the data-parallel ranks of one node",
        _hpz_divides,
        lambda c: f"there are {c.data_parallel} data-parallel ranks",
        reads=(
            "parallel.tensor_model_parallel_size",
            "parallel.pipeline_model_parallel_size",
            "parallel.context_parallel_size",
        ),
    ),
    Rule(
        "fp16_gradients_need_fp16",
        (*_GRADIENT_TYPES, "precision.dtype"),
        "`grad_reduce_dtype` and `grad_accumulation_dtype` must not be fp16 unless `dtype` is fp16, whose "
        "loss scale keeps them in range",
        "choose fp32 or bf16",
        lambda c: (
            c.config.precision.dtype == "fp16"
            or "fp16" not in (c.config.zero.grad_reduce_dtype, c.config.zero.grad_accumulation_dtype)
        ),
    ),
    Rule(
        "main_params_fp32_or_same",
        ("zero.main_params_dtype", "precision.dtype"),
        "`main_params_dtype` must be fp32 or the same as `dtype`",
        "leave it out",
        lambda c: c.config.zero.main_params_dtype in ("fp32", c.config.precision.dtype),
    ),
)

OFFLOAD_RULES: tuple[Rule, ...] = (
    Rule(
        "offloaded_parameters_need_stage_3",
        ("offload.parameters", "zero.stage"),
        "`parameters` of `offload` must be none unless the ZeRO stage is 3, which shards them",
        "add `--zero-stage 3` or leave `--offload-parameters` out",
        lambda c: c.config.offload.parameters == "none" or c.config.zero.stage == 3,
    ),
    Rule(
        "offloaded_gradients_need_offloaded_optimizer",
        ("offload.gradients", "offload.optimizer"),
        "`gradients` of `offload` must be auto or none unless masters and moments are offloaded",
        "add `--offload-optimizer` or leave `--offload-gradients` out",
        lambda c: c.config.offload.optimizer != "none" or c.config.offload.gradients in ("auto", "none"),
    ),
    Rule(
        "offload_fraction_needs_offloaded_optimizer",
        ("offload.fraction", "offload.optimizer"),
        "`fraction` of `offload` must be left at 1 unless masters and moments are offloaded",
        "add `--offload-optimizer` or leave it out",
        lambda c: c.config.offload.optimizer != "none" or c.config.offload.fraction == 1.0,
    ),
    Rule(
        "offload_to_disk_needs_path",
        ("offload.path", "offload.optimizer", "offload.gradients", "offload.parameters"),
        "`path` of `offload` must name a folder on the disk to offload to",
        "add `--offload-path DIR`",
        lambda c: "nvme" not in c.config.offload.places or c.config.offload.path is not None,
    ),
    Rule(
        "offload_blocks_are_pages",
        ("offload.block_size",),
        "`block_size` of `offload` must be a multiple of 4096, the unit of unbuffered reads and writes",
        "choose such a number, such as 1048576",
        lambda c: c.config.offload.block_size % 4096 == 0,
    ),
)

KEPT_ACTIVATION_RULES: tuple[Rule, ...] = (
    Rule(
        "kept_activations_need_full",
        ("recompute.partition_activations", "recompute.offload", "recompute.granularity"),
        "`partition_activations` and `offload` must be off unless `granularity` is full",
        "add `--recompute-granularity full` or leave them out",
        lambda c: (
            c.config.recompute.granularity == "full"
            or not (c.config.recompute.partition_activations or c.config.recompute.offload)
        ),
    ),
    Rule(
        "partition_activations_or_sequence_parallel",
        ("recompute.partition_activations", "parallel.sequence_parallel"),
        "`partition_activations` must be off with `sequence_parallel`, where each rank keeps only its "
        "own part anyway",
        "keep `--sequence-parallel` alone",
        lambda c: not (c.config.recompute.partition_activations and c.config.parallel.sequence_parallel),
    ),
)
