"""`get_accelerator()`: the accelerator of this process."""

from __future__ import annotations

import os

import torch

from megazero.deepspeed.accelerator.cpu import Accelerator
from megazero.deepspeed.accelerator.cuda import CudaAccelerator
from megazero.errors import ConfigError


class _Choice:
    """The accelerator of this process: chosen once, because scripts ask for it anywhere."""

    def __init__(self) -> None:
        self.accelerator: Accelerator | None = None


_CHOICE = _Choice()


def get_accelerator() -> Accelerator:
    """This process's accelerator: CUDA if there is a device, else the CPU; DS_ACCELERATOR decides otherwise.

    Raises:
        ConfigError: DS_ACCELERATOR is neither cpu nor cuda.
    """
    if _CHOICE.accelerator is None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        wanted = os.environ.get("DS_ACCELERATOR", default)
        kinds = {"cpu": Accelerator, "cuda": CudaAccelerator}
        if wanted not in kinds:
            raise ConfigError(
                f"the environment variable `DS_ACCELERATOR` must be cpu or cuda, but is {wanted!r}; megazero "
                "runs on no other device"
            )
        _CHOICE.accelerator = kinds[wanted]()
    return _CHOICE.accelerator


def set_accelerator(accel_obj: Accelerator) -> None:
    """Take this accelerator from now on.

    Raises:
        ConfigError: it is no `Accelerator`.
    """
    if not isinstance(accel_obj, Accelerator):
        kind = type(accel_obj).__name__
        raise ConfigError(f"`accel_obj` must be a DeepSpeedAccelerator, but is a {kind}; derive it from that")
    _CHOICE.accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether megazero runs on it."""
    return get_accelerator().name() in ("cpu", "cuda")
