"""The seam between an operator and its kernels: a table of implementations, tried from the top.

An operator is a value: its name and a tuple of `Implementation`s, fastest first, the plain reference
last. `choose` is a pure function of the table and one tensor, so which code runs where can be asked
(`explain`) as well as used. A kernel that comes later adds one row and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
TRAINING_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


def always() -> bool:
    """True: an implementation that needs nothing built."""
    return True


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator. `devices` and `dtypes` of None mean any."""

    name: str
    fn: Callable[..., Any]
    available: Callable[[], bool] = always
    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None

    def serves(self, device_type: str, dtype: torch.dtype) -> bool:
        return (
            (self.devices is None or device_type in self.devices)
            and (self.dtypes is None or dtype in self.dtypes)
            and self.available()
        )


@dataclass(frozen=True)
class Operator:
    """A public front and the table behind it; the last implementation is the reference, the truth."""

    name: str
    implementations: tuple[Implementation, ...]

    def __post_init__(self) -> None:
        last = self.implementations[-1]
        assert last.name == "reference", f"{self.name}: the last implementation is the reference"
        anywhere = last.devices is None and last.dtypes is None
        assert anywhere, f"{self.name}: the reference runs on every device and dtype"

    @property
    def reference(self) -> Callable[..., Any]:
        return self.implementations[-1].fn


def select(
    implementations: tuple[Implementation, ...], device_type: str, dtype: torch.dtype
) -> Implementation:
    """The first implementation that serves this device type and dtype; the reference serves all."""
    return next(each for each in implementations if each.serves(device_type, dtype))


def choose(implementations: tuple[Implementation, ...], tensor: Tensor) -> Implementation:
    """The implementation that runs for `tensor`."""
    return select(implementations, tensor.device.type, tensor.dtype)


def explain(operator: Operator) -> str:
    """Which implementation runs where: one line per device type, dtypes grouped.

    Example: `layer_norm on cpu: torch (bfloat16, float16, float32, float64)`.
    """
    lines = []
    for device_type in ("cpu", "cuda"):
        by_name: dict[str, list[str]] = {}
        for dtype in sorted(FLOATS, key=str):
            name = select(operator.implementations, device_type, dtype).name
            by_name.setdefault(name, []).append(str(dtype).removeprefix("torch."))
        choices = ", ".join(f"{name} ({', '.join(dtypes)})" for name, dtypes in by_name.items())
        lines.append(f"{operator.name} on {device_type}: {choices}")
    return "\n".join(lines)
