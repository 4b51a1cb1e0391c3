"""Batches with similar numbers of tokens, and a learning rate that scales with their number of samples.

Batches of long sequences have few samples, batches of short ones many (Vaswani et al. 2017, section 5.1).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megazero.deepspeed.config.shown import value_at
from megazero.deepspeed.legacy.indexed import MMapIndexedDataset, dataset_exists
from megazero.deepspeed.legacy.variable_lr import VariableBatchSizeLR, lr_scheduler_for_variable_batch_size
from megazero.errors import ConfigError

if TYPE_CHECKING:
    from megazero.deepspeed.engine.engine import DeepSpeedEngine

_Sample = tuple[int, int]
"""The length of a sample, and its index in the dataset."""
_MicroBatch = tuple[int, list[int]]
"""The number of the batch that a micro-batch belongs to, and the indices of its samples."""
_Collate = Callable[[list[Any]], object]
_Pad = Callable[[Any, int], object]
_SECTION = "data_efficiency.data_sampling.dynamic_batching"
_ORDERS = ("dataloader", "random", "seqlen")
_PACKING = ("min_batch_size", "max_batch_size", "sequence_picking_order", "seed")


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
) -> tuple[list[_MicroBatch], list[int], list[int]]:
    """Pack samples greedily into micro-batches of at most `max_tokens` tokens.

    An incomplete last batch is dropped.

    Args:
        seqlens: the length of each sample.
        max_tokens: the most tokens of a micro-batch; longer samples are dropped with a warning.
        sequence_ids_per_mb: the indices of the samples to use; None for all.
        min_batch_size, max_batch_size: the bounds of the number of samples in a micro-batch.
        sequence_picking_order: ``dataloader`` (by index), ``random`` or ``seqlen`` (shortest first).
        effective_batch_size: the number of micro-batches in a batch, over all ranks.
        required_microbatches_of_same_size: whether all micro-batches of a batch have equally many samples.
        verbose: has no effect.
        seed: the seed of the random order.

    Returns:
        The micro-batches; the number of samples of each batch; the longest sequence of each batch.

    Raises:
        ConfigError: the order is unknown, or there are too few samples for a batch.
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
        micro += [samples[start + number : end : together] for number in range(together)]
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
    """Return the end of the largest run of samples from `start` that fills `together` micro-batches.

    The samples are dealt to the micro-batches in turn. Without such a run, return `start`.
    """
    sums, best = [0] * together, start
    for end in range(start + together, len(samples) + 1, together):
        for number in range(together):
            sums[number] += samples[end - together + number][0]
        count = (end - start) // together
        if max(sums) > tokens or (most and count > most):
            break
        if count >= least:
            best = end
    return best


@dataclass(frozen=True)
class _MicroBatches:
    """Collates the samples of micro-batches; `pad`, if given, first pads each to its batch's longest."""

    dataset: Dataset[object]
    longest: Sequence[int]
    collate: _Collate | None
    pad: _Pad | None

    def __call__(self, micro_batches: Sequence[_MicroBatch]) -> object:
        samples = [
            self.pad(self.dataset[i], self.longest[batch]) if self.pad else self.dataset[i]
            for batch, ids in micro_batches
            for i in ids
        ]
        return self.collate(samples) if self.collate else samples


