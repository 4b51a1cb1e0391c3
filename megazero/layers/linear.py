"""Linear layers sliced over the tensor-parallel ranks (Shoeybi et al. 2019).

A column-parallel layer slices its outputs, a row-parallel layer its inputs; the two in sequence need one
communication in each direction.

Backward may be split (Qi et al. 2023): the input half computes the gradients of the input and the bias, with
the communication they need, and the weight half, run later in a pipeline's idle time, computes the weight's
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megazero.layers.collectives import gather_rows, reduce_from_slices, reduce_scatter_sequence
from megazero.layers.inputs import Deferred
from megazero.layers.placement import Placement
from megazero.mpu.group import DONE, Group, Work
from megazero.mpu.matrices import Matrices
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.mpu.solo_group import SoloGroup
from megazero.ops.autograd import Context, Gradients, apply
from megazero.ops.included import Included, makes_sums
from megazero.ops.product_sum import Blas, Product

ONE_MATRIX = Matrices()
"""A weight [..., h] whose rows all belong together."""


Multiply = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""(x [..., h], weight [n, h], bias [n] or None) -> x weight^T + bias, [..., n], as `F.linear` computes it."""

_Defer = Callable[[Tensor, Tensor], None]
_Ctx = Context[tuple[Group, bool]]


class _ColumnLinear(Function):
    """`x @ weight.T + bias`, whose backward communicates while it computes the weight's gradient."""

    @staticmethod
    def forward(
        ctx: _Ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        sequence_parallel: bool,
        multiply: Multiply = F.linear,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kept = group, sequence_parallel
        # Only this rank's part of the sequence is kept; backward gathers the whole again.
        whole = gather_rows(x, group) if sequence_parallel else x
        return multiply(whole, weight, bias)

    @staticmethod
    def backward(ctx: _Ctx, grad: Tensor) -> Gradients:
        (x, weight), (group, sequence_parallel) = ctx.saved_tensors, ctx.kept
        whole = x
        gathering: Work = DONE
        if sequence_parallel:
            whole = x.new_empty(group.size * x.shape[0], *x.shape[1:])
            gathering = group.all_gather(whole, x.contiguous(), async_op=True)
        grad_x, reducing = _reduce_input_grad(grad @ weight, group, sequence_parallel)
        gathering.wait()
        grad_weight = _rows(grad).t() @ _rows(whole)
        grad_bias = _rows(grad).sum(0) if ctx.needs_input_grad[2] else None
        reducing.wait()
        return grad_x, grad_weight, grad_bias, None, None, None


class _InputHalf(Function):
    """`x @ weight.T + bias`, whose backward leaves the weight's gradient to `defer(x, grad)`.

    `weight` must be detached, or autograd would call the hooks of a parameter that gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[Group, bool, _Defer]],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Group,
        sequence_parallel: bool,
        defer: _Defer,
        multiply: Multiply = F.linear,
    ) -> Tensor:
        assert not weight.requires_grad, "the weight half computes this weight's gradient"
        ctx.save_for_backward(x, weight)
        ctx.kept = group, sequence_parallel, defer
        return multiply(gather_rows(x, group) if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Context[tuple[Group, bool, _Defer]], grad: Tensor) -> Gradients:
        (x, weight), (group, sequence_parallel, defer) = ctx.saved_tensors, ctx.kept
        grad_x, reducing = _reduce_input_grad(grad @ weight, group, sequence_parallel)
        # Detached, because `x` would otherwise keep the graph that made it.
        defer(x.detach(), grad.detach())
        grad_bias = _rows(grad).sum(0) if ctx.needs_input_grad[2] else None
        reducing.wait()
        return grad_x, None, grad_bias, None, None, None, None


class _WeightHalf:
    """A call that adds a weight's gradient to its `grad`, once, and releases the activations.

    Args:
        weight: the parameter, [..., h].
        x: [s, b, h], or [s/tp, b, h] with a `group` to gather it over.
        grad: the output's gradient, [s, b, n/tp].
        group: the ranks that hold the other parts of the sequence, or None if `x` is whole. Gathering `x`
            here instead of in the input half means that only 1/tp of it is kept until then, and shortens the
            input half.
    """

    def __init__(self, weight: nn.Parameter, x: Tensor, grad: Tensor, group: Group | None):
        self.weight = weight
        self.group = group
        self._held: tuple[Tensor, Tensor] | None = (x, grad)

    def __call__(self) -> nn.Parameter:
        assert self._held is not None, "this weight gradient has been computed already"
        (x, grad), self._held = self._held, None
        whole = x if self.group is None else gather_rows(x, self.group)
        grad_weight = (_rows(grad).t() @ _rows(whole)).view_as(self.weight)
        if self.weight.grad is None:
            self.weight.grad = grad_weight
        else:
            self.weight.grad.add_(grad_weight)
        return self.weight


def _rows(x: Tensor) -> Tensor:
    """[..., n] -> [rows, n]."""
    return x.reshape(-1, x.shape[-1])


def _reduce_input_grad(partial: Tensor, group: Group, sequence_parallel: bool) -> tuple[Tensor, Work]:
    """Start summing the slices' input gradients [s, b, h]; the result is whole, or [s/tp, b, h]."""
    if not sequence_parallel:
        return partial, group.all_reduce(partial, async_op=True)
    grad_x = partial.new_empty(partial.shape[0] // group.size, *partial.shape[1:])
    return grad_x, group.reduce_scatter(grad_x, partial, async_op=True)


def column_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    group: Group,
    sequence_parallel: bool,
    deferred: Deferred | None = None,
    multiply: Multiply = F.linear,
) -> Tensor:
    """x [s, b, h] (or [s/tp, b, h]) times weight [..., h] -> [s, b, n/tp].

    n/tp is the number of rows of the flattened weight.

    Args:
        weight: the parameter itself, in its own shape.
        bias: [...], in its own shape; detached if the reader of the result makes its gradient.
        deferred: the list to which backward adds the weight half; None if backward computes the weight's
            gradient itself. The bias's gradient is a sum that backward always computes.
        multiply: computes the product, with its own backward where autograd is to see it.
    """
    matrix = weight.flatten(0, -2)
    vector = None if bias is None else bias.flatten()
    # Autograd runs the input half only if the input needs a gradient.
    if deferred is not None and x.requires_grad:
        part = group if sequence_parallel else None

        def defer(x: Tensor, grad: Tensor) -> None:
            deferred.append(_WeightHalf(weight, x, grad, part))

        return apply(_InputHalf, x, matrix.detach(), vector, group, sequence_parallel, defer, multiply)
    if group.size == 1:
        return multiply(x, matrix, vector)
    return apply(_ColumnLinear, x, matrix, vector, group, sequence_parallel, multiply)


LinearProduct = Callable[[Tensor, nn.Parameter, Tensor | None, Group, bool, Deferred | None], Tensor]
"""The product of a linear layer, with the arguments of `column_linear`."""


def sum_in_products(
    blocks: Iterable[nn.Module], collect: Callable[[nn.Parameter, Product], None], blas: Blas
) -> None:
    """Hand weight gradients of linear layers over as products, which are added to sums as they are computed.

    Layers that are called tile by tile are left out: their gradients are sums over tiles.

    Args:
        blocks: the blocks of a chunk.
        collect: takes a weight and the product that is its gradient, in backward.
        blas: adds products to sums.
    """

    def linear(
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        group: Group,
        sequence_parallel: bool,
        deferred: Deferred | None = None,
    ) -> Tensor:
        taken = weight.requires_grad and x.requires_grad and torch.is_grad_enabled()
        if deferred is not None or not taken:
            return column_linear(x, weight, bias, group, sequence_parallel, deferred)

        def hand_over(x: Tensor, grad: Tensor) -> None:
            whole = gather_rows(x, group) if sequence_parallel else x
            collect(weight, Product(_rows(grad), _rows(whole), weight.shape, blas))

        vector = None if bias is None else bias.flatten()
        matrix = weight.detach().flatten(0, -2)
        return apply(_InputHalf, x, matrix, vector, group, sequence_parallel, hand_over)

    for block in blocks:
        for module in block.modules():
            if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                continue
            if module.product is column_linear and not module.in_tiles:
                module.product = linear


class ColumnParallelLinear(nn.Module):
    """[s, b, h] -> [s, b, n/tp], where `shape` = (..., n split over several dims) and weight is shape x h.

    Args:
        name: global name of the layer.
        features: input width h.
        shape: logical shape of the outputs; its dim `shard_dim` is sliced.
        bias: whether the layer has a bias.
        std: standard deviation of the initial weight.
        matrices: the matrices that the weight consists of, by default one; None if it is not to count as a
            matrix.

    Attributes:
        in_tiles: whether a call is for some of the rows, and others follow.
    """

    in_tiles = False

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
        matrices: Matrices | None = ONE_MATRIX,
    ):
        super().__init__()
        self.placement, self.tp, self.split = placement, placement.tp, placement.sequence_parallel
        cuts = (Cut(shard_dim, "tp"),)
        normal, zeros = InitialValues("normal", std), InitialValues("zeros")
        self.weight = placement.parameter(
            ParamSpec(f"{name}.weight", (*shape, features), normal, cuts, matrices=matrices)
        )
        self.bias = None
        if bias:
            self.bias = placement.parameter(ParamSpec(f"{name}.bias", shape, zeros, cuts, weight_decay=False))
        self.local_shape = tuple(self.weight.shape[:-1])
        self.product: LinearProduct = column_linear

    def forward(self, x: Tensor, deferred: Deferred | None = None, *, detached: bool = False) -> Tensor:
        """The product plus the bias; `deferred` is as in `column_linear`.

        detached: whether the caller makes the bias's gradient.
        """
        bias: Tensor | None = self.bias
        if detached and bias is not None:
            bias = bias.detach()
        return self.product(x, self.weight, bias, self.tp, self.split, deferred)


