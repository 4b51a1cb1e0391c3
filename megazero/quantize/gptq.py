"""GPTQ: columns are rounded one after another, and the rest makes up for each error.

(Frantar et al. 2022, arXiv:2210.17323, which solves the problem of Hassibi & Stork 1993 column by column.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.errors import NumericsError
from megazero.formats.hf.packed import QuantizedWeight
from megazero.quantize.grid import Grid

_BLOCK = 128  # columns whose errors reach the columns behind them in one product
_DAMPINGS = 6  # how often the damping is raised tenfold


@dataclass(frozen=True)
class Gptq:
    """Settings of GPTQ.

    Attributes:
        damping: part of the mean of the diagonal that is added to it.
        by_activity: round the columns with the largest inputs first; scales are then those of the weight as
            it was, so that columns need no order where they are used.
    """

    damping: float = 0.01
    by_activity: bool = False

    def __call__(self, name: str, weight: Tensor, gram: Tensor, grid: Grid) -> QuantizedWeight:
        """Quantize a weight.

        Args:
            name: for messages.
            weight: float64 [rows, n].
            gram: sum of the products of inputs, float64 [n, n]; any factor gives the same codes.
            grid: the codes.

        Raises:
            NumericsError: the sum is not that of finite inputs.
        """
        columns = weight.shape[1]
        gram, weight = gram.clone(), weight.clone()
        idle = gram.diagonal() == 0
        gram.diagonal()[idle] = 1
        weight[:, idle] = 0
        group = grid.group or columns
        width = _BLOCK if grid.group is None else max(group, _BLOCK // group * group)
        # The scales of a row are those of the weight as it is; those of a group, of what errors make of it.
        fixed = grid.scales(weight) if self.by_activity or grid.group is None else None
        order = torch.arange(columns, device=weight.device)
        if self.by_activity:
            order = torch.argsort(gram.diagonal(), descending=True, stable=True)
            weight, gram = weight[:, order], gram[order][:, order]
        upper = self._factor(name, gram)
        codes, scales = torch.empty_like(weight), weight.new_empty(len(weight), columns // group)
        places = (order // group).tolist()
        for start in range(0, columns, width):
            stop = min(start + width, columns)
            block, errors = weight[:, start:stop].clone(), weight.new_empty(len(weight), stop - start)
            for i in range(stop - start):
                place = places[start + i]
                if fixed is not None:
                    scales[:, place] = fixed[:, place]
                elif i % group == 0:
                    scales[:, place] = grid.scales(block[:, i : i + group])[:, 0]
                column, scale = block[:, i], scales[:, place]
                codes[:, start + i] = grid.codes(column, scale)
                errors[:, i] = (column - codes[:, start + i] * scale) / upper[start + i, start + i]
                block[:, i + 1 :] -= torch.outer(errors[:, i], upper[start + i, start + i + 1 : stop])
            weight[:, stop:] -= errors @ upper[start:stop, stop:]
        codes = codes[:, torch.argsort(order)]
        return QuantizedWeight(codes.to(torch.int8), scales.to(grid.dtype), grid.bits)

    def _factor(self, name: str, gram: Tensor) -> Tensor:
        """The upper Cholesky factor of the damped inverse; more damping where that fails."""
        mean = float(gram.diagonal().mean())
        upper: Tensor
        for raised in range(_DAMPINGS):
            damped = gram.clone()
            damped.diagonal().add_(self.damping * 10**raised * mean)
            lower, failed = torch.linalg.cholesky_ex(damped)
            if not int(failed):
                upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
                if not int(failed):
                    return upper
        raise NumericsError(
            f"the inputs of `{name}` must have finite products, but these have no inverse with any damping; "
            "the model is damaged, or `--damping` is too small"
        )
