"""Lion under DeepSpeed's name, as a torch optimizer: for `megazero.initialize`, or by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megazero.optim import Lion


class FusedLion(torch.optim.Optimizer):
    """DeepSpeed's FusedLion (Chen et al. 2023): see `megazero.optim.Lion`.

    Given to `megazero.initialize`, it names the groups and options. By itself it updates fp32 parameters of
    one process.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: share of the momentum in the sum whose sign is taken, and decay of the momentum.
        weight_decay: decoupled weight decay; groups may have their own.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; return the closure's result, if there is one.

        Raises:
            ValueError: a parameter or a gradient is not fp32, or not contiguous.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule = Lion(*(float(beta) for beta in group["betas"]))
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param] or rule.init_state(param)
                self.state[param] = state
                facts = {"step": 1, "lr": group["lr"], "weight_decays": [group["weight_decay"]]}
                rule.step([param], [param.grad], [state], **facts)
        return loss
