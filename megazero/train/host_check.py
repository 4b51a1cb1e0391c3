"""Checks for what slows a training down on its host: a slow precision, too many threads, other jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from megazero.mpu.cores import usable_cores
from megazero.train.matmul_rate import measure_matmul_rate

SLOWER = 0.8
"""Below this share of fp32's rate a narrower precision costs more time than its smaller tensors save."""
BUSY = 0.5
"""Share of the cores that others may use before it is worth a line."""


def precision_remark(dtype: torch.dtype, rate: float, rate_in_fp32: float) -> str | None:
    """A sentence if products in `dtype` are much slower than in fp32 here; rates in FLOP/s."""
    if rate >= SLOWER * rate_in_fp32:
        return None
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype))
    return (
        f"warning: products in {name} run at {rate / rate_in_fp32:.2f} of fp32's rate on this CPU "
        f"({rate / 1e9:.0f} and {rate_in_fp32 / 1e9:.0f} GFLOP/s); training is faster without --{name}"
    )


def ranks_here() -> int:
    """The number of processes of this job on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def crowding_remarks(ranks: int, threads: int, cores: int, others: int | None) -> Iterator[str]:
    """Sentences about cores that are shared.

    Args:
        ranks: processes of this job on this host.
        threads: threads of each process.
        cores: cores that they may use.
        others: tasks besides the job's that ran as it began; None if unknown.
    """
    if ranks * threads > max(cores, ranks):
        yield (
            f"warning: {ranks} ranks with {threads} threads each share {cores} cores; set OMP_NUM_THREADS to "
            f"{max(1, cores // ranks)}"
        )
    elif ranks > cores:
        yield f"warning: {ranks} ranks share {cores} cores, so they take turns; start at most {cores}"
    if others is not None and others > BUSY * cores:
        yield (
            f"warning: other processes keep this machine busy ({others} run on {cores} cores); "
            "times are longer than on a quiet one"
        )


def host_remarks(dtype: torch.dtype, rate: float, device: torch.device, others: int | None) -> list[str]:
    """All remarks for this process; `rate` is the result of `measure_matmul_rate` for `dtype`."""
    if device.type != "cpu":
        return []
    slow = None
    if dtype != torch.float32:
        slow = precision_remark(dtype, rate, measure_matmul_rate(torch.float32, device))
    crowded = crowding_remarks(ranks_here(), torch.get_num_threads(), usable_cores(), others)
    return [*filter(None, [slow]), *crowded]
