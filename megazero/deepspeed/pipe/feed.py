"""`PipelineFeed`: a pipeline's micro-batches; the first stage reads inputs, the last one labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from megazero.deepspeed.pipe.chunk import StageBatch
from megazero.deepspeed.pipe.module import PipelineStage
from megazero.errors import DataError

BatchFn = Callable[[Any], object]
"""Makes (inputs, labels) of a micro-batch."""


class DataEnded(DataError, StopIteration):
    """The data iterator ended within a batch; a `StopIteration` too, which scripts catch."""


class StagePosition:
    """The members of a `PipelineEngine` that concern the rank's position in the pipeline.

    Attributes:
        grid: this rank's coordinates and groups.
        num_stages: the number of stages.
        stage_id: this rank's stage.
        is_pipe_parallel: whether there is more than one stage.
        is_data_parallel: whether there is more than one pipeline.
        is_model_parallel: whether the tensor-parallel size is above 1.
    """

    def __init__(self, module: PipelineStage):
        self.grid, self.num_stages, self.stage_id = module.mpu(), module.num_stages, module.stage_id
        self.is_pipe_parallel = self.num_stages > 1
        self.is_data_parallel = self.grid.data_parallel_size > 1
        self.is_model_parallel = self.grid.model_parallel_size > 1

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.stage_id

    def is_first_stage(self) -> bool:
        """Whether this rank holds the first layers."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank holds the last layers, and computes the loss."""
        return self.stage_id == self.num_stages - 1


class PipelineFeed:
    """The source of the micro-batches of `train_batch`.

    Attributes:
        data_iterator: yields the micro-batches; None on stages between the first and the last.
        batch_fn: applied to each micro-batch; None leaves them unchanged.
        training_dataloader: the dataloader of `data_iterator`, or None.

    Args:
        reads: whether this rank has the first stage, and whether it has the last.
        with_labels: whether a micro-batch must have labels.
    """

    def __init__(self, reads: tuple[bool, bool], *, with_labels: bool):
        self.reads, self.with_labels = reads, with_labels
        self.data_iterator: Iterator[object] | None = None
        self.batch_fn: BatchFn | None = None
        self.training_dataloader: Iterable[object] | None = None

    def set_dataloader(self, loader: Iterable[object] | None) -> None:
        """Read from the beginning of a dataloader until it ends; a `RepeatingLoader` never ends."""
        if any(self.reads):
            self.training_dataloader = loader
            self.data_iterator = None if loader is None else iter(loader)

    def set_dataiterator(self, iterator: Iterator[object] | None) -> None:
        """Read from an iterator."""
        if any(self.reads):
            self.training_dataloader = None
            self.data_iterator = iterator

    def set_batch_fn(self, fn: BatchFn | None) -> None:
        """Set the function that makes (inputs, labels) of each micro-batch."""
        self.batch_fn = fn

    def take(self, iterator: Iterator[object] | None, count: int) -> list[StageBatch]:
        """Read the next micro-batches.

        Raises:
            DataEnded: the iterator ended.
            DataError: a micro-batch is no pair (inputs, labels).
        """
        if not any(self.reads):
            return [StageBatch(number) for number in range(count)]
        return [self._split(self._next(iterator, number, count), number) for number in range(count)]

    def _next(self, iterator: Iterator[object] | None, number: int, count: int) -> object:
        batch = None
        if iterator is not None:  # without one, `batch_fn` may receive the batch from another rank
            if not hasattr(iterator, "__next__"):
                raise DataError(
                    f"`data_iter` must be an iterator, but is a {type(iterator).__name__}; pass "
                    "`iter(RepeatingLoader(...))`, made once before the training"
                )
            try:
                batch = next(iterator)
            except StopIteration:
                raise DataEnded(
                    f"`data_iter` must give {count} micro-batches, but ended after {number}; wrap the loader "
                    "in `RepeatingLoader` or give it more data"
                ) from None
        elif self.batch_fn is None:
            raise DataError(
                "`data_iter` must be given if `initialize` was given no `training_data`, but is None"
            )
        return batch if self.batch_fn is None else self.batch_fn(batch)

    def _split(self, batch: object, number: int) -> StageBatch:
        sizes = (2,) if self.with_labels else (1, 2)
        if not isinstance(batch, (tuple, list)) or len(batch) not in sizes:
            many = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise DataError(
                f"a micro-batch must be a pair (inputs, labels), but is a {type(batch).__name__}{many}; put "
                "several inputs into a tuple, or convert it with `engine.set_batch_fn`"
            )
        first, last = self.reads
        labels = batch[1] if len(batch) == 2 else None
        return StageBatch(number, _inputs(batch[0]) if first else None, labels if last else None)


def _inputs(value: object) -> Tensor | tuple[Tensor, ...]:
    """Check a micro-batch's inputs; returns a tensor or a tuple of tensors."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(item, Tensor) for item in value):
        return tuple(value)
    raise DataError(
        f"the inputs of a micro-batch must be a tensor or a tuple of tensors, but are a "
        f"{type(value).__name__}; convert them with `engine.set_batch_fn`"
    )
