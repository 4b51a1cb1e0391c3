"""`torch_autocast`: run forward with matmuls in 16 bits, whatever type the weights have."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from megazero.config.deepspeed.sections.training import DTYPE_NAMES
from megazero.deepspeed.config.settings import UserSettings
from megazero.errors import ConfigError
from megazero.train.parts.chunks import DTYPES

SECTION = "torch_autocast"
_KEYS = frozenset({"enabled", "dtype", "lower_precision_safe_modules"})


@dataclass(frozen=True)
class Autocast:
    """The autocast of an engine's forward.

    Attributes:
        dtype: the type of matmuls; None turns autocast off.
    """

    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, settings: UserSettings) -> Autocast:
        """Read the JSON's section. Gradients are still summed over the ranks in the weights' type.

        Raises:
            ConfigError: a key is unknown, or `dtype` is neither the type of 16-bit weights nor, for weights
                in fp32, bf16.
        """
        section: Mapping[str, object] = settings.extras.sections.get(SECTION, {})
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

    def around(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of a forward; on CUDA it overrides the script's own autocast, as in DeepSpeed."""
        if self.dtype is None and not (device.type == "cuda" and torch.is_autocast_enabled("cuda")):
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype is not None)
