"""`torch_autocast`: a forward whose products are in 16 bits while the weights stay in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megazero.deepspeed.settings import UserSettings
from megazero.errors import ConfigError

SECTION = "torch_autocast"
_KEYS = frozenset({"enabled", "dtype", "lower_precision_safe_modules"})
_BF16 = frozenset({"bf16", "bfloat16", "torch.bfloat16"})


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
            ConfigError: it has unknown keys, a type other than bfloat16, or stands beside fp16 or bf16.
        """
        section: Mapping[str, Any] = settings.extras.sections.get(SECTION, {})
        problems = [f"unknown key `{SECTION}.{key}`; remove it" for key in section if key not in _KEYS]
        if not section.get("enabled", False):
            section = {}
        elif settings.precision.dtype != "fp32":
            dtype = settings.precision.dtype
            problems.append(f"`{SECTION}.enabled` must be false with `{dtype}`, but is true; leave one out")
        if section and section.get("dtype", "bf16") not in _BF16:
            problems.append(
                f"`{SECTION}.dtype` must be bfloat16, but is {section['dtype']}; for fp16 use the section "
                "`fp16`, which scales the loss"
            )
        if problems:
            raise ConfigError(problems)
        return cls(torch.bfloat16 if section else None)

    def around(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward: as in DeepSpeed, a script's own around it does not count on CUDA."""
        if self.dtype is None and not (device.type == "cuda" and torch.is_autocast_enabled("cuda")):
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype is not None)
