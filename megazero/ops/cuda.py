"""The kernels for GPUs, loaded at the first call on a GPU; without them, torch's operators run instead.

A process that has a device loads a library that exists already, from the wheel or an earlier build. If there
is none and nvcc is installed, it builds one for its device. Otherwise it warns once. Importing this module
does none of that, and asks no driver.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch

from megazero.kernels.build import (
    ARCHITECTURES,
    BuildError,
    build,
    built_cuda_library,
    code_for,
    cuda_recipe,
    known_architectures,
)
from megazero.kernels.library import DTYPE_CODES, KernelLibrary, StillKernels
from megazero.ops.dispatch import CUDA, META, Implementation, Requirement, Requirements, where

OLDEST_CAPABILITY = divmod(int(ARCHITECTURES[0].removeprefix("sm_")), 10)


def load_cuda_kernels() -> KernelLibrary | None:
    """Load the library for this process's devices.

    Return None without a device or with MEGAZERO_CUDA=0, and also, after a warning with the reason, if it
    cannot be loaded.
    """
    if not torch.cuda.is_available() or os.environ.get("MEGAZERO_CUDA") == "0":
        return None
    try:
        return cuda_library(torch.cuda.get_device_capability())
    except (BuildError, OSError) as error:
        warnings.warn(
            f"megazero.ops works without its CUDA kernels: {error} torch's operators run instead.",
            stacklevel=2,
        )
        return None


def cuda_library(capability: tuple[int, int]) -> KernelLibrary:
    """Load the kernels for devices of a compute capability, built if need be.

    Raises BuildError if they cannot be had, with the reason, and OSError if the library cannot be opened.
    """
    code_for(capability, ARCHITECTURES)  # refuses a device that is older than all of them
    path = built_cuda_library(capability)
    if path is None:
        path = build(cuda_recipe([code_for(capability, known_architectures())]))
    library = KernelLibrary(path)
    reason = library.driver_error()
    if reason is not None:
        raise BuildError(
            f"The driver must suit the toolkit that compiled `{path.name}`, but CUDA says: {reason}."
        )
    return library


class _Backend:
    """The library of this process, loaded once."""

    @cached_property
    def library(self) -> KernelLibrary | None:
        """The library, loaded at first use; None if there is none."""
        return load_cuda_kernels()


_BACKEND = _Backend()
CUDA_DTYPES = frozenset(DTYPE_CODES)


def cuda_kernels() -> KernelLibrary:
    """The library of this process. Raises RuntimeError if it has none."""
    library = _BACKEND.library
    if library is None:
        raise RuntimeError("the CUDA kernels must be built to be launched, but are not; see `megazero env`.")
    return library


def cuda_built() -> bool:
    """Whether this process has the kernels; loads them at the first call."""
    return _BACKEND.library is not None


def kernel_build() -> str:
    """The hash of the sources and the commands that made the kernels, whatever devices they are for; or that
    there are none.
    """
    return cuda_kernels().path.stem.split("-")[1] if cuda_built() else "missing"


def on_cuda_kernels(dtypes: frozenset[torch.dtype] = CUDA_DTYPES, **own: object) -> Requirements:
    """The calls that a CUDA kernel of ours handles: in these dtypes, if built; `own` is as in `where`."""
    return where(CUDA, dtypes, cuda_built, **own)


STILL_KERNELS = StillKernels()


def planned(
    fn: Callable[..., object],
    dtypes: frozenset[torch.dtype] = CUDA_DTYPES,
    *further: Requirement,
    **own: Any,
) -> Implementation[Any]:
    """A row for the meta device: allocates what the CUDA implementation `fn` would, and launches nothing.

    So a plan counts the memory that kernels take, not that of references. `own` is as in `where`.
    """
    return Implementation(
        "planned", partial(fn, kernels=STILL_KERNELS), where(META, dtypes, **own).needing(*further)
    )