class RowParallelLinear(nn.Module):
    """[s, b, n/tp] -> [s, b, h], or [s/tp, b, h] under sequence parallelism.

    Args:
        name: global name of the layer.
        width: whole input width n, sliced.
        features: output width h.
        bias: whether it has one; it is added once, after the sum over the slices.
        std: standard deviation of the initial weight.

    Attributes:
        in_tiles: whether a call is for some of the rows, and others follow.
        hands_bias: whether the caller may be left with the gradient of a bias that the product includes.
    """

    in_tiles = False
    hands_bias = False

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
        self.placement, self.tp, self.alone = placement, placement.tp, SoloGroup()
        normal, cuts = InitialValues("normal", std), (Cut(1, "tp"),)
        self.weight = placement.parameter(
            ParamSpec(f"{name}.weight", (features, width), normal, cuts, matrices=ONE_MATRIX)
        )
        self.bias = None
        if bias:
            self.bias = placement.parameter(
                ParamSpec(
                    f"{name}.bias",
                    (features,),
                    InitialValues("zeros"),
                    weight_decay=False,
                    partial_grad=placement.sequence_parallel,
                )
            )
        self.product: LinearProduct = column_linear

    def forward(self, x: Tensor, deferred: Deferred | None = None) -> tuple[Tensor, Tensor | Included | None]:
        """The product, and the bias that the caller still has to add (it fuses with what follows).

        Or the one that the product includes, whose gradient the caller has to make. `deferred` is as in
        `column_linear`.
        """
        alone, bias, tp = self.alone, self.bias, self.tp
        if tp.size == 1:
            if bias is None or not self.hands_bias or not makes_sums(x):
                return self.product(x, self.weight, bias, alone, False, deferred), None
            return self.product(x, self.weight, bias.detach(), alone, False, deferred), Included(bias)
        # A slice of the inputs needs nothing from the other ranks until the sum.
        partial = self.product(x, self.weight, None, alone, False, deferred)
        if self.placement.sequence_parallel:
            return reduce_scatter_sequence(partial, tp), self.bias_left
        return reduce_from_slices(partial, tp, given_away=True), self.bias_left

    @property
    def bias_left(self) -> nn.Parameter | None:
        """The bias that the caller still has to add."""
        return None if self.tp.size == 1 else self.bias


