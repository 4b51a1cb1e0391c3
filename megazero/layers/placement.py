"""What every layer is told besides its own sizes: the ranks it is sliced over, and where it lives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megazero.mpu import Group, ParallelContext


@dataclass(frozen=True)
class Placement:
    """Attributes:
    tp: the ranks that share each layer's weights.
    sequence_parallel: whether norm and dropout regions hold `s / tp` positions instead of all.
    dtype: of parameters and activations.
    device: of parameters; ``meta`` builds shapes only.
    """

    tp: Group
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(
        cls, context: ParallelContext, dtype: torch.dtype, *, sequence_parallel: bool = False
    ) -> Placement:
        """The placement of a rank's layers; sequence parallelism over one rank is none."""
        return cls(context.tp, sequence_parallel and context.tp.size > 1, dtype, context.device)
