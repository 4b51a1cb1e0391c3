"""Random documents, and random samples that a curriculum draws by made-up difficulties."""

from __future__ import annotations

import numpy as np

from megazero.config.difficulties import Difficulties
from megazero.config.steps import Step, Steps
from megazero.config.tree.config import Config
from megazero.config.tree.data_sampling import CurriculumMetric
from megazero.data.sampler import SamplerKind, SamplerSpec
from megazero.data_efficiency.eligibility import EligibilityOrder
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.data_efficiency.sampler import CurriculumSampler
from megazero.models.batch import Collate, MicroBatch
from megazero.mpu.context import ParallelContext
from megazero.train.parts.families import family_of
from megazero.train.step.feed import crop

SAMPLES = 97  # a prime, so that no batch fills an epoch


def shrunk_metric(metric: CurriculumMetric) -> CurriculumMetric:
    """A metric of the same name that admits the easiest 70% of the samples for two steps, and then all."""
    return CurriculumMetric(
        name=metric.name,
        difficulty_type="percentile",
        schedule_type="fixed_discrete",
        difficulty=(70, 100),
        max_step=(2,),
    )


def made_up_sampler(config: Config, steps: Steps, context: ParallelContext) -> CurriculumSampler | None:
    """This rank's sampler of `SAMPLES` samples, which each metric orders at random; None without metrics."""
    difficulties = Difficulties.of(config.data_sampling)
    if difficulties is None:
        return None
    size, data = config.batch.micro_batch_size, context.data
    spec = SamplerSpec(SAMPLES, size, data.rank, data.size, SamplerKind.CYCLIC, config.training.seed)
    orders = (np.random.default_rng(i).permutation(SAMPLES) for i in range(len(difficulties.metrics)))
    places = np.arange(SAMPLES)
    indexes = [MetricIndex(places, places + 1, order) for order in orders]
    return CurriculumSampler.of(spec, EligibilityOrder.of(difficulties, indexes), difficulties, steps)


def vocabulary_size(config: Config) -> int:
    """The vocabulary size, which every shrunk configuration sets."""
    assert config.model.vocab_size is not None, "a verification reads no tokenizer"
    return config.model.vocab_size


def drawn_length(config: Config, step: Step) -> int:
    """Tokens of a random sample; a step with several rows per sample cuts them from whole samples."""
    return step.sequence_length if step.rows == 1 else config.model.seq_length


def random_documents(config: Config, number: int, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Draw document ids, and positions if they restart; nothing if attention crosses documents.

    Args:
        config: the run's configuration.
        number: seed of the draw.
        shape: (samples, tokens) of each array.
    """
    if not config.data.reset_attention_mask:
        return {}
    begins = np.random.default_rng([number, 1]).random(shape) < 3 / shape[1]
    begins[:, 0] = True
    arrays: dict[str, np.ndarray] = {"document_ids": begins.cumsum(1).astype(np.int32)}
    if config.data.reset_position_ids:
        places = np.arange(shape[1])
        arrays["position_ids"] = places - np.maximum.accumulate(np.where(begins, places, 0), 1)
    return arrays


def drawn_micro_batches(
    config: Config, sampler: CurriculumSampler, collate: Collate[MicroBatch], step: Step
) -> list[MicroBatch]:
    """Draw this rank's micro-batches for a step; a sample's content follows from its number alone."""
    family, spec, vocab_size = family_of(config.model), sampler.spec, vocabulary_size(config)
    length = drawn_length(config, step)
    batches = []
    for begin in range(step.before.samples, step.after.samples, spec.stride):
        drawn = [
            {
                **family.samples.random_arrays(np.random.default_rng(number), 1, length, vocab_size),
                **random_documents(config, number, (1, length)),
            }
            for number in sampler.at(begin).tolist()
        ]
        arrays = {name: np.concatenate([sample[name] for sample in drawn]) for name in drawn[0]}
        first = begin + spec.data_parallel_rank * spec.micro_batch_size
        places = tuple(range(first, first + spec.micro_batch_size))
        batches.append(collate(*crop(arrays, places, step.sequence_length, step.rows)))
    return batches
