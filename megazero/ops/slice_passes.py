"""The passes of one rank over its slice of the logits, and the gradients that they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class SlicePasses:
    """The two passes of one rank over its slice of the logits, [rows, width] of which `columns` count.

    local: int64 [rows], the target's column here, or -1 where another rank holds it.
    statistics(logits, columns, local): each row's maximum (at least the lowest number of its type), its
        sum of exp(logit - maximum), and the target's logit or 0; in the dtype of the loss.
    gradient(logits, columns, local, normalizer, grad, out): writes grad * (exp(logit - normalizer) -
        one_hot(local)), 0 in the padding, to `out`, which is like the logits or the logits themselves;
        normalizer and grad [rows] in the dtype of the loss.
    Logits are contiguous.
    """

    statistics: Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor, Tensor]]
    gradient: Callable[[Tensor, int, Tensor, Tensor, Tensor, Tensor], None]


class RowGradients(NamedTuple):
    """The gradients of rows of logits, [rows], in the dtype of the loss.

    Attributes:
        total: those of loss and log Z together, which the row's softmax is multiplied by.
        log_z: that of log Z alone; None if nothing has read it.
    """

    total: Tensor
    log_z: Tensor | None

    @classmethod
    def of(cls, loss: Tensor | None, log_z: Tensor | None, normalizer: Tensor) -> RowGradients:
        """The gradients from those of `TokenLosses`; None for a result that nothing has read."""
        given = [None if x is None else x.reshape(-1).to(normalizer.dtype) for x in (loss, log_z)]
        total = torch.zeros_like(normalizer) if given[0] is None else given[0]
        return cls(total if given[1] is None else total + given[1], given[1])

    def at(self, rows: slice) -> RowGradients:
        """The gradients of some of the rows."""
        return RowGradients(self.total[rows], None if self.log_z is None else self.log_z[rows])

    def of_logits(
        self,
        passes: SlicePasses,
        logits: Tensor,
        columns: int,
        local: Tensor,
        normalizer: Tensor,
        out: Tensor,
    ) -> None:
        """Write the gradient of logits to `out`, as `SlicePasses.gradient` does.

        It is total x softmax less loss x one_hot: what the pass makes of `total`, and log Z's part of it back
        at the target.
        """
        passes.gradient(logits, columns, local, normalizer, self.total, out)
        if self.log_z is not None:
            back = torch.where(local < 0, 0, self.log_z).to(out.dtype)
            out.scatter_add_(1, local.clamp(min=0).unsqueeze(1), back.unsqueeze(1))


def local_targets(target: Tensor, start: int, columns: int) -> Tensor:
    """The targets' columns in a slice of the vocabulary, int64 [rows]; -1 where it holds another part."""
    held = (target >= start) & (target < start + columns)
    return torch.where(held, target - start, -1).view(-1)
