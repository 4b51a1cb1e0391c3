"""The compressed mean as its formula says, in loops over replicas and parameters; fp64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


def compress(x: Tensor, live: Tensor, units: Tensor) -> Tensor:
    """In units of each element: the sign of each live one (plus for 0) times the root of their mean square;
    0 elsewhere.
    """
    chosen = (x / units)[live]
    scale = (chosen.square().sum() / max(1, chosen.numel())).sqrt()
    return torch.where(live, units * torch.where(x >= 0, scale, -scale), 0.0)


@dataclass
class Mean:
    """The mean of one parameter over replicas, with what was left out so far."""

    workers: dict[int, Tensor] = field(default_factory=dict)
    server: Tensor | None = None

    def __call__(
        self, numbers: list[Tensor], live: Tensor | None = None, units: Tensor | None = None
    ) -> Tensor:
        live = torch.ones_like(numbers[0], dtype=torch.bool) if live is None else live
        units = torch.ones_like(numbers[0], dtype=torch.float64) if units is None else units.double()
        total = torch.zeros_like(numbers[0], dtype=torch.float64)
        for rank, mine in enumerate(numbers):
            x = torch.where(live, mine.double() + self.workers.get(rank, torch.zeros(()).double()), 0.0)
            sent = compress(x, live, units)
            self.workers[rank] = x - sent
            total += sent
        y = total / len(numbers) + (torch.zeros_like(total) if self.server is None else self.server)
        sent = compress(y, live, units)
        self.server = y - sent
        return sent
