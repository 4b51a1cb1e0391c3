"""Layers of a given model, each replaced by one that holds a slice of its weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.deepspeed.tensor_parallel.slices import sliced_of, whole_weight
from megazero.layers.collectives import gather_features, reduce_from_slices, share_for_parts
from megazero.mpu.group import Group


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix: torch's `Linear`, or the `Conv1D` of GPT-2's code."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


class SlicedLinear(nn.Module):
    """A linear layer with a slice of the weights, which stay the parameters that they were.

    Args:
        linear: the layer that this one replaces.
        group: the ranks that hold the other slices.
    """

    def __init__(self, linear: nn.Module, group: Group):
        super().__init__()
        self.weight: nn.Parameter = linear.get_parameter("weight")
        self.bias: nn.Parameter | None = dict(linear.named_parameters()).get("bias")
        self.group = group
        self.inputs_first = not isinstance(linear, nn.Linear)

    @property
    def in_features(self) -> int:
        """Inputs on this rank."""
        return self.weight.shape[0 if self.inputs_first else 1]

    @property
    def out_features(self) -> int:
        """Outputs on this rank."""
        return self.weight.shape[1 if self.inputs_first else 0]

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ weight`` in the orientation of this layer."""
        return F.linear(x, weight.t() if self.inputs_first else weight, bias)


class ColumnLinear(SlicedLinear):
    """[..., h] -> [..., n/tp]: a part of the outputs.

    Args:
        used: start and width of the outputs that this rank uses, where it holds all of them.
        outputs: the number of outputs of all ranks, if they are to be gathered; None leaves them sliced.
    """

    def __init__(
        self, linear: nn.Module, group: Group, used: tuple[int, int] | None = None, outputs: int | None = None
    ):
        super().__init__(linear, group)
        self.used, self.outputs = used, outputs

    def forward(self, x: Tensor) -> Tensor:
        """The product plus the bias."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.used is not None:
            weight = weight.narrow(1 if self.inputs_first else 0, *self.used)
            bias = None if bias is None else bias.narrow(0, *self.used)
        y = self.product(share_for_parts(x, self.group, given_away=True), weight, bias)
        return y if self.outputs is None else gather_features(y, self.group)[..., : self.outputs]


class RowLinear(SlicedLinear):
    """[..., n/tp] -> [..., h]: products with a part of the inputs, summed over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """The summed product, plus the bias once."""
        y = reduce_from_slices(self.product(x, self.weight, None), self.group, given_away=True)
        return y if self.bias is None else y + self.bias


class Parts:
    """Hooks of a module of which each rank computes a part of a sum, such as experts with sliced weights."""

    def __init__(self, group: Group):
        self.group = group

    def share(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before forward: gradients of what all ranks read must be summed."""

        def shared(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            return share_for_parts(value, self.group) if floating else value

        return tuple(map(shared, args)), {key: shared(value) for key, value in kwargs.items()}

    def total(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """After forward: the sum over the ranks."""
        return reduce_from_slices(output, self.group)


class HeadRows:
    """A hook before an attention's forward, which leaves of one argument the rows of this rank's heads.

    Args:
        name: the argument, [heads, ...], [batch * heads, ...] or [batch, heads, q, k].
        heads: heads of the whole model.
        start: the first one of this rank.
        count: how many it has; those beyond the last are zeros.
    """

    def __init__(self, name: str, heads: int, start: int, count: int):
        self.name, self.heads, self.start, self.count = name, heads, start, count

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See the class."""
        rows = kwargs.get(self.name)
        if rows is None:
            return None
        by_head = rows if rows.ndim == 4 else rows.view(-1, self.heads, *rows.shape[1:])
        if by_head.shape[1] != self.heads:  # one row for all heads
            return None
        start = min(self.start, self.heads)
        own = by_head[:, start : start + self.count]
        if own.shape[1] < self.count:
            missing = own.new_zeros(own.shape[0], self.count - own.shape[1], *own.shape[2:])
            own = torch.cat([own, missing], 1)
        own = own if rows.ndim == 4 else own.reshape(-1, *rows.shape[1:])
        return args, {**kwargs, self.name: own}


def whole_value(value: Tensor, group: Group) -> Tensor:
    """A parameter's or buffer's whole value; all tensor-parallel ranks call this."""
    sliced = sliced_of(value)
    return value.detach() if sliced is None else whole_weight(value.detach(), sliced, group)


@torch.no_grad()
def fill(model: nn.Module, name: str, whole: Tensor, group: Group) -> None:
    """Write a whole weight into a parameter or buffer, this rank's slice of it."""
    params = dict(model.named_parameters(remove_duplicate=False))  # a tied weight has two names
    target = params[name] if name in params else model.get_buffer(name)
    sliced = sliced_of(target)
    own = whole if sliced is None else sliced.of(whole, group.rank, group.size)
    target.copy_(own)
