"""Names around DeepSpeed's patches of torch's constructors, of which `Init` here needs none.

transformers replaces `zero_wrapper_for_fp_tensor_constructor` while it builds a model, so the name exists.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class DeepSpeedTensorOverride(Enum):
    """The properties of new tensors that `Init` may decide."""

    dtype = 1
    device = 2


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor],
    target_fp_dtype: torch.dtype | None = None,
    target_device: torch.device | None = None,
) -> Callable[..., Tensor]:
    """A constructor of torch's whose tensors have this device, and this type if they are floating."""

    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if target_fp_dtype and made.is_floating_point() else made

    return wrapped


def init_context() -> None:
    """Leave or enter `Init` around other code: there is nothing to do."""
