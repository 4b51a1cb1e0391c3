"""Rules about ZeRO, the types of gradients and weights, and what activation recompute keeps."""

from __future__ import annotations

from megazero.config.rules.rule import Case, Rule

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


ZERO_RULES: tuple[Rule, ...] = (
    Rule(
        "hpz_divides_data_parallel",
        ("zero.hpz_partition_size",),
        "`hpz_partition_size` must divide the data-parallel size",
        "set it to the data-parallel ranks of one node",
        _hpz_divides,
        lambda c: f"there are {c.data_parallel} data-parallel ranks",
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
        "offloaded_gradients_need_offloaded_optimizer",
        ("offload.gradients", "offload.optimizer"),
        "`gradients` of `offload` must be auto or none unless masters and moments are offloaded",
        "add `--offload-optimizer` or leave `--offload-gradients` out",
        lambda c: c.config.offload.optimizer != "none" or c.config.offload.gradients in ("auto", "none"),
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
