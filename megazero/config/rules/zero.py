"""Rules about ZeRO, the types of gradients and weights, and what activation recompute keeps."""

from __future__ import annotations

from collections.abc import Callable

from megazero.config.rules.rule import Case, Rule
from megazero.config.tree import ZeroConfig

_GRADIENT_TYPES = ("zero.grad_reduce_dtype", "zero.grad_accumulation_dtype")


def _hpz_divides(case: Case) -> bool:
    return case.data_parallel is None or case.data_parallel % case.config.zero.hpz_partition_size == 0


def _node_size_divides(case: Case) -> bool:
    return case.data_parallel is None or case.data_parallel % case.config.zero.node_size == 0


def _codes_of_gathered_weights(case: Case) -> bool:
    """Whether what is gathered is not the masters themselves, which would be rounded in every step."""
    zero, precision = case.config.zero, case.config.precision
    return (
        zero.stage in (0, 3) or zero.quantized_weights == "none" or zero.main_params_dtype != precision.dtype
    )


def _unless(quantized: Callable[[ZeroConfig], bool], name: str) -> Callable[[Case], bool]:
    """A predicate: a field has its default, unless there is something that it is about."""
    default = ZeroConfig.model_fields[name].default
    return lambda case: getattr(case.config.zero, name) == default or quantized(case.config.zero)


def _quantizes_gradients(zero: ZeroConfig) -> bool:
    return zero.quantized_gradients != "none"


def _quantizes(zero: ZeroConfig) -> bool:
    return zero.quantized_weights != "none" or _quantizes_gradients(zero)


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
        "codes_need_shards",
        ("zero.quantized_weights", "zero.quantized_gradients", "zero.stage"),
        "`quantized_weights` and `quantized_gradients` must be none unless the ZeRO stage is 1, 2 or 3",
        "add `--zero-stage 1`, 2 or 3, or leave them out",
        lambda c: c.config.zero.stage > 0 or not _quantizes(c.config.zero),
    ),
    Rule(
        "quantized_weights_need_masters",
        ("zero.quantized_weights", "zero.stage", "zero.main_params_dtype", "precision.dtype"),
        "`quantized_weights` must be none at the ZeRO stages 1 and 2 unless `main_params_dtype` differs from "
        "`dtype`, since weights that are their own masters must stay exact",
        "add `--bf16`, choose stage 3 or leave it out",
        _codes_of_gathered_weights,
    ),
    Rule(
        "quantization_block_of_eights",
        ("zero.quantization_block_size",),
        "`quantization_block_size` must be a multiple of 8",
        "choose one such as 256",
        lambda c: c.config.zero.quantization_block_size % 8 == 0,
        lambda c: f"it is {c.config.zero.quantization_block_size}",
    ),
    Rule(
        "quantization_block_needs_codes",
        ("zero.quantization_block_size", "zero.quantized_weights", "zero.quantized_gradients"),
        "`quantization_block_size` must be left out unless weights or gradients are quantized",
        "add `--zero-quantized-weights` or `--zero-quantized-gradients`",
        _unless(_quantizes, "quantization_block_size"),
    ),
    Rule(
        "quantization_rounding_needs_codes",
        ("zero.quantization_rounding", "zero.quantized_gradients"),
        "`quantization_rounding` must be left out unless gradients are quantized",
        "add `--zero-quantized-gradients`",
        _unless(_quantizes_gradients, "quantization_rounding"),
    ),
    Rule(
        "node_size_needs_codes",
        ("zero.node_size", "zero.quantized_gradients"),
        "`node_size` must be left out unless gradients are quantized",
        "add `--zero-quantized-gradients`",
        _unless(_quantizes_gradients, "node_size"),
    ),
    Rule(
        "one_size_of_nodes",
        ("zero.node_size", "zero.hpz_partition_size"),
        "`node_size` must be that of `hpz_partition_size` if both are given",
        "leave one of them out",
        lambda c: (
            1 in (c.config.zero.node_size, c.config.zero.hpz_partition_size)
            or c.config.zero.node_size == c.config.zero.hpz_partition_size
        ),
    ),
    Rule(
        "node_size_divides_data_parallel",
        ("zero.node_size",),
        "`node_size` must divide the data-parallel size",
        "set it to the data-parallel ranks of one node",
        _node_size_divides,
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
    Rule(
        "recomputed_logits_are_of_gpt",
        ("recompute.logits", "model.family", "finetune.task"),
        "`recompute.logits` must be off unless a GPT is pretrained: other heads are small, or need their "
        "logits whole",
        "leave out `--recompute-logits`",
        lambda c: (
            not c.config.recompute.logits
            or (c.config.model.family == "gpt" and c.config.finetune.task is None)
        ),
    ),
    Rule(
        "recomputed_logits_or_distillation",
        ("recompute.logits", "distillation.kd"),
        "`recompute.logits` must be off with `kd`, which compares whole logits",
        "leave out `--recompute-logits`",
        lambda c: not (c.config.recompute.logits and c.config.distillation.kd),
    ),
)
