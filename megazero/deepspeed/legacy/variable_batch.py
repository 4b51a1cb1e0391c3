"""Batches of about as many tokens each, with a learning rate that follows their number of samples.

Long sequences come in small batches and short ones in large ones (Vaswani et al. 2017, section 5.1).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megazero.deepspeed.config.shown import value_at
from megazero.deepspeed.legacy.indexed import MMapIndexedDataset, dataset_exists
from megazero.deepspeed.legacy.variable_lr import VariableBatchSizeLR, lr_scheduler_for_variable_batch_size
from megazero.errors import ConfigError

_Sample = tuple[int, int]  # its length and its number
_SECTION = "data_efficiency.data_sampling.dynamic_batching"
_ORDERS = ("dataloader", "random", "seqlen")


def batch_by_seqlens(
    seqlens: Sequence[int],
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[tuple[int, list[int]]], list[int], list[int]]:
    """Pack samples into micro-batches of at most `max_tokens`, each as large as it can be.

    The samples of a last batch that is not full are left out.

    Args:
        seqlens: each sample's length.
        max_tokens: of a micro-batch; longer samples are left out, with a warning.
        sequence_ids_per_mb: the samples to use; None for all.
        min_batch_size: the least samples of a micro-batch.
        max_batch_size: the most.
        sequence_picking_order: ``dataloader`` (as they come), ``random`` or ``seqlen`` (short ones first).
        effective_batch_size: micro-batches of a batch, over all ranks.
        required_microbatches_of_same_size: give all micro-batches of a batch as many samples.
        verbose: has no effect.
        seed: of the random order.

    Returns:
        The micro-batches, each with the number of its batch; each batch's samples; its greatest length.

    Raises:
        ConfigError: there is no such order, or there are too few samples for a batch.
    """
    if sequence_picking_order not in _ORDERS:
        raise ConfigError(
            f"`sequence_picking_order` must be one of {', '.join(_ORDERS)}, but is {sequence_picking_order!r}"
        )
    numbers = range(len(seqlens)) if sequence_ids_per_mb is None else sequence_ids_per_mb
    samples = [(int(seqlens[number]), int(number)) for number in numbers]
    if sequence_picking_order == "random":
        random.Random(seed).shuffle(samples)
    elif sequence_picking_order == "seqlen":
        samples.sort()
    if long := [number for length, number in samples if length > max_tokens]:
        warnings.warn(f"samples longer than {max_tokens} are left out: {long}", stacklevel=2)
        samples = [sample for sample in samples if sample[0] <= max_tokens]
    together = effective_batch_size if required_microbatches_of_same_size else 1
    micro: list[list[_Sample]] = []
    start = 0
    while (end := _end(samples, start, together, max_tokens, min_batch_size, max_batch_size)) > start:
        micro += [samples[start + turn : end : together] for turn in range(together)]
        start = end
    whole = len(micro) - len(micro) % effective_batch_size
    if not whole:
        raise ConfigError(
            f"the samples must make {effective_batch_size} micro-batches or more, but make {len(micro)}; "
            "give more samples, or fewer tokens to a micro-batch"
        )
    batches = [micro[at : at + effective_batch_size] for at in range(0, whole, effective_batch_size)]
    ids = [(number, [i for _, i in part]) for number, batch in enumerate(batches) for part in batch]
    longest = [max(length for part in batch for length, _ in part) for batch in batches]
    return ids, [sum(map(len, batch)) for batch in batches], longest


def _end(
    samples: Sequence[_Sample], start: int, together: int, tokens: int, least: int, most: int | None
) -> int:
    """Where the largest group of micro-batches ends that begins at `start`; `start` if there is none."""
    sums, best = [0] * together, start
    for end in range(start + together, len(samples) + 1, together):
        for turn in range(together):
            sums[turn] += samples[end - together + turn][0]
        count = (end - start) // together
        if max(sums) > tokens or (most and count > most):
            break
        best = end if count >= least else best
    return best


class _MicroBatches:
    """Collates the samples of micro-batches, padded to the greatest length of their batch if asked."""

    def __init__(
        self,
        dataset: Dataset[Any],
        longest: Sequence[int],
        collate: Callable[[list[Any]], Any] | None,
        pad: Callable[[Any, int], Any] | None,
    ):
        self.dataset, self.longest, self.collate, self.pad = dataset, longest, collate, pad

    def __call__(self, parts: Sequence[tuple[int, list[int]]]) -> Any:
        samples = [
            self.pad(self.dataset[i], self.longest[batch]) if self.pad else self.dataset[i]
            for batch, ids in parts
            for i in ids
        ]
        return self.collate(samples) if self.collate else samples


def dataloader_for_variable_batch_size(
    dataset: Dataset[Any],
    microbatch_ids: Sequence[tuple[int, list[int]]],
    batch_max_seqlens: Sequence[int],
    dataloader_rank: int = 0,
    dataloader_batch_size: int = 1,
    dataloader_num_replicas: int = 1,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    dataloader_num_workers: int = 2,
    dataloader_pin_memory: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
) -> tuple[DataLoader[Any], dict[str, Any]]:
    """A loader of this rank's share of the micro-batches, which ranks take in turns.

    Args:
        dataset: the samples.
        microbatch_ids: see `batch_by_seqlens`.
        batch_max_seqlens: likewise.
        dataloader_rank: this rank, of `dataloader_num_replicas`.
        dataloader_batch_size: micro-batches that are collated together.
        dataloader_num_replicas: the ranks that samples are split over.
        dataloader_collate_fn: collates samples; None gives lists of them.
        dataloader_num_workers: processes that load; 0 for this one.
        dataloader_pin_memory: whether batches go to locked memory.
        required_microbatches_of_same_seqlen: pad all samples of a batch to one length.
        sample_padding_fn: pads a sample to a length.

    Returns:
        The loader, and the arguments with which `engine.deepspeed_io` makes it.

    Raises:
        ConfigError: samples must be padded, but nothing does it.
    """
    if required_microbatches_of_same_seqlen and sample_padding_fn is None:
        raise ConfigError("`sample_padding_fn` must be given where lengths must be equal, but is not")
    pad = sample_padding_fn if required_microbatches_of_same_seqlen else None
    collate = _MicroBatches(dataset, batch_max_seqlens, dataloader_collate_fn, pad)
    ids: Any = microbatch_ids
    sampler: DistributedSampler[Any] = DistributedSampler(
        ids, dataloader_num_replicas, dataloader_rank, shuffle=False
    )
    shared = {"batch_size": dataloader_batch_size, "collate_fn": collate, "pin_memory": dataloader_pin_memory}
    loader: DataLoader[Any] = DataLoader(
        ids,
        dataloader_batch_size,
        sampler=sampler,
        num_workers=dataloader_num_workers,
        collate_fn=collate,
        pin_memory=dataloader_pin_memory,
    )
    return loader, {
        **shared,
        "dataset": ids,
        "data_sampler": sampler,
        "num_local_io_workers": dataloader_num_workers,
    }


def get_dataloader_and_lr_scheduler_for_variable_batch_size(
    dataset: Dataset[Any],
    dataset_seqlens: Sequence[int],
    max_tokens: int,
    effective_batch_size: int,
    dataset_filter_ids: Sequence[int] | None = None,
    lr_scaling_method: str | None = "linear",
    lr_scheduler_or_optimizer: Any = None,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    **others: Any,
) -> tuple[DataLoader[Any], VariableBatchSizeLR, dict[str, Any]]:
    """The loader, the schedule, and the arguments of `deepspeed_io`.

    Args:
        dataset: the samples.
        dataset_seqlens: their lengths.
        max_tokens: see `batch_by_seqlens`.
        effective_batch_size: micro-batches of a batch, over all ranks; rates are those of as many samples.
        dataset_filter_ids: the samples to use; None for all.
        lr_scaling_method: see `scale_lr`.
        lr_scheduler_or_optimizer: says the rates.
        required_microbatches_of_same_size: see `batch_by_seqlens`.
        verbose: has no effect.
        others: further arguments of `batch_by_seqlens` and `dataloader_for_variable_batch_size`.
    """
    packing = {name: others.pop(name) for name in _PACKING if name in others}
    ids, sizes, longest = batch_by_seqlens(
        dataset_seqlens,
        max_tokens,
        dataset_filter_ids,
        effective_batch_size=effective_batch_size,
        required_microbatches_of_same_size=required_microbatches_of_same_size,
        **packing,
    )
    loader, arguments = dataloader_for_variable_batch_size(
        dataset, ids, longest, **{"dataloader_num_workers": 0, **others}
    )
    schedule = lr_scheduler_for_variable_batch_size(
        effective_batch_size, sizes, loader, lr_scheduler_or_optimizer, lr_scaling_method
    )
    return loader, schedule, arguments


_PACKING = ("min_batch_size", "max_batch_size", "sequence_picking_order", "seed")


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Sequence[int] | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR, dict[str, Any]]:
    """The same for an engine, as the JSON's section `dynamic_batching` says.

    Args:
        dataset: the samples.
        engine: of a model or of a pipeline, in which all micro-batches of a batch have one shape.
        dataset_seqlens: their lengths; None reads ``seqlen/seqlen_sample_to_metric`` in the section's
            `metrics_path`, or asks `batch_seqlens_fn` if there is none.
        dataset_filter_ids: the samples to use; None for all.
        dataloader_collate_fn: collates samples.
        sample_padding_fn: pads a sample to a length; a pipeline needs it.
        batch_seqlens_fn: the lengths of collated samples. It is asked on every rank, and nothing is written.

    Raises:
        ConfigError: the section is not enabled, or there are no lengths.
    """
    section: dict[str, Any] = value_at(engine.config, _SECTION, {"enabled": False})
    if not section["enabled"]:
        raise ConfigError(f"`{_SECTION}` must be enabled for variable batch sizes, but is not")
    sampling = value_at(engine.config, "data_efficiency.data_sampling")
    if dataset_seqlens is None:
        dataset_seqlens = list(
            _lengths(dataset, section.get("metrics_path"), dataloader_collate_fn, batch_seqlens_fn)
        )
    return get_dataloader_and_lr_scheduler_for_variable_batch_size(
        dataset,
        dataset_seqlens,
        section["max_tokens"],
        engine.train_batch_size(),
        dataset_filter_ids,
        section.get("lr_scaling_method", "linear"),
        engine.lr_scheduler or engine.optimizer,
        engine.pipeline_parallelism,
        min_batch_size=section.get("min_batch_size", 1),
        max_batch_size=section.get("max_batch_size"),
        sequence_picking_order=section.get("sequence_picking_order", "dataloader"),
        seed=value_at(engine.config, "data_efficiency.seed", 1234),
        dataloader_rank=engine.context.data.rank,
        dataloader_batch_size=engine.train_micro_batch_size_per_gpu(),
        dataloader_num_replicas=engine.context.data.size,
        dataloader_collate_fn=dataloader_collate_fn,
        dataloader_num_workers=sampling.get("num_workers", 0),
        dataloader_pin_memory=sampling.get("pin_memory", False),
        required_microbatches_of_same_seqlen=engine.pipeline_parallelism,
        sample_padding_fn=sample_padding_fn,
    )


def _lengths(
    dataset: Any,
    folder: str | None,
    collate: Callable[[list[Any]], Any] | None,
    ask: Callable[[Any], Any] | None,
) -> Iterator[int]:
    path = f"{folder}/seqlen/seqlen_sample_to_metric"
    if folder is not None and dataset_exists(path, "mmap"):
        yield from (int(entry[0]) for entry in MMapIndexedDataset(path))
        return
    if ask is None:
        raise ConfigError(
            "`dataset_seqlens` or `batch_seqlens_fn` must be given where no lengths have been analyzed, but "
            "neither is"
        )
    for start in range(0, len(dataset), 1024):
        samples = [dataset[number] for number in range(start, min(start + 1024, len(dataset)))]
        yield from map(int, ask(collate(samples) if collate else samples))
