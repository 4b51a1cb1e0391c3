"""The layers that replace those of a user's model, each with a slice of the weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.deepspeed.tensor_parallel.slices import sliced_of, whole_weight
from megazero.layers.collectives import gather_features, reduce_from_slices, share_for_parts
from megazero.mpu.group import Group


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a `nn.Linear` or a `Conv1D` of transformers, whose weight is [in, out]."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


class SlicedLinear(nn.Module):
    """A linear layer with a slice of the weights; the parameters remain the same objects.

    Args:
        linear: the layer that is replaced.
        group: the ranks that the weights are sliced over.
    """

    def __init__(self, linear: nn.Module, group: Group):
        super().__init__()
        self.weight: nn.Parameter = linear.get_parameter("weight")
        self.bias: nn.Parameter | None = dict(linear.named_parameters()).get("bias")
        self.group = group
        self.inputs_first = not isinstance(linear, nn.Linear)

    @property
    def in_features(self) -> int:
        """The number of inputs on this rank."""
        return self.weight.shape[0 if self.inputs_first else 1]

    @property
    def out_features(self) -> int:
        """The number of outputs on this rank."""
        return self.weight.shape[1 if self.inputs_first else 0]

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [..., in] by a weight in this layer's orientation and add the bias."""
        return F.linear(x, weight.t() if self.inputs_first else weight, bias)


class ColumnSlicedLinear(SlicedLinear):
    """Computes a slice of the outputs: [..., h] -> [..., n/tp].

    Args:
        linear, group: see `SlicedLinear`.
        used: the start and the width of the outputs to compute, if this rank stores all of them.
        outputs: the number of outputs to gather from all ranks; None leaves them sliced.
    """

    def __init__(
        self, linear: nn.Module, group: Group, used: tuple[int, int] | None = None, outputs: int | None = None
    ):
        super().__init__(linear, group)
        self.used, self.outputs = used, outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., h] to [..., n/tp], or to [..., n] if outputs are gathered."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.used is not None:
            weight = weight.narrow(1 if self.inputs_first else 0, *self.used)
            bias = None if bias is None else bias.narrow(0, *self.used)
        y = self.product(share_for_parts(x, self.group, given_away=True), weight, bias)
        return y if self.outputs is None else gather_features(y, self.group)[..., : self.outputs]


class RowSlicedLinear(SlicedLinear):
    """Multiplies a slice of the inputs and sums over the ranks: [..., n/tp] -> [..., h]."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., n/tp] to [..., h]; the bias is added once, after the sum."""
        y = reduce_from_slices(self.product(x, self.weight, None), self.group, given_away=True)
        return y if self.bias is None else y + self.bias


class PartialSums:
    """Hooks for a module that computes a part of a sum on each rank, such as experts with sliced weights."""

    def __init__(self, group: Group):
        self.group = group

    def share(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Before forward: make backward sum the inputs' gradients over the ranks."""

        def shared(value: object) -> object:
            if isinstance(value, Tensor) and value.is_floating_point():
                return share_for_parts(value, self.group)
            return value

        return tuple(map(shared, args)), {key: shared(value) for key, value in kwargs.items()}

    def total(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        """After forward: sum the output over the ranks."""
        return reduce_from_slices(output, self.group)


class HeadRows:
    """A hook before an attention's forward, which slices one argument to the rows of this rank's heads.

    Args:
        name: the argument, [heads, ...], [batch * heads, ...] or [batch, heads, q, k].
        heads: the number of heads in the model.
        start: the first head of this rank.
        count: the number of heads on this rank; heads beyond the model's last get zeros.
    """

    def __init__(self, name: str, heads: int, start: int, count: int):
        self.name, self.heads, self.start, self.count = name, heads, start, count

    def __call__(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Return the arguments with the slice; None leaves them unchanged."""
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
    """Gather the whole value of a parameter or buffer; all tensor-parallel ranks call this."""
    sliced = sliced_of(value)
    return value.detach() if sliced is None else whole_weight(value.detach(), sliced, group)


@torch.no_grad()
def fill(model: nn.Module, name: str, whole: Tensor, group: Group) -> None:
    """Copy this rank's slice of a whole weight into a parameter or buffer."""
    params = dict(model.named_parameters(remove_duplicate=False))  # a tied weight has two names
    target = params[name] if name in params else model.get_buffer(name)
    sliced = sliced_of(target)
    own = whole if sliced is None else sliced.of(whole, group.rank, group.size)
    target.copy_(own)
