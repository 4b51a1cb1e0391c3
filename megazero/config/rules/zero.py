"""Rules about ZeRO, the types of gradients and weights, and what activation recompute keeps."""

from __future__ import annotations

from megazero.config.fields import paths
from megazero.config.rules.rule import Case, Rule

_OFFLOAD, _PARALLEL, _PRECISION, _ZERO = paths.offload, paths.parallel, paths.precision, paths.zero


def _replicas(case: Case) -> int | None:
    """Ranks that hold the same parameters of layers without experts; None while unknown."""
    sharers = case.config.parallel.context_parallel_size
    return None if case.data_parallel is None else case.data_parallel * sharers


def _divides(case: Case, size: int) -> bool:
    replicas = _replicas(case)
    return replicas is None or replicas % size == 0


def _counted(case: Case) -> str:
    return f"there are {_replicas(case)} such ranks"


def _codes_of_gathered_weights(case: Case) -> bool:
    """Whether what is gathered is not the masters themselves, which would be rounded in every step."""
    zero, precision = case.config.zero, case.config.precision
    return (
        zero.stage in (0, 3) or zero.quantized_weights == "none" or zero.main_params_dtype != precision.dtype
    )


ZERO_RULES: tuple[Rule, ...] = (
    Rule(
        "hpz_divides_data_parallel",
        (_ZERO.hpz_partition_size, _PARALLEL.context_parallel_size),
        "`hpz_partition_size` must divide the number of data-parallel x context-parallel ranks",
        "set it to the number of these ranks on one node",
        lambda c: _divides(c, c.config.zero.hpz_partition_size),
        _counted,
    ),
    Rule(
        "quantized_weights_need_masters",
        (_ZERO.quantized_weights, _ZERO.stage, _ZERO.main_params_dtype, _PRECISION.dtype),
        "`quantized_weights` must be none at the ZeRO stages 1 and 2 unless `main_params_dtype` differs from "
        "`dtype`, since weights that are their own masters must stay exact",
        "add `--bf16`, choose stage 3 or leave it out",
        _codes_of_gathered_weights,
    ),
    Rule(
        "quantization_block_of_eights",
        (_ZERO.quantization_block_size,),
        "`quantization_block_size` must be a multiple of 8",
        "choose one such as 256",
        lambda c: c.config.zero.quantization_block_size % 8 == 0,
        lambda c: f"it is {c.config.zero.quantization_block_size}",
    ),
    Rule(
        "one_size_of_nodes",
        (_ZERO.node_size, _ZERO.hpz_partition_size),
        "`node_size` must be that of `hpz_partition_size` if both are given",
        "leave one of them out",
        lambda c: (
            1 in (c.config.zero.node_size, c.config.zero.hpz_partition_size)
            or c.config.zero.node_size == c.config.zero.hpz_partition_size
        ),
    ),
    Rule(
        "node_size_divides_data_parallel",
        (_ZERO.node_size, _PARALLEL.context_parallel_size),
        "`node_size` must divide the number of data-parallel x context-parallel ranks",
        "set it to the number of these ranks on one node",
        lambda c: _divides(c, c.config.zero.node_size),
        _counted,
    ),
)

OFFLOAD_RULES: tuple[Rule, ...] = (
    Rule(
        "offload_blocks_are_pages",
        (_OFFLOAD.block_size,),
        "`block_size` of `offload` must be a multiple of 4096, the unit of unbuffered reads and writes",
        "choose such a number, such as 1048576",
        lambda c: c.config.offload.block_size % 4096 == 0,
    ),
)
