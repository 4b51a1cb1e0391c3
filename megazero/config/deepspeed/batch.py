"""The three batch sizes of a DeepSpeed JSON: two of them (or one) determine the rest."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.errors import ConfigError


@dataclass(frozen=True)
class BatchTriangle:
    """`train` = `micro` x `accumulation` x data-parallel ranks; `train` and `micro` in samples."""

    train: int
    micro: int
    accumulation: int


def resolve_batch(
    train: int | None, micro: int | None, accumulation: int | None, data_parallel: int
) -> BatchTriangle:
    """Complete the triangle from the sizes that are known, by the rules of DeepSpeed's documentation.

    Two sizes determine the third. One alone, `train` or `micro`, implies one accumulation step.

    Args:
        train: samples per optimizer step over all ranks, or None.
        micro: samples per forward pass on one rank, or None.
        accumulation: forward passes per optimizer step, or None.
        data_parallel: the number of ranks that the samples are split over.

    Raises:
        ConfigError: a size is not positive, the sizes contradict each other, one does not divide another, or
            both `train` and `micro` are unknown.
    """
    known = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    for name, value in known.items():
        if value is not None and value < 1:
            raise ConfigError(f"`{name}` must be a positive integer, but is {value}.")
    if train is None:
        if micro is None:
            raise ConfigError(
                "`train_batch_size` or `train_micro_batch_size_per_gpu` must be given, but neither is."
            )
        steps = accumulation or 1
        return BatchTriangle(micro * steps * data_parallel, micro, steps)
    if micro is None:
        steps = accumulation or 1
        return BatchTriangle(train, _divide(train, steps, "accumulation steps", data_parallel), steps)
    steps = _divide(train, micro, "samples of a micro-batch", data_parallel)
    if accumulation not in (None, steps):
        raise ConfigError(
            "`train_batch_size` must be micro-batch size x accumulation steps x data-parallel ranks, but "
            f"{train} is not {micro} x {accumulation} x {data_parallel} = "
            f"{micro * accumulation * data_parallel}; leave one of the three out."
        )
    return BatchTriangle(train, micro, steps)


def _divide(train: int, by: int, what: str, data_parallel: int) -> int:
    if train % (by * data_parallel):
        raise ConfigError(
            f"`train_batch_size` must be a multiple of {by} {what} x {data_parallel} data-parallel ranks = "
            f"{by * data_parallel}, but is {train}; change one of the batch sizes or the number of ranks."
        )
    return train // (by * data_parallel)
