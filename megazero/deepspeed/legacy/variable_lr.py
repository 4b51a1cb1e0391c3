"""Learning rates that follow the sizes of batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from megazero.errors import ConfigError


def scale_lr(
    base_batch_size: int, batch_size: int, base_lr: float = 1, method: str | None = "linear"
) -> float:
    """The learning rate of a batch, from that of a batch of `base_batch_size`.

    ``linear`` grows it with the size (Goyal et al. 2017), ``sqrt`` with its root (Krizhevsky 2014).

    Raises:
        ConfigError: there is no such method.
    """
    ratio = batch_size / base_batch_size
    if method == "linear":
        return base_lr * ratio
    if method == "sqrt":
        return base_lr * math.sqrt(ratio)
    if str(method).lower() == "none":
        return base_lr
    raise ConfigError(f"`lr_scaling_method` must be linear, sqrt or none, but is {method!r}")


class _Constant(LRScheduler):
    """Leaves the learning rates as they are."""

    def get_lr(self) -> list[Any]:
        return self.base_lrs


class VariableBatchSizeLR(LRScheduler):
    """Scales another schedule's learning rates by the sizes of the batches, in turns.

    Args:
        lr_scheduler: the other schedule, of batches of `base_batch_size`.
        base_batch_size: see `scale_lr`.
        batch_sizes: of one pass through the loader.
        dataloader: the loader; kept for whoever looks for it.
        lr_scaling_method: see `scale_lr`.
        last_epoch: the batch before the first.
        verbose: has no effect.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any,
        lr_scaling_method: str | None = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
    ):
        self.base_lr_scheduler, self.dataloader, self.batch_sizes = lr_scheduler, dataloader, batch_sizes
        self.base_batch_size, self.lr_scaling_method = base_batch_size, lr_scaling_method
        self.optimizer = lr_scheduler.optimizer
        self.base_lrs = self.get_lr()
        self.last_epoch = last_epoch
        self._is_initial = False
        self.step(0)

    def state_dict(self) -> dict[str, Any]:
        """The progress of both schedules."""
        own = ("base_batch_size", "lr_scaling_method", "batch_sizes", "base_lrs", "last_epoch")
        return {
            "base_lr_scheduler": self.base_lr_scheduler.state_dict(),
            **{name: getattr(self, name) for name in own},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        own = dict(state_dict)
        self.base_lr_scheduler.load_state_dict(own.pop("base_lr_scheduler"))
        vars(self).update(own)

    def get_last_lr(self) -> list[Any]:
        """The other schedule's rates, before they were scaled."""
        return list(self.base_lr_scheduler.get_last_lr())

    def get_lr(self) -> list[Any]:
        """The rates as they are."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next batch."""
        unscaled = self.base_lrs if epoch == 0 else self.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, unscaled, strict=True):
            group["lr"] = rate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates the number of the step, and counts its own
            self.base_lr_scheduler.step(epoch)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        for group in self.optimizer.param_groups:
            group["lr"] = scale_lr(self.base_batch_size, size, group["lr"], self.lr_scaling_method)


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str | None = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """A `VariableBatchSizeLR` over a schedule, or over the constant rates of an optimizer."""
    given = lr_scheduler_or_optimizer
    base = _Constant(given) if isinstance(given, torch.optim.Optimizer) else given
    return VariableBatchSizeLR(base, base_batch_size, batch_sizes, dataloader, lr_scaling_method)
