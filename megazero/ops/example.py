"""Examples of an operator's calls: a table beside each operator, for tests and the kernels' report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.kernels.library import MOST_GROUPS

Results = Tensor | tuple[Tensor, ...] | None
_DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16})


@dataclass(frozen=True)
class Traffic:
    """The memory traffic of an example that is as large as those by which kernels are judged.

    Attributes:
        must_move: the inputs' dtype -> the bytes that each kernel must move, forward and backward: inputs,
            outputs and what is saved for backward, each once.
        dtypes: the dtypes in which it is measured, by the names that they have in the report.
        scattered: kernels whose accesses follow indices in the data -> why their sectors are not ideal.
    """

    must_move: Callable[[torch.dtype], Mapping[str, int]]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=lambda: _DTYPES)
    scattered: Mapping[str, str] = field(default_factory=dict)


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
        traffic: the traffic of a large example, which is for the kernels' report; None for one that is for
            comparing implementations.
    """

    label: str
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Results]
    scale: float | tuple[float, ...] = 1.0
    own: Mapping[str, object] = field(default_factory=dict)
    slack: float = 1.0
    traffic: Traffic | None = None


def sums_moved(width: int) -> int:
    """The bytes of partial sums of `width` columns: MOST_GROUPS groups write them, one block reads them."""
    return 2 * MOST_GROUPS * width * 4
