"""Progressive layer dropping: what an engine tells a module that drops its own layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerDropSchedule:
    """The share of layers to keep, which falls from 1 to `theta` as `gamma` says.

    Attributes:
        theta: what it comes to.
        gamma: how fast it falls.
    """

    theta: float
    gamma: float

    def kept(self, steps: int) -> float:
        """The share after so many steps; as in DeepSpeed, the first two have all layers."""
        return (1.0 - self.theta) * math.exp(-self.gamma * max(steps - 1, 0)) + self.theta

    def arguments(self, steps: int) -> dict[str, Any]:
        """The keyword arguments of the module's forward in training."""
        return {"progressive_layer_drop": True, "pld_theta": self.kept(steps)}


def layer_drop_of(values: Mapping[str, Any]) -> LayerDropSchedule | None:
    """The schedule in a JSON's settings by path; None if it is off."""
    if not values.get("skipping.progressive_layer_drop"):
        return None
    return LayerDropSchedule(float(values["skipping.pld_theta"]), float(values["skipping.pld_gamma"]))
