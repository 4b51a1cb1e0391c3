"""`CodedProduct`: the product of a linear layer whose weight is codes (`ops/coded_linear.py`)."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor, nn

from megazero.layers.inputs import Deferred
from megazero.layers.linear import ColumnParallelLinear, RowParallelLinear, column_linear
from megazero.mpu.group import Group
from megazero.ops.coded_linear import CodedWeight, coded_linear

CodedLinear = ColumnParallelLinear | RowParallelLinear


class CodedProduct:
    """A `LinearProduct` with this rank's slice of a weight of codes, forward alone.

    A row's numbers do not depend on other rows. Inputs that are rounded have one scale for a token: a slice
    of inputs asks the other ranks for the largest magnitude of theirs.

    Args:
        weight: the codes.
        sharers: the ranks that have the other slices of the inputs; None if inputs are whole.
    """

    def __init__(self, weight: CodedWeight, sharers: Group | None):
        self.weight, self.sharers = weight, sharers

    def __call__(
        self,
        x: Tensor,
        weight: nn.Parameter | None,
        bias: Tensor | None,
        group: Group,
        sequence_parallel: bool,
        deferred: Deferred | None = None,
    ) -> Tensor:
        """x [s, b, h] times the codes, plus the bias: [s, b, n/tp]; `weight` is not there."""
        assert weight is None, "the codes stand for the weight"
        assert not sequence_parallel, "inference has all rows on each rank"
        most = None
        if self.weight.rounds_inputs and self.sharers is not None and self.sharers.size > 1:
            most = x.abs().amax(-1).float()
            self.sharers.all_reduce(most, "max").wait()
        return coded_linear(x, self.weight, None if bias is None else bias.flatten(), most)


def give_codes(layer: CodedLinear, weight: CodedWeight) -> None:
    """Let a layer compute with codes; its weight is no longer there."""
    layer.product = CodedProduct(weight, layer.tp if isinstance(layer, RowParallelLinear) else None)
    layer.register_parameter("weight", None)


def takes_codes(layer: nn.Module) -> TypeGuard[CodedLinear]:
    """Whether a module is a linear layer that computes its own product, for which codes will do."""
    return isinstance(layer, CodedLinear) and layer.product is column_linear
