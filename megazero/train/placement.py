"""The placement of this rank's layers: their ranks, device and dtype."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from megazero.config.tree import Config
from megazero.layers import Placement
from megazero.mpu import ParallelContext

DTYPES = MappingProxyType({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16})


def placement_of(config: Config, context: ParallelContext, device: torch.device) -> Placement:
    """The placement of this rank's layers on a device."""
    dtype = DTYPES[config.precision.dtype]
    placement = Placement.of(
        context,
        dtype,
        sequence_parallel=config.parallel.sequence_parallel,
        token_dispatcher=config.parallel.moe_token_dispatcher_type,
    )
    return replace(placement, device=device)
