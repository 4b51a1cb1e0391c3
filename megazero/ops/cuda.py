"""The kernels for GPUs, or why there are none: torch's operators then run instead.

They are looked for where there is a device to run them. The library that setup.py built is taken, or else one
is built for this device on first use, if nvcc is there; without either, there is one warning.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from megazero.kernels import DTYPE_CODES, KernelLibrary
from megazero.kernels.build import ARCHITECTURES, BuildError, build, cuda_recipe, path_of
from megazero.ops.dispatch import CUDA, CallFacts, where

OLDEST_CAPABILITY = (8, 0)


def _load() -> KernelLibrary | None:
    if not torch.cuda.is_available() or os.environ.get("MEGAZERO_CUDA") == "0":
        return None
    capability = torch.cuda.get_device_capability()
    try:
        if capability < OLDEST_CAPABILITY:
            raise BuildError(f"the device has compute capability {capability}, and 8.0 is the oldest served")
        built = path_of(cuda_recipe())
        if not built.is_file():
            built = build(cuda_recipe([_architecture(capability)]))
        return KernelLibrary(built)
    except (BuildError, OSError) as error:
        warnings.warn(f"megazero.ops works without its CUDA kernels: {error}", stacklevel=2)
        return None


def _architecture(capability: tuple[int, int]) -> str:
    """The newest architecture that we compile for and the device runs."""
    fitting = [
        each for each in ARCHITECTURES if int(each.removeprefix("sm_")) <= 10 * capability[0] + capability[1]
    ]
    return fitting[-1]


CUDA_KERNELS = _load()
CUDA_DTYPES = frozenset(DTYPE_CODES)


def cuda_built() -> bool:
    """Whether the kernels are there."""
    return CUDA_KERNELS is not None


def on_cuda_kernels(**own: Any) -> Callable[[CallFacts], bool]:
    """The calls that a CUDA kernel of ours handles: in its dtypes, if built; `own` is as in `where`."""
    return where(CUDA, CUDA_DTYPES, cuda_built, **own)