def dataloader_for_variable_batch_size(
    dataset: Dataset[object],
    microbatch_ids: Sequence[_MicroBatch],
    batch_max_seqlens: Sequence[int],
    dataloader_rank: int = 0,
    dataloader_batch_size: int = 1,
    dataloader_num_replicas: int = 1,
    dataloader_collate_fn: _Collate | None = None,
    dataloader_num_workers: int = 2,
    dataloader_pin_memory: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: _Pad | None = None,
) -> tuple[DataLoader[_MicroBatch], dict[str, object]]:
    """Make a loader of this rank's micro-batches; micro-batches are dealt to the ranks in turn.

    Args:
        dataset: the samples.
        microbatch_ids, batch_max_seqlens: the micro-batches and longest sequences, see `batch_by_seqlens`.
        dataloader_rank, dataloader_num_replicas: this rank, and the number of ranks that share the samples.
        dataloader_batch_size: the number of micro-batches that are collated together.
        dataloader_collate_fn: collates samples; None gives lists of them.
        dataloader_num_workers: the number of loading processes; 0 loads in this one.
        dataloader_pin_memory: whether batches go to pinned memory.
        required_microbatches_of_same_seqlen: whether all samples of a batch are padded to one length.
        sample_padding_fn: pads a sample to a length.

    Returns:
        The loader, and the arguments with which `engine.deepspeed_io` makes the same one.

    Raises:
        ConfigError: lengths must be equal, but `sample_padding_fn` is missing.
    """
    if required_microbatches_of_same_seqlen and sample_padding_fn is None:
        raise ConfigError("`sample_padding_fn` must be given where lengths must be equal, but is not")
    pad = sample_padding_fn if required_microbatches_of_same_seqlen else None
    collate = _MicroBatches(dataset, batch_max_seqlens, dataloader_collate_fn, pad)
    ids = cast(Dataset[_MicroBatch], microbatch_ids)  # a sequence is all that a loader asks for
    sampler: DistributedSampler[_MicroBatch] = DistributedSampler(
        ids, dataloader_num_replicas, dataloader_rank, shuffle=False
    )
    size, workers, pin = dataloader_batch_size, dataloader_num_workers, dataloader_pin_memory
    loader = DataLoader(ids, size, None, sampler, num_workers=workers, collate_fn=collate, pin_memory=pin)
    own = {"batch_size": size, "pin_memory": pin, "collate_fn": collate, "num_local_io_workers": workers}
    return loader, {**own, "dataset": ids, "data_sampler": sampler}


def get_dataloader_and_lr_scheduler_for_variable_batch_size(
    dataset: Dataset[object],
    dataset_seqlens: Sequence[int],
    max_tokens: int,
    effective_batch_size: int,
    dataset_filter_ids: Sequence[int] | None = None,
    lr_scaling_method: str | None = "linear",
    lr_scheduler_or_optimizer: Any = None,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    **others: Any,
) -> tuple[DataLoader[_MicroBatch], VariableBatchSizeLR, dict[str, object]]:
    """Return a loader of packed micro-batches, a scaled schedule, and the arguments of `deepspeed_io`.

    Args:
        dataset, dataset_seqlens: the samples and their lengths.
        max_tokens, required_microbatches_of_same_size: see `batch_by_seqlens`.
        effective_batch_size: the number of micro-batches in a batch, over all ranks, and the number of
            samples that the unscaled rates are for.
        dataset_filter_ids: the indices of the samples to use; None for all.
        lr_scaling_method: see `scale_lr`.
        lr_scheduler_or_optimizer: gives the unscaled rates.
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


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Dataset[object],
    engine: DeepSpeedEngine,
    dataset_seqlens: Sequence[int] | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: _Collate | None = None,
    sample_padding_fn: _Pad | None = None,
    batch_seqlens_fn: Callable[[Any], Iterable[int]] | None = None,
) -> tuple[DataLoader[_MicroBatch], VariableBatchSizeLR, dict[str, object]]:
    """Return the same for an engine, by the section `dynamic_batching` of its JSON.

    Args:
        dataset: the samples.
        engine: the engine; with a pipeline, all micro-batches of a batch have one shape.
        dataset_seqlens: the length of each sample; None reads ``seqlen/seqlen_sample_to_metric`` in the
            section's `metrics_path`, or calls `batch_seqlens_fn` if that file is missing.
        dataset_filter_ids: the indices of the samples to use; None for all.
        dataloader_collate_fn: collates samples.
        sample_padding_fn: pads a sample to a length; a pipeline needs it.
        batch_seqlens_fn: returns the lengths of collated samples; every rank calls it.

    Raises:
        ConfigError: the section is not enabled, or the lengths are unknown.
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
    dataset: Dataset[object],
    folder: str | None,
    collate: _Collate | None,
    measure: Callable[[Any], Iterable[int]] | None,
) -> Iterator[int]:
    path = f"{folder}/seqlen/seqlen_sample_to_metric"
    if folder is not None and dataset_exists(path, "mmap"):
        yield from (int(entry[0]) for entry in MMapIndexedDataset(path))
        return
    if measure is None:
        raise ConfigError(
            "`dataset_seqlens` or `batch_seqlens_fn` must be given, but neither is, and `metrics_path` holds "
            "no lengths; pass one of them"
        )
    size = len(dataset)  # type: ignore[arg-type]  # torch's class has no length, its subclasses do
    for start in range(0, size, 1024):
        samples = [dataset[number] for number in range(start, min(start + 1024, size))]
        yield from map(int, measure(collate(samples) if collate else samples))
