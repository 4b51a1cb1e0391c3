"""Linear layers sliced over the tensor-parallel ranks (Shoeybi et al. 2019).

A column-parallel layer slices its outputs, a row-parallel one its inputs; one after the other needs one
communication in each direction.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megazero.layers.collectives import gather_rows, reduce_from_slices, reduce_scatter_sequence
from megazero.layers.placement import Placement
from megazero.mpu import DONE, Group, Init, ParamSpec, new_parameter


class _ColumnLinear(Function):
    """`x @ weight.T + bias`, whose backward communicates while it computes the weight's gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel, ctx.has_bias = group, sequence_parallel, bias is not None
        # Only this rank's part of the sequence is kept; backward gathers the rest again.
        whole = gather_rows(x, group) if sequence_parallel else x
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        group: Group = ctx.group
        whole, gathering = x, DONE
        if ctx.sequence_parallel:
            whole = x.new_empty(group.size * x.shape[0], *x.shape[1:])
            gathering = group.all_gather(whole, x.contiguous(), async_op=True)
        partial = grad @ weight
        if ctx.sequence_parallel:
            grad_x = x.new_empty(x.shape)
            reducing = group.reduce_scatter(grad_x, partial, async_op=True)
        else:
            grad_x = partial
            reducing = group.all_reduce(grad_x, async_op=True)
        gathering.wait()
        rows = grad.reshape(-1, grad.shape[-1])
        grad_weight = rows.t() @ whole.reshape(-1, whole.shape[-1])
        grad_bias = rows.sum(0) if ctx.has_bias else None
        reducing.wait()
        return grad_x, grad_weight, grad_bias, None, None


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence_parallel: bool
) -> Tensor:
    """x [s, b, h] (or [s/tp, b, h]) times weight [n/tp, h] -> [s, b, n/tp]."""
    if group.size == 1:
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, group, sequence_parallel)


class ColumnParallelLinear(nn.Module):
    """[s, b, h] -> [s, b, n/tp], where `shape` = (..., n split over several dims) and weight is shape x h.

    Args:
        name: global name of the layer.
        features: input width h.
        shape: logical shape of the outputs; dim `shard_dim` of it is sliced.
        bias: whether it has one.
        std: standard deviation of the initial weight.
    """

    def __init__(
        self,
        name: str,
        features: int,
        shape: tuple[int, ...],
        placement: Placement,
        *,
        shard_dim: int = 0,
        bias: bool = True,
        std: float = 0.02,
    ):
        super().__init__()
        self.placement = placement
        make = lambda spec: new_parameter(spec, placement.tp.size, placement.dtype, placement.device)  # noqa: E731
        self.weight = make(ParamSpec(f"{name}.weight", (*shape, features), Init("normal", std), shard_dim))
        self.bias = None
        if bias:
            self.bias = make(ParamSpec(f"{name}.bias", shape, Init("zeros"), shard_dim, weight_decay=False))
        self.local_shape = tuple(self.weight.shape[:-1])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(-1, self.weight.shape[-1])
        bias = None if self.bias is None else self.bias.view(-1)
        return column_linear(x, weight, bias, self.placement.tp, self.placement.sequence_parallel)


class RowParallelLinear(nn.Module):
    """[s, b, n/tp] -> [s, b, h], or [s/tp, b, h] under sequence parallelism.

    Args:
        name: global name of the layer.
        width: whole input width n, sliced.
        features: output width h.
        bias: whether it has one; it is added once, after the sum over the slices.
        std: standard deviation of the initial weight.
    """

    def __init__(
        self,
        name: str,
        width: int,
        features: int,
        placement: Placement,
        *,
        bias: bool = True,
        std: float = 0.02,
    ):
        super().__init__()
        self.placement = placement
        make = lambda spec: new_parameter(spec, placement.tp.size, placement.dtype, placement.device)  # noqa: E731
        self.weight = make(ParamSpec(f"{name}.weight", (features, width), Init("normal", std), 1))
        self.bias = None
        if bias:
            self.bias = make(
                ParamSpec(
                    f"{name}.bias",
                    (features,),
                    Init("zeros"),
                    weight_decay=False,
                    partial_grad=placement.sequence_parallel,
                )
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The product, and the bias that the caller has still to add (it fuses with what follows)."""
        if self.placement.tp.size == 1:
            return F.linear(x, self.weight, self.bias), None
        partial = F.linear(x, self.weight)
        reduce = reduce_scatter_sequence if self.placement.sequence_parallel else reduce_from_slices
        return reduce(partial, self.placement.tp), self.bias


def residual_std(std: float, num_layers: int) -> float:
    """Initial standard deviation of layers that write to the residual stream (GPT-2, Radford et al. 2019)."""
    return std / math.sqrt(2 * num_layers)
