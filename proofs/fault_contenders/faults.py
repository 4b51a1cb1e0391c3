"""The faults, and what a contender must offer so that they can be put into its training."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

STEPS, AT = 30, 20
TIMEOUT = 8.0  # seconds that a collective may take; the libraries' defaults are 10 to 30 minutes
FAULTS = (
    "other_lr",
    "other_seed",
    "weight_bit",
    "moment_bit",
    "nan_once",
    "nan_for_good",
    "wrong_gradient_once",
    "noise",
    "nan_is_saved",
    "slow",
    "died",
    "stopped",
)

Hook = Callable[[Tensor], Tensor]


class Trainer(ABC):
    """A small training on this rank; the base class draws random vectors."""

    folder = "."  # where `save` writes

    def batch(self, draw: torch.Generator, noise: bool) -> tuple[Tensor, Tensor]:
        """The next inputs and targets; both are useless if `noise`."""
        x = torch.randn(8, 16, generator=draw)
        x = x * 1e4 if noise else x
        return x, x.roll(1, 1)

    @abstractmethod
    def step(self, x: Tensor, y: Tensor, hook: Hook | None) -> float:
        """One update, with `hook` on the gradient of the model's output; returns the loss."""

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """Those of the model, as this rank holds them."""

    @abstractmethod
    def moment(self) -> Tensor:
        """A first moment that this rank holds."""

    @abstractmethod
    def save(self) -> None:
        """Save a checkpoint into `folder`."""


class Small(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def hooked(output: Tensor, hook: Hook | None) -> Tensor:
    """The output, whose gradient passes through the hook."""
    if hook is not None:
        output.register_hook(hook)
    return output


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def put_in(trainer: Trainer, fault: str, step: int) -> None:
    """What goes wrong on the faulty rank before a step."""
    if fault == "weight_bit" and step == AT:
        bits = local(trainer.parameters()[0].data).view(-1)[:1].view(torch.int32)
        bits ^= 1 << 20
    elif fault == "moment_bit" and step == AT:
        bits = local(trainer.moment()).view(-1)[:1].view(torch.int32)
        bits ^= 1 << 20
    elif fault == "nan_is_saved" and step == STEPS - 1:
        local(trainer.moment()).view(-1)[0] = torch.nan
    elif fault == "slow":
        time.sleep(0.1)
    elif fault == "died" and step == AT:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped" and step == AT:
        os.kill(os.getpid(), signal.SIGSTOP)


def wrong_gradient(fault: str, now: list[int]) -> Hook:
    """What a faulty rank makes of the gradient of the model's output in step `now[0]`.

    What goes wrong once does so in one computation: a trainer that repeats the step gets it right.
    """
    done = []

    def wrong(gradient: Tensor) -> Tensor:
        if fault == "nan_for_good" and now[0] >= AT:
            return gradient * torch.nan
        if fault in ("nan_once", "wrong_gradient_once") and now[0] == AT and not done:
            done.append(True)
            return gradient * (torch.nan if fault == "nan_once" else 2.0**20)
        return gradient

    return wrong
