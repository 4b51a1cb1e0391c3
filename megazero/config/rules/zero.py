"""Rules about ZeRO, the types of gradients and weights, and what activation recompute keeps."""

from __future__ import annotations

from megazero.config.rules.rule import Case, Rule


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
)

OFFLOAD_RULES: tuple[Rule, ...] = (
    Rule(
        "offload_blocks_are_pages",
        ("offload.block_size",),
        "`block_size` of `offload` must be a multiple of 4096, the unit of unbuffered reads and writes",
        "choose such a number, such as 1048576",
        lambda c: c.config.offload.block_size % 4096 == 0,
    ),
)
