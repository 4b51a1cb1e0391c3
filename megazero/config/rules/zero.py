"""Rules about ZeRO, the types of gradients and weights, and what activation recompute keeps."""

from __future__ import annotations

from megazero.config.fields import paths
from megazero.config.rules.rule import Case, rule

_OFFLOAD, _PARALLEL, _PRECISION, _ZERO = paths.offload, paths.parallel, paths.precision, paths.zero


def _replicas(case: Case) -> int | None:
    """The number of data x context parallel ranks; None while it is unknown."""
    sharers = case.parallel.context_parallel_size
    return None if case.data_parallel is None else case.data_parallel * sharers


def _divides(case: Case, size: int) -> bool:
    replicas = _replicas(case)
    return replicas is None or replicas % size == 0


def _counted(case: Case) -> str:
    return f"there are {_replicas(case)} such ranks"


@rule(
    (_ZERO.hpz_partition_size, _PARALLEL.context_parallel_size),
    "set it to the number of these ranks on one node",
    detail=_counted,
)
def hpz_divides_data_parallel(case: Case) -> bool:
    """`hpz_partition_size` must divide the number of data-parallel x context-parallel ranks"""
    return _divides(case, case.config.zero.hpz_partition_size)


@rule(
    (_ZERO.quantized_weights, _ZERO.stage, _ZERO.main_params_dtype, _PRECISION.dtype),
    "add `--bf16`, choose stage 3 or leave it out",
)
def quantized_weights_need_masters(case: Case) -> bool:
    """`quantized_weights` must be none at the ZeRO stages 1 and 2 unless `main_params_dtype` differs from
    `dtype`, since weights that are their own masters must stay exact"""
    zero, precision = case.config.zero, case.config.precision
    return (
        zero.stage in (0, 3) or zero.quantized_weights == "none" or zero.main_params_dtype != precision.dtype
    )


@rule(
    (_ZERO.quantization_block_size,),
    "choose one such as 256",
    detail=lambda c: f"it is {c.config.zero.quantization_block_size}",
)
def quantization_block_of_eights(case: Case) -> bool:
    """`quantization_block_size` must be a multiple of 8"""
    return case.config.zero.quantization_block_size % 8 == 0


@rule((_ZERO.node_size, _ZERO.hpz_partition_size), "leave one of them out")
def one_size_of_nodes(case: Case) -> bool:
    """`node_size` must be that of `hpz_partition_size` if both are given"""
    sizes = {case.config.zero.node_size, case.config.zero.hpz_partition_size}
    return 1 in sizes or len(sizes) == 1


@rule(
    (_ZERO.node_size, _PARALLEL.context_parallel_size),
    "set it to the number of these ranks on one node",
    detail=_counted,
)
def node_size_divides_data_parallel(case: Case) -> bool:
    """`node_size` must divide the number of data-parallel x context-parallel ranks"""
    return _divides(case, case.config.zero.node_size)


@rule((_OFFLOAD.block_size,), "choose such a number, such as 1048576")
def offload_blocks_are_pages(case: Case) -> bool:
    """`block_size` of `offload` must be a multiple of 4096, the unit of unbuffered reads and writes"""
    return case.config.offload.block_size % 4096 == 0
