"""DDP and FSDP2 of torch with AdamW, in the loop that torch's documentation shows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from proofs.fault_contenders.faults import Hook, Small, Trainer, hooked


class Plain(Trainer):
    """A model that `wrap` has wrapped."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], lr: float):
        self.model = wrap(Small())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def step(self, x: Tensor, y: Tensor, hook: Hook | None) -> float:
        self.optimizer.zero_grad()
        loss = (hooked(self.model(x), hook) - y).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def moment(self) -> Tensor:
        return next(iter(self.optimizer.state.values()))["exp_avg"]

    def save(self) -> None:
        found = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(found, f"{self.folder}/{dist.get_rank()}.pt")


def ddp(lr: float, seed: int) -> Plain:
    """Under DDP, which takes over the first rank's weights."""
    return Plain(nn.parallel.DistributedDataParallel, lr)


def fsdp2(lr: float, seed: int) -> Plain:
    """Under FSDP2, each layer sharded."""
    from torch.distributed.fsdp import fully_shard

    def shard(model: nn.Module) -> nn.Module:
        for layer in (model.first, model.second):
            fully_shard(layer)
        return fully_shard(model)

    return Plain(shard, lr)
