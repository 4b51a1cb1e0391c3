"""Examples of an operator's calls: a table beside each operator, for tests and the kernels' report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Results = Tensor | tuple[Tensor, ...] | None
# The bytes that each kernel must move, by the inputs' dtype: inputs, outputs and what is saved, each once.
Moves = Callable[[torch.dtype], Mapping[str, int]]


@dataclass(frozen=True)
class Example:
    """A call of an operator in any dtype, by any of its implementations.

    Attributes:
        label: what distinguishes this example from the operator's others.
        shapes: the shapes of the float inputs.
        call: calls an implementation with the inputs and binds the other arguments, which it makes on the
            inputs' device.
        scale: the spread of the inputs, or of each.
        own: the operator's own facts of this call.
        slack: how much larger than usual the terms are that cancel, and so the rounding.
        differentiable: whether autograd goes through the call; otherwise another operator is its backward.
        moves: the bytes that each kernel must move in this call, forward and backward; None for an example
            that is too small for the kernels' report.
        scattered: kernels whose accesses follow indices in the data -> why their sectors are not ideal.
        dtypes: the dtypes of the inputs in the report.
    """

    label: str
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Results]
    scale: float | tuple[float, ...] = 1.0
    own: Mapping[str, Any] = field(default_factory=dict)
    slack: float = 1.0
    differentiable: bool = True
    moves: Moves | None = None
    scattered: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(
        default_factory=lambda: {"fp32": torch.float32, "bf16": torch.bfloat16}
    )
