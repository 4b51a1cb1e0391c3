"""`ParamSpec`: every parameter says where it lives, so that nobody guesses from names or shapes.

Gradient reduction, the gradient norm, sharding, checkpoints and conversion all read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megazero.mpu.group import Group


@dataclass(frozen=True)
class Init:
    """Initial values: `kind` with standard deviation `std` where normal."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True)
class ParamSpec:
    """Where one parameter lives.

    Attributes:
        name: global name, the same on every layout, such as ``layers.3.mlp.up.weight``.
        shape: logical shape of the whole parameter, without padding.
        init: initial values, a function of (seed, name) alone.
        shard_dim: the dim sliced evenly over the tensor-parallel ranks, or None where each holds all.
        padded_size: allocated size of `shard_dim` where it exceeds the logical one (a padded vocabulary).
        weight_decay: whether the optimizer decays it.
        expert: whether it belongs to an expert, and is replicated over fewer ranks than dense ones.
        tied_with: global name of the parameter that this is a copy of on another pipeline stage.
        shared: whether another pipeline stage holds a copy (both are marked); their gradients are summed.
        partial_grad: each tensor-parallel rank's gradient covers its part of the sequence only (sequence
            parallelism), so the gradients must be summed over them.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    shard_dim: int | None = None
    padded_size: int | None = None
    weight_decay: bool = True
    expert: bool = False
    tied_with: str | None = None
    shared: bool = False
    partial_grad: bool = False

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter as allocated."""
        if self.shard_dim is None or self.padded_size is None:
            return self.shape
        return (*self.shape[: self.shard_dim], self.padded_size, *self.shape[self.shard_dim + 1 :])

    def local_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape of one tensor-parallel rank's slice."""
        if self.shard_dim is None:
            return self.shape
        shape = list(self.padded_shape)
        assert shape[self.shard_dim] % tp_size == 0, f"{self.name}: {shape} does not divide by {tp_size}"
        shape[self.shard_dim] //= tp_size
        return tuple(shape)

    def offset(self, tp_rank: int, tp_size: int) -> tuple[int, ...]:
        """Where that slice starts in the whole parameter."""
        start = [0] * len(self.shape)
        if self.shard_dim is not None:
            start[self.shard_dim] = tp_rank * self.local_shape(tp_size)[self.shard_dim]
        return tuple(start)

    def counts_on(self, tp_rank: int) -> bool:
        """Whether this tensor-parallel rank's copy counts in sums over the whole model (norms)."""
        return (self.shard_dim is not None or tp_rank == 0) and self.tied_with is None

    def unshard(self, local: Tensor, tp: Group) -> Tensor:
        """The whole logical tensor, without padding, from every tensor-parallel rank's slice."""
        if self.shard_dim is None:
            return local
        slices = local.new_empty(tp.size * local.numel())
        tp.all_gather(slices, local.contiguous().view(-1)).wait()
        whole = torch.cat(list(slices.view(tp.size, *local.shape)), self.shard_dim)
        return whole.narrow(self.shard_dim, 0, self.shape[self.shard_dim])

    def shard(self, whole: Tensor, tp_rank: int, tp_size: int) -> Tensor:
        """One tensor-parallel rank's slice of a whole logical tensor; padding is zero."""
        if self.shard_dim is None:
            return whole
        size = self.local_shape(tp_size)[self.shard_dim]
        start = tp_rank * size
        present = max(0, min(size, self.shape[self.shard_dim] - start))
        local = whole.new_zeros(self.local_shape(tp_size))
        if present:
            local.narrow(self.shard_dim, 0, present).copy_(whole.narrow(self.shard_dim, start, present))
        return local


def new_parameter(
    spec: ParamSpec, tp_size: int, dtype: torch.dtype, device: torch.device | str
) -> nn.Parameter:
    """An uninitialized parameter of `spec`'s local shape that carries its spec."""
    parameter = nn.Parameter(torch.empty(spec.local_shape(tp_size), dtype=dtype, device=device))
    parameter.spec = spec
    return parameter


def spec_of(parameter: nn.Parameter) -> ParamSpec:
    """The spec that `new_parameter` attached."""
    spec = getattr(parameter, "spec", None)
    assert isinstance(spec, ParamSpec), f"a parameter of shape {tuple(parameter.shape)} has no ParamSpec"
    return spec
