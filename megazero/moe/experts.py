"""`Experts`: the MLPs of a layer's experts, each computed on the rows of its tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.autograd import Function

from megazero.layers.activation import activation_of
from megazero.layers.computed_again import saved_as
from megazero.layers.inputs import Deferred
from megazero.layers.placement import Placement
from megazero.mpu.matrices import Matrices
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.ops.autograd import Context, Gradients, apply
from megazero.ops.grouped_linear import (
    Groups,
    add_by_group,
    grouped_linear,
    grouped_outer,
    reads_sizes,
    sums_by_group,
)
from megazero.spec.parts import MlpSpec

_Defer = Callable[[Tensor, Tensor], None]
"""Saves a product's input and output gradient, from which the weight's gradient is computed later."""
GroupedProduct = Callable[[Tensor, Tensor, Groups], Tensor]
"""The product of groups of rows, with the arguments of `grouped_linear`."""
_Ctx = Context[tuple[Groups, _Defer | None, bool]]


class _GroupedLinear(Function):
    """Rows of group e times weight[e].T, plus bias[e]; with `defer`, backward skips the weight's gradient."""

    @staticmethod
    def forward(
        ctx: _Ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: Groups,
        defer: _Defer | None,
        multiply: GroupedProduct,
    ) -> Tensor:
        assert defer is None or not weight.requires_grad, "a deferred weight must be detached"
        ctx.save_for_backward(x, weight)
        ctx.kept = groups, defer, bias is not None
        y = multiply(x, weight, groups)
        if bias is not None:
            add_by_group(y, bias, groups)
        return y

    @staticmethod
    def backward(ctx: _Ctx, grad: Tensor) -> Gradients:
        (x, weight), (groups, defer, has_bias) = ctx.saved_tensors, ctx.kept
        grad = grad.contiguous()
        grad_x = grouped_linear(grad, weight.transpose(1, 2), groups)
        grad_weight = grad_bias = None
        if defer is None:
            grad_weight = grouped_outer(grad, x, groups)
        else:
            defer(x.detach(), grad.detach())
        if has_bias:
            grad_bias = sums_by_group(grad, groups)
        return grad_x, grad_weight, grad_bias, None, None, None


class _GroupedWeightHalf:
    """A deferred weight gradient: a call adds it to `weight.grad` and frees the activations."""

    def __init__(self, weight: nn.Parameter, x: Tensor, grad: Tensor, groups: Groups):
        self.weight = weight
        self._saved: tuple[Tensor, Tensor, Groups] | None = (x, grad, groups)

    def __call__(self) -> nn.Parameter:
        assert self._saved is not None, "this weight gradient has been computed already"
        (x, grad, groups), self._saved = self._saved, None
        gradient = grouped_outer(grad, x, groups).view_as(self.weight)
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad.add_(gradient)
        return self.weight


def _linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    groups: Groups,
    deferred: Deferred | None,
    multiply: GroupedProduct,
) -> Tensor:
    """Multiply each expert's rows x [R, K] by its weight [E, ..., K], middle dims flattened to n: [R, n]."""
    stack = weight.flatten(1, -2)
    vectors = None if bias is None else bias.flatten(1)
    if deferred is None or not x.requires_grad:
        return apply(_GroupedLinear, x, stack, vectors, groups, None, multiply)

    def defer(x: Tensor, grad: Tensor) -> None:
        deferred.append(_GroupedWeightHalf(weight, x, grad, groups))

    return apply(_GroupedLinear, x, stack.detach(), vectors, groups, defer, multiply)


class Experts(nn.Module):
    """This rank's experts of one layer: E/ep experts, each with 1/etp of its inner width f.

    Weights are stacked: up [E, f, h], or [E, 2, f, h] (gate, then value) if gated, and down [E, h, f].

    Args:
        experts: E.
        again: whether backward recomputes the activations.
    """

    def __init__(self, layer: int, experts: int, spec: MlpSpec, placement: Placement, *, again: bool = False):
        super().__init__()
        self.again = again
        self.product: GroupedProduct = grouped_linear
        self.first_slice = placement.place.index("etp") == 0
        stream, name = spec.stream, f"layers.{layer}.mlp.experts"
        width, hidden, inner = spec.width, stream.width, spec.inner
        self.kind = spec.activation
        self.activation = activation_of(spec.activation, f"{name}.activation", placement)
        ep, zeros = Cut(0, "ep"), InitialValues("zeros")
        cuts = (ep, Cut(len(inner), "etp"))
        std, out_std = InitialValues("normal", stream.std), InitialValues("normal", stream.out_std)

        def parameter(
            which: str, shape: tuple[int, ...], init: InitialValues, cuts: tuple[Cut, ...]
        ) -> nn.Parameter:
            decay = which.endswith("weight")
            matrices = Matrices(stacked=len(shape) - 2) if decay else None
            return placement.parameter(
                ParamSpec(f"{name}.{which}", shape, init, cuts, decay, matrices=matrices)
            )

        self.up = parameter("up.weight", (experts, *inner, hidden), std, cuts)
        self.down = parameter("down.weight", (experts, hidden, width), out_std, (ep, Cut(2, "etp")))
        self.up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if stream.bias:
            self.up_bias = parameter("up.bias", (experts, *inner), zeros, cuts)
            self.down_bias = parameter("down.bias", (experts, hidden), zeros, (ep,))

    @property
    def count(self) -> int:
        """Number of experts on this rank."""
        return len(self.up)

    @property
    def reads_sizes(self) -> bool:
        """Whether the products need the numbers of rows on the host (if they are not equal by design)."""
        widths = (self.up.shape[-1], self.down.shape[-1], self.up[0].numel() // self.up.shape[-1])
        return reads_sizes(self.up.device, self.up.dtype, widths)

    def forward(self, rows: Tensor, groups: Groups, deferred: Deferred | None = None) -> Tensor:
        """Compute rows [R, h] -> [R, h]; the caller sums the result over `etp`.

        Args:
            rows: the rows of this rank's experts, sorted by expert.
            deferred: the list to which backward appends weight gradients; None if it computes them.
        """
        inner = _linear(rows, self.up, self.up_bias, groups, deferred, self.product)
        active = self.activation(inner, None)
        with saved_as(self.again, active, lambda: self.activation(inner, None)):
            return _linear(active, self.down, self._bias_once(), groups, deferred, self.product)

    def _bias_once(self) -> Tensor | None:
        """The bias of `down` on the first slice; zeros with the same gradient on the others.

        Outputs are summed over slices, so the bias must be added once, but every copy needs its gradient.
        """
        if self.down_bias is None or self.first_slice:
            return self.down_bias
        return self.down_bias - self.down_bias.detach()
