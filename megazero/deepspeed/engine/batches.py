"""`Batches`: an engine's `train_batch` and `eval_batch`, and its dataloaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from megazero.deepspeed.engine.data import (
    Collate,
    RepeatingLoader,
    as_arguments,
    loss_of,
)
from megazero.deepspeed.engine.state import EngineState
from megazero.errors import ConfigError, DataError


class Batches:
    """Training and evaluation of whole batches, and the dataloader of the training data.

    Args:
        engine: the engine, whose forward, backward and step a derived class may override.

    Attributes:
        training_dataloader: the loader of `training_data`, or None.
    """

    def __init__(self, state: EngineState, engine: Any):
        self.state, self._engine = state, engine
        data = state.arguments.training_data
        self.training_dataloader = None if data is None else self.deepspeed_io(data)
        self._batches: Iterator[object] | None = None

    def train_batch(self, data_iter: Iterator[object] | None = None) -> float:
        """One optimizer step on the next micro-batches.

        Args:
            data_iter: yields the micro-batches; None takes them from `training_data`. See `as_arguments` for
                how the model gets them, and `loss_of` for how it returns the loss.

        Returns:
            The mean loss over micro-batches and data-parallel ranks.

        Raises:
            DataError: the iterator ended early.
        """
        losses = []
        for batch in self._take(data_iter):
            args, kwargs = as_arguments(batch, self.state.context.device)
            loss = loss_of(self._engine(*args, **kwargs))
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach().float().reshape(()))
        return self.state.mean_loss(losses)

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[object]) -> float:
        """The mean loss over as many micro-batches as `train_batch` takes, without training.

        Raises:
            DataError: the iterator ended early.
        """
        was_training = self.state.module.training
        self._engine.eval()
        losses = []
        try:
            for batch in self._take(data_iter):
                args, kwargs = as_arguments(batch, self.state.context.device)
                losses.append(loss_of(self._engine(*args, **kwargs)).float().reshape(()))
        finally:
            self._engine.train(was_training)
        return self.state.mean_loss(losses)

    def deepspeed_io(
        self,
        dataset: Dataset[object],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[object] | None = None,
        collate_fn: Collate | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[object]:
        """Make a dataloader of this rank's micro-batches; its samples are the same as in DeepSpeed.

        Samples are shuffled by torch's `DistributedSampler` with seed 0, in every epoch alike unless
        ``dataloader.sampler.set_epoch`` is called. An iterable dataset is not shuffled.

        Args:
            dataset: the samples of all ranks.
            batch_size: samples per batch; by default the micro-batch size.
            route: ``train`` shuffles; ``eval`` and ``predict`` keep the order.
            pin_memory: copy batches to pinned memory, if the device is a CUDA device.
            data_sampler: chooses this rank's samples; by default a `DistributedSampler`.
            collate_fn: collates samples; by default `initialize`'s.
            num_local_io_workers: the number of worker processes; by default this process loads.

        Raises:
            ConfigError: `route` is none of these.
        """
        if route not in ("train", "eval", "predict"):
            raise ConfigError(f"`route` must be train, eval or predict, but is {route!r}; choose one")
        context, shuffle = self.state.context, route == "train"
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data = context.data
            data_sampler = DistributedSampler(dataset, data.size, data.rank, shuffle=shuffle)
        return DataLoader(
            dataset,
            batch_size=batch_size or self.state.settings.batch.micro,
            sampler=data_sampler,
            collate_fn=collate_fn or self.state.arguments.collate_fn,
            drop_last=self.state.settings.extras.dataloader_drop_last,
            pin_memory=pin_memory and context.device.type == "cuda",
            num_workers=num_local_io_workers or 0,
        )

    def _take(self, data_iter: Iterator[object] | None) -> Iterator[object]:
        """The micro-batches of one accumulation."""
        if data_iter is None:
            if self.training_dataloader is None:
                raise DataError("`data_iter` must be given if `initialize` was given no `training_data`")
            self._batches = self._batches or RepeatingLoader(self.training_dataloader)
            data_iter = self._batches
        count = self.state.settings.batch.accumulation
        for number in range(count):
            try:
                batch = next(data_iter)
            except StopIteration:
                raise DataError(
                    f"`data_iter` must give {count} micro-batches, but ended after {number}; wrap the loader "
                    "in `RepeatingLoader` or give it more data"
                ) from None
            yield batch
