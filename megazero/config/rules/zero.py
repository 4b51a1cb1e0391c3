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
