"""`get_accelerator()`: the accelerator of this process."""

from __future__ import annotations

import os

import torch

from megazero.deepspeed.accelerator.cpu import Accelerator
from megazero.deepspeed.accelerator.cuda import CudaAccelerator
from megazero.errors import ConfigError


class _CurrentAccelerator:
    """The accelerator of this process, which is chosen once for all callers."""

    def __init__(self) -> None:
        self.accelerator: Accelerator | None = None


_CURRENT = _CurrentAccelerator()


def get_accelerator() -> Accelerator:
    """Return this process's accelerator: by DS_ACCELERATOR, or else CUDA if available, or else the CPU.

    Raises:
        ConfigError: DS_ACCELERATOR is neither cpu nor cuda.
    """
    if _CURRENT.accelerator is None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        wanted = os.environ.get("DS_ACCELERATOR", default)
        kinds = {"cpu": Accelerator, "cuda": CudaAccelerator}
        if wanted not in kinds:
            raise ConfigError(
                f"the environment variable `DS_ACCELERATOR` must be cpu or cuda, but is {wanted!r}; megazero "
                "runs on no other device"
            )
        _CURRENT.accelerator = kinds[wanted]()
    return _CURRENT.accelerator


def set_accelerator(accel_obj: Accelerator) -> None:
    """Set this process's accelerator.

    Raises:
        ConfigError: the object is no `Accelerator`.
    """
    if not isinstance(accel_obj, Accelerator):
        kind = type(accel_obj).__name__
        raise ConfigError(f"`accel_obj` must be a DeepSpeedAccelerator, but is a {kind}; derive it from that")
    _CURRENT.accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether megazero runs on this process's accelerator."""
    return get_accelerator().name() in ("cpu", "cuda")
