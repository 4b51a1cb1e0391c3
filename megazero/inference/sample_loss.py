"""The loss of each training sample under a trained model, as a metric of the analyzer.

Every rank of the job takes part: data-parallel replicas take different samples, and tensor- and
pipeline-parallel ranks hold the same parts of the model as in training. All ranks get all values; rank 0
writes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import numpy as np
import torch
from torch import Tensor

from megazero.checkpoint.manifest import MANIFEST
from megazero.config.derive import PipelineShape
from megazero.config.training_plan import training_plan_of
from megazero.config.tree.config import Config
from megazero.config.tree.recompute import RecomputeConfig
from megazero.config.tree.zero import ZeroConfig
from megazero.data.blended import SampleDataset
from megazero.data_efficiency.analyzed import AnalyzedDataset
from megazero.data_efficiency.map import ChunkGrid, MetricFolder
from megazero.data_efficiency.reduce import is_reduced, reduce_metric
from megazero.errors import ConfigError, NumericsError
from megazero.models.batch import Collate, M, MicroBatch
from megazero.models.chunk import ModelChunk
from megazero.models.sample_losses import SampleLosses
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import broadcast_value
from megazero.pipeline.actions import Program
from megazero.pipeline.executor import Evaluator
from megazero.train.parts.chunks import programs_of
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary, build_vocabulary
from megazero.train.resume.fit import check_model, free_fields
from megazero.train.resume.saved import Checkpoint
from megazero.train.resume.trained import load_chunks

SCALE = 1000
"""A value in the index is round(SCALE x mean loss in nats)."""

METRIC = "loss"
_CHUNK = 1024  # samples that are measured and then saved together


@dataclass(frozen=True)
class LossMeter(Generic[M]):
    """Measures the losses of samples of a dataset under a model.

    Attributes:
        dataset: has the samples.
        evaluator: runs this rank's stage of the model, of `SampleLosses` chunks.
        program: number of micro-batches -> the program of this stage.
        collate: turns arrays into batches, without dropout.
        context: this rank's process groups and device.
        shape: micro-batches of a step on each replica, and samples of a micro-batch.
    """

    dataset: SampleDataset
    evaluator: Evaluator[M]
    program: Callable[[int], Program]
    collate: Collate[M]
    context: ParallelContext
    shape: tuple[int, int]

    @property
    def samples_per_step(self) -> int:
        """The samples of a step over all replicas."""
        return self.shape[0] * self.shape[1] * self.context.data.size

    def losses(self, samples: range) -> np.ndarray:
        """The mean loss of each sample in nats, float64 [n]; every rank calls this and gets all values.

        The mean is over the positions with a loss weight; a sample without such positions has the value 0.
        """
        size = self.samples_per_step
        return np.concatenate([self._step(samples[i : i + size]) for i in range(0, len(samples), size)])

    def _step(self, samples: range) -> np.ndarray:
        totals = torch.zeros(2, self.samples_per_step, dtype=torch.float64, device=self.context.device)
        for slot, arrays, losses in self.evaluated(samples):
            totals[0, slot] = losses.double()
            counts = arrays["loss_mask"].sum(1, dtype=np.float64)
            totals[1, slot] = torch.from_numpy(counts).to(totals)
        sums, counted = self.summed(totals)
        means: np.ndarray = sums / np.maximum(counted, 1.0)
        return means[: len(samples)]

    def evaluated(self, samples: range) -> Iterator[tuple[slice, Mapping[str, np.ndarray], Tensor]]:
        """Evaluate the samples of a step; every rank must exhaust the iterator.

        Yields (places in the step, the dataset's arrays, the output "losses") of each micro-batch of this
        replica, on the last stage only. All ranks have to take part, so an incomplete step repeats its last
        sample, at the places from len(samples) on.
        """
        numbers = np.minimum(np.arange(self.samples_per_step), len(samples) - 1) + samples.start
        count, size = self.shape
        first = self.context.data.rank * count * size
        slots = [slice(first + i * size, first + (i + 1) * size) for i in range(count)]
        arrays = [self.dataset.batch(numbers[slot]) for slot in slots]
        batches = [
            self.collate(rows, tuple(numbers[slot].tolist()))
            for rows, slot in zip(arrays, slots, strict=True)
        ]
        outputs = self.evaluator.evaluate(self.program(len(batches)), batches).outputs
        for i, output in outputs.items():
            yield slots[i], arrays[i], output["losses"]

    def summed(self, totals: Tensor) -> np.ndarray:
        """Sum a float64 tensor over all stages and replicas; every rank calls this."""
        self.context.pp.all_reduce(totals).wait()
        self.context.batch.all_reduce(totals).wait()
        summed: np.ndarray = totals.cpu().numpy()
        return summed


def measure_loss(config: Config, context: ParallelContext, output: Path) -> Iterator[tuple[int, int]]:
    """Measure the training samples of a configured run under its `--load`, and write the index files.

    Every rank calls this. Yields (finished samples, all samples): first with the samples that an earlier run
    measured, then after every chunk. The files are those of `reduce_metric`, in ``output/loss``.

    Args:
        config: the run's configuration.
        context: this rank's process groups and device.
        output: the folder of the analysis, which rank 0 can write.

    Raises:
        MegazeroError: the checkpoint or the data cannot be read, or a loss is not finite.
    """
    # Packing rows does not change losses, but it would mix the samples of a row.
    unpacked = config.data.model_copy(update={"bert_pack": False})
    config = config.model_copy(
        update={"zero": ZeroConfig(), "recompute": RecomputeConfig(), "data": unpacked}
    )
    vocabulary = build_vocabulary(config)
    dataset = _training_samples(config, vocabulary, context)
    meter, checkpoint_hash = _loss_meter(config, vocabulary, context, dataset)
    facts, grid = AnalyzedDataset.of(dataset), ChunkGrid(len(dataset), _CHUNK)
    identity = {
        "metric": METRIC,
        "scale": SCALE,
        "dataset": facts.key,
        "samples": facts.samples,
        "chunk": grid.size,
        "model": checkpoint_hash,
        **family_of(config.model).samples.objective(config),
    }
    folder = MetricFolder(output, METRIC, False, grid, identity)
    first = context.rank == 0
    progress = (is_reduced(folder), folder.missing(range(len(grid)))) if first else None
    finished, missing = broadcast_value(context.world, progress, context.device)
    if finished:
        yield len(dataset), len(dataset)
        return
    done = len(dataset) - sum(len(grid[chunk]) for chunk in missing)
    yield done, len(dataset)
    for chunk in missing:
        values = whole_numbers(meter.losses(grid[chunk]), grid[chunk])
        if first:
            folder.write(chunk, values)
        done += len(values)
        yield done, len(dataset)
    if first:
        for _ in reduce_metric(folder, facts):
            pass
    context.world.barrier()


def whole_numbers(losses: np.ndarray, samples: range) -> np.ndarray:
    """Return round(SCALE x loss) of each sample, int64. Raises NumericsError if a loss is not finite."""
    if not np.isfinite(losses).all():
        sample = samples[int(np.argmin(np.isfinite(losses)))]
        raise NumericsError(
            f"`loss` of sample {sample} must be finite, but is {losses[sample - samples.start]}; the "
            "model is damaged, or its precision is too low."
        )
    values: np.ndarray = np.rint(SCALE * losses).astype(np.int64)
    return values


def _training_samples(config: Config, vocabulary: Vocabulary, context: ParallelContext) -> SampleDataset:
    size = config.training.train_samples or training_plan_of(config, context.data.size).end.samples
    dataset = family_of(config.model).samples.datasets(config, vocabulary, (size, 0, 0))[0]
    if dataset is None:
        raise ConfigError("`split` must give the training some data, but gives none; correct it")
    return dataset


def _loss_meter(
    config: Config, vocabulary: Vocabulary, context: ParallelContext, dataset: SampleDataset
) -> tuple[LossMeter[MicroBatch], str]:
    """A meter for the dataset, and a hash of the checkpoint's manifest."""
    where, chunks = trained_chunks(config, vocabulary, context)
    wrapped = {number: SampleLosses.of(chunk) for number, chunk in chunks.items()}
    meter = LossMeter(
        dataset,
        Evaluator(wrapped, context.pp, context.device),
        programs_of(config.zero, PipelineShape.of(config)).evaluate,
        family_of(config.model).samples.collate(config, vocabulary.size, context, None),
        context,
        step_shape(config),
    )
    return meter, hashlib.blake2b((where / MANIFEST).read_bytes(), digest_size=16).hexdigest()


def step_shape(config: Config) -> tuple[int, int]:
    """The micro-batches of an evaluation step on each replica, and the samples of a micro-batch."""
    stages = config.parallel.pipeline_model_parallel_size
    return 1 if stages == 1 else 2 * stages, config.batch.micro_batch_size


def trained_chunks(
    config: Config, vocabulary: Vocabulary, context: ParallelContext
) -> tuple[Path, dict[int, ModelChunk[MicroBatch]]]:
    """Load the checkpoint in `--load`; return its folder, and this rank's chunks of the model.

    Raises MegazeroError if there is no checkpoint, it cannot be read, or its model is another one.
    """
    section = config.checkpoint
    if section.load is None:
        raise ConfigError("`load` must name the checkpoint of the model, but is not given; set --load")
    if context.groups["cp"].size > 1:
        raise ConfigError(
            "`context_parallel_size` must be 1 to measure losses of samples, but is "
            f"{context.groups['cp'].size}; use tensor or pipeline parallelism"
        )
    checkpoint = Checkpoint.at(section.load, section.verify_checkpoint, context, section.ckpt_step)
    saved, where = checkpoint.model, checkpoint.folder
    free = free_fields(config.model, saved, where, extends=section.extend_context)
    check_model(config.model, vocabulary.size, saved, where, free)
    return where, load_chunks(config, vocabulary, context, checkpoint)
