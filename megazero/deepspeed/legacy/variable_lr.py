"""Learning rates that scale with the batch size."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from megazero.deepspeed.schedules.warmup import RateSchedule
from megazero.errors import ConfigError


def scale_lr(
    base_batch_size: int, batch_size: int, base_lr: float = 1, method: str | None = "linear"
) -> float:
    """Return the learning rate of a batch, given the rate for `base_batch_size` samples.

    ``linear`` scales with the batch size (Goyal et al. 2017), ``sqrt`` with its square root (Krizhevsky
    2014).

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


class _ConstantRates(LRScheduler):
    """Keeps the learning rates constant."""

    def get_lr(self) -> list[float | Tensor]:
        return self.base_lrs


class VariableBatchSizeLR(LRScheduler):
    """Scales another schedule's learning rates by the size of each batch, cycling through `batch_sizes`.

    Args:
        lr_scheduler: the other schedule, whose rates are for `base_batch_size` samples.
        base_batch_size: see `scale_lr`.
        batch_sizes: the size of each batch of an epoch.
        dataloader: the loader; only kept as an attribute.
        lr_scaling_method: see `scale_lr`.
        last_epoch: the number of the batch before the first one.
        verbose: has no effect.
    """

    def __init__(
        self,
        lr_scheduler: LRScheduler | RateSchedule,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: object,
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

    def state_dict(self) -> dict[str, object]:
        """The progress of both schedules."""
        names = ("base_batch_size", "lr_scaling_method", "batch_sizes", "base_lrs", "last_epoch")
        values = {name: getattr(self, name) for name in names}
        return {"base_lr_scheduler": self.base_lr_scheduler.state_dict(), **values}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        own = dict(state_dict)
        self.base_lr_scheduler.load_state_dict(own.pop("base_lr_scheduler"))
        vars(self).update(own)

    def get_last_lr(self) -> list[float | Tensor]:
        """The other schedule's rates, unscaled."""
        return list(self.base_lr_scheduler.get_last_lr())

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the parameter groups."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next batch."""
        unscaled = self.base_lrs if epoch == 0 else self.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, unscaled, strict=True):
            group["lr"] = rate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates the argument `epoch`
            self.base_lr_scheduler.step(epoch)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        for group in self.optimizer.param_groups:
            group["lr"] = scale_lr(self.base_batch_size, size, group["lr"], self.lr_scaling_method)


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: object,
    lr_scheduler_or_optimizer: LRScheduler | RateSchedule | Optimizer,
    lr_scaling_method: str | None = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """Wrap a schedule, or the constant rates of an optimizer, in a `VariableBatchSizeLR`."""
    base = lr_scheduler_or_optimizer
    if isinstance(base, Optimizer):
        base = _ConstantRates(base)
    return VariableBatchSizeLR(base, base_batch_size, batch_sizes, dataloader, lr_scaling_method)
