"""Constants that scripts import from DeepSpeed, except strings, which are in the tables of names."""

from __future__ import annotations

import importlib.util
from types import MappingProxyType

import torch

from megazero.deepspeed.comm.adopt import TIMEOUT
from megazero.deepspeed.surface import VERSION

VERSION_MAJOR, VERSION_MINOR, VERSION_PATCH = map(int, VERSION.split("."))
GIT_HASH = "megazero"
GIT_BRANCH = "megazero"
HAS_TRITON = importlib.util.find_spec("triton") is not None
DIST = None
"""`deepspeed.dist`; scripts use `deepspeed.comm` instead."""
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
DEFAULT_PG_TIMEOUT = TIMEOUT

ADAM_W_MODE_DEFAULT = True
PARTITIONED_SHAPE = (0,)
MIN_SWAPPABLE_BYTES = 2**20
TORCH_INFO = MappingProxyType(
    {
        "version": ".".join(torch.__version__.split(".")[:2]),
        "bf16_support": True,
        "cuda_version": torch.version.cuda or "0.0",
        "nccl_version": "0.0",
        "hip_version": torch.version.hip or "0.0",
    }
)
"""The versions that torch was built with; 0.0 for a library that is absent."""
