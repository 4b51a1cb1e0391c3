"""The feeds of the three splits of a pretraining."""

from __future__ import annotations

from functools import partial

from megazero.config.training_plan import TrainingPlan
from megazero.config.tree.config import Config
from megazero.data.blended import SampleDataset
from megazero.data.build import Datasets, Sizes
from megazero.data.changing.start import BEGINNING, Before, changing_datasets
from megazero.data.changing.validation import ValidationSets, validation_sets
from megazero.data.sampler import BatchSampler, SamplerKind, SamplerSpec
from megazero.data_efficiency.curriculum import curriculum_sampler
from megazero.errors import DataError
from megazero.models.batch import MicroBatch
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import first_value
from megazero.train.parts.families import family_of
from megazero.train.parts.vocabulary import Vocabulary
from megazero.train.step.feed import Feed, Feeds, make_feed


def build_feeds(
    config: Config,
    training_plan: TrainingPlan,
    vocabulary: Vocabulary,
    context: ParallelContext,
    stream_seed: int,
    before: Before = BEGINNING,
) -> Feeds:
    """Make the feeds of the three splits.

    Args:
        before: what the training's blend has been.

    Raises:
        DataError: files are missing or damaged, or have too little data for one sample.
    """
    family, data, training, end = family_of(config.model), config.data, config.training, training_plan.end
    sizes = (
        # The number of samples fixes their order, so it must not depend on the batch size: take all that were
        # asked for, not those that fill whole batches.
        0 if training.skip_train else training.train_samples or end.samples,
        training_plan.evaluations.samples_until(end.iteration),
        training_plan.evaluations.samples,
    )

    def build(config: Config, sizes: Sizes) -> Datasets:
        return family.samples.datasets(config, vocabulary, sizes)

    sets: ValidationSets | None = None
    if data.multiple_validation_sets and sizes[1]:
        sets = validation_sets(config, sizes[1], build, partial(_first_fault, context))
        sizes = (sizes[0], 0, sizes[2])
    train, valid, test = changing_datasets(config, sizes, build, vocabulary.size, before)
    if train is None and sizes[0]:
        how = f"with `--split` {data.split}; give it a larger share, or more data"
        if data.train_data_path:
            how = "in `--train-data-path`; give more data"
        raise DataError(f"the train split must have samples, but is empty {how}")

    def feed(
        dataset: SampleDataset | None, ahead: int = 0, seed: int | None = None
    ) -> Feed[MicroBatch] | None:
        if dataset is None:
            return None
        spec = SamplerSpec(
            num_samples=len(dataset),
            micro_batch_size=config.batch.micro_batch_size,
            data_parallel_rank=context.data.rank,
            data_parallel_size=context.data.size,
            kind=SamplerKind(data.dataloader_type),
            seed=training.seed,
            data_sharding=data.data_sharding,
        )
        sampler = None
        if dataset is train:
            sampler = curriculum_sampler(config.data_sampling, training_plan.steps, dataset, spec)
        collate = family.samples.collate(config, vocabulary.size, context, seed)
        return make_feed(dataset, sampler or BatchSampler(spec), collate, ahead)

    return Feeds(
        feed(train, data.num_workers, stream_seed), feed(valid if sets is None else sets), feed(test)
    )


def _first_fault(context: ParallelContext, fault: str | None) -> str | None:
    first = first_value(context.world, fault, context.device)
    return None if first is None else str(first[1])
