"""The ranks that a layer is cut over, and the dtype and device of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from megazero.layers.rows import Spread
from megazero.mpu.context import ParallelContext
from megazero.mpu.grid import Place
from megazero.mpu.group import Group
from megazero.mpu.param_spec import ParamSpec
from megazero.mpu.streams import INLINE, Streams

TokenDispatcher = Literal["alltoall", "allgather"]


@dataclass(frozen=True)
class Placement:
    """The ranks that a layer is cut over, and the dtype and device of its parameters.

    Attributes:
        place: this rank's coordinate along each axis of the mesh, which decides the slices that it holds.
        groups: communicators by name; those named after an axis (``tp``, ``cp``, ``ep``) span its ranks.
        sequence_parallel: whether norm and dropout regions hold `s / tp` positions instead of all.
        dtype: the dtype of parameters and activations.
        device: the device of parameters; ``meta`` builds shapes only.
        token_dispatcher: the collective that takes tokens to the ranks of their experts.
        streams: those of the device.
    """

    place: Place
    groups: Mapping[str, Group]
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    token_dispatcher: TokenDispatcher = "alltoall"
    streams: Streams = INLINE

    @classmethod
    def of(
        cls,
        context: ParallelContext,
        dtype: torch.dtype,
        *,
        sequence_parallel: bool = False,
        token_dispatcher: TokenDispatcher = "alltoall",
    ) -> Placement:
        """The placement of a rank's layers; sequence parallelism over a single rank is turned off."""
        sequence_parallel = sequence_parallel and context.tp.size > 1
        device, streams = context.device, context.streams
        return cls(context.place, context.groups, sequence_parallel, dtype, device, token_dispatcher, streams)

    @property
    def tp(self) -> Group:
        """The ranks that share each layer's weights."""
        return self.groups["tp"]

    @property
    def spread(self) -> Spread:
        """How the rows of hidden states lie on the ranks that share each layer's weights."""
        return Spread(self.tp, self.sequence_parallel)

    def parameter(self, spec: ParamSpec) -> nn.Parameter:
        """An uninitialized parameter that holds this rank's slice and carries `spec`."""
        shape = spec.local_shape(self.place)
        parameter = nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))
        vars(parameter)["spec"] = spec
        return parameter
