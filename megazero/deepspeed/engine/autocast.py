"""`torch_autocast`: a forward whose products are in 16 bits, whatever type the weights have."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megazero.config.deepspeed.sections.training import DTYPE_NAMES
from megazero.deepspeed.config.settings import UserSettings
from megazero.errors import ConfigError
from megazero.train.parts.chunks import DTYPES

SECTION = "torch_autocast"
_KEYS = frozenset({"enabled", "dtype", "lower_precision_safe_modules"})


@dataclass(frozen=True)
class Autocast:
    """How torch casts within an engine's forward.

    Attributes:
        dtype: the type of products; None casts nothing.
    """

    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, settings: UserSettings) -> Autocast:
        """The JSON's section. Gradients are summed over the ranks in the weights' own type.

        Raises:
            ConfigError: it has unknown keys, or another type than 16-bit weights, or bf16 for fp32.
        """
        section: Mapping[str, Any] = settings.extras.sections.get(SECTION, {})
        problems = [f"unknown key `{SECTION}.{key}`; remove it" for key in section if key not in _KEYS]
        if not section.get("enabled", False):
            section = {}
        weights = settings.precision.dtype
        dtype = "bf16" if weights == "fp32" else weights
        if section and DTYPE_NAMES.get(str(section.get("dtype") or dtype)) != dtype:
            problems.append(
                f"`{SECTION}.dtype` must be {dtype} with weights in {weights}, but is {section['dtype']}; "
                "leave it out, or enable the section of that type, which for fp16 scales the loss"
            )
        if problems:
            raise ConfigError(problems)
        return cls(DTYPES[dtype] if section else None)

    def around(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward: as in DeepSpeed, a script's own around it does not count on CUDA."""
        if self.dtype is None and not (device.type == "cuda" and torch.is_autocast_enabled("cuda")):
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype is not None)
