"""Names of DeepSpeed that only libraries ask for: transformers and accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
"""Schedules that a JSON may name; accelerate leaves them to the engine to step."""

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""A file of variables that DeepSpeed's launcher takes to other nodes; accelerate's may write one."""

arange = torch.arange


def keep_constructor(constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The constructor of tensors itself: `zero.Init` replaces none of torch's here."""
    return constructor


def move_to_device(item: Any, device: torch.device | str) -> Any:
    """The item with its tensors on a device, those in nested lists, tuples and dictionaries too."""
    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, dict):
        return {key: move_to_device(value, device) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(value, device) for value in item)
    return item
