"""Questions that scripts ask DeepSpeed about torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging import version


def required_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> bool:
    """Whether torch's version is within these bounds, both included."""
    own = version.parse(torch.__version__)
    lowest = min_version is None or version.parse(str(min_version)) <= own
    return lowest and (max_version is None or own <= version.parse(str(max_version)))


def is_compile_supported() -> bool:
    """Whether torch can compile, which every supported version can."""
    return True


def is_compiling() -> bool:
    """Whether torch is compiling this code."""
    return torch.compiler.is_compiling()


def disable(func: Callable[..., Any]) -> Any:
    """The function, which `torch.compile` leaves as it is."""
    return torch.compiler.disable(func)


def get_default_autocast_lower_precision_modules() -> list[str]:
    """The modules whose gradients DeepSpeed sends in 16 bits under `torch_autocast`, by name."""
    return [f"torch.nn.modules.{name}" for name in ("linear.Linear", *(f"conv.Conv{d}d" for d in (1, 2, 3)))]
