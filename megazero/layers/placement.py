"""The ranks that a layer is cut over, and the dtype and device of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from megazero.config.tree.parallel import CommType, ParallelConfig
from megazero.layers.rows import Spread
from megazero.mpu.context import ParallelContext
from megazero.mpu.grid import Place
from megazero.mpu.group import Group
from megazero.mpu.param_spec import ParamSpec
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.streams import INLINE, Streams

TokenDispatcher = Literal["alltoall", "allgather"]


@dataclass(frozen=True)
class SequenceCut:
    """How sequences are cut over ranks, and what attention exchanges between ranks that share one.

    Attributes:
        over_tp: whether norm and dropout regions hold `s / tp` rows instead of all (sequence parallelism).
        zigzag: whether the columns of a rank of ``cp`` are two runs (see `rows.columns_of`).
        types: what attention exchanges (`CommType`): one for all layers, or one for each.
    """

    over_tp: bool = False
    zigzag: bool = False
    types: tuple[CommType, ...] = ("p2p",)

    @classmethod
    def of(cls, config: ParallelConfig) -> SequenceCut:
        """The cut that a run's configuration asks for.

        A pure all-to-all needs no zigzag, since each rank then has all rows of its heads.
        """
        shared = config.context_parallel_size > 1
        zigzag = shared and any(kind != "a2a" for kind in config.cp_comm_type)
        over_tp = config.sequence_parallel and config.tensor_model_parallel_size > 1
        return cls(over_tp, zigzag, config.cp_comm_type)

    def type_of(self, layer: int) -> CommType:
        """The `CommType` of a layer: what its attention exchanges."""
        return self.types[layer % len(self.types)]


@dataclass(frozen=True)
class Placement:
    """The ranks that a layer is cut over, and the dtype and device of its parameters.

    Attributes:
        place: this rank's coordinate along each axis of the mesh, which decides the slices that it holds.
        groups: communicators by name; those named after an axis (``tp``, ``cp``, ``ep``) span its ranks.
        cut: how sequences are cut over ranks.
        dtype: the dtype of parameters and activations.
        device: the device of parameters; ``meta`` builds shapes only.
        token_dispatcher: the collective that takes tokens to the ranks of their experts.
        streams: those of the device.
    """

    place: Place
    groups: Mapping[str, Group]
    cut: SequenceCut
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
        cut: SequenceCut = SequenceCut(),
        sequence_parallel: bool = False,
        token_dispatcher: TokenDispatcher = "alltoall",
    ) -> Placement:
        """The placement of a rank's layers; sequence parallelism over a single rank is turned off."""
        cut = replace(cut, over_tp=(cut.over_tp or sequence_parallel) and context.tp.size > 1)
        device, streams = context.device, context.streams
        return cls(context.place, context.groups, cut, dtype, device, token_dispatcher, streams)

    @property
    def sequence_parallel(self) -> bool:
        """Whether norm and dropout regions hold a run of this rank's columns instead of all."""
        return self.cut.over_tp

    def without_sequence_parallelism(self) -> Placement:
        """The same placement, where all tensor-parallel ranks hold the same rows."""
        return replace(self, cut=replace(self.cut, over_tp=False))

    def with_whole_sequences(self) -> Placement:
        """The same placement, where each rank holds all rows, and none shares a sequence with another."""
        cp = self.groups["cp"]
        if cp.size == 1 and not self.sequence_parallel:
            return self
        groups = {**self.groups, "cp": SoloGroup("cp", 0), "sequence": self.tp}
        return replace(self, groups=groups, cut=replace(self.cut, over_tp=False, zigzag=False))

    @property
    def tp(self) -> Group:
        """The ranks that share each layer's weights."""
        return self.groups["tp"]

    @property
    def spread(self) -> Spread:
        """How the rows of hidden states lie on the ranks that compute the same sequences."""
        groups, cut = self.groups, self.cut
        return Spread(self.tp, cut.over_tp, groups["cp"], groups["sequence"], cut.zigzag)

    def parameter(self, spec: ParamSpec) -> nn.Parameter:
        """An uninitialized parameter that holds this rank's slice and carries `spec`."""
        shape = spec.local_shape(self.place)
        parameter = nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))
        vars(parameter)["spec"] = spec
        return parameter