class ReplicatedLinear(nn.Module):
    """[..., h] -> [..., n], the same on every tensor-parallel rank.

    Each rank computes all of it from whole inputs, so gradients are whole on each. Between hidden states a
    rank computes the rows that it has, and under sequence parallelism its gradients are those of these rows.

    Args:
        name: global name of the layer.
        features: input width h.
        width: output width n.
        placement: ranks, dtype and device.
        std: standard deviation of the initial weight.
        between: whether it lies between hidden states, where it has no bias.
    """

    def __init__(
        self, name: str, features: int, width: int, placement: Placement, std: float, *, between: bool = False
    ):
        super().__init__()
        normal, partial = InitialValues("normal", std), between and placement.sequence_parallel
        matrices = ONE_MATRIX if between else None
        self.weight = placement.parameter(
            ParamSpec(f"{name}.weight", (width, features), normal, partial_grad=partial, matrices=matrices)
        )
        self.bias = None
        if not between:
            zeros = InitialValues("zeros")
            self.bias = placement.parameter(ParamSpec(f"{name}.bias", (width,), zeros, weight_decay=False))
        self.product: LinearProduct = column_linear

    def forward(self, x: Tensor, deferred: Deferred | None = None) -> Tensor:
        """The product plus the bias; `deferred` is as in `column_linear`."""
        return self.product(x, self.weight, self.bias, SoloGroup(), False, deferred)
