"""Makes the sampler of a run's curriculum, after checking the indexes of its metrics against the dataset."""

from __future__ import annotations

from dataclasses import replace

from megazero.config.difficulties import Difficulties
from megazero.config.steps import Steps
from megazero.config.tree.data_sampling import CurriculumMetric, DataSamplingConfig
from megazero.data.blended import SampleDataset
from megazero.data.sampler import SamplerKind, SamplerSpec
from megazero.data_efficiency.analyzed import AnalyzedDataset, dataset_of
from megazero.data_efficiency.eligibility import EligibilityOrder
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.data_efficiency.sampler import CurriculumSampler
from megazero.errors import DataError


def curriculum_sampler(
    settings: DataSamplingConfig, steps: Steps, dataset: SampleDataset, spec: SamplerSpec
) -> CurriculumSampler | None:
    """The sampler of a run's training data; None without a curriculum.

    Args:
        settings: the run's curriculum, already validated.
        steps: the run's steps.
        dataset: the built training dataset.
        spec: the sampler without a curriculum; its seed is used if the curriculum sets none.

    Raises:
        DataError: an index is missing, damaged or of another dataset, or no sample is easy enough for the
            first step.
    """
    difficulties, seed = Difficulties.of(settings), settings.curriculum_seed
    if difficulties is None:
        return None
    indexes = [_index(metric, dataset) for metric in difficulties.metrics]
    order = EligibilityOrder.of(difficulties, indexes)
    seed = spec.seed if seed is None else seed
    cyclic = replace(spec, kind=SamplerKind.CYCLIC, data_sharding=False, seed=seed)
    return CurriculumSampler.of(cyclic, order, difficulties, steps)


def _index(metric: CurriculumMetric, dataset: SampleDataset) -> MetricIndex:
    """Open the index of a metric. Raises DataError if its files show that it is of another dataset."""
    samples = metric.index_to_sample_path
    if metric.difficulty_type == "percentile":
        index = MetricIndex.of_order(samples)
    else:
        index = MetricIndex.open(samples, metric.index_to_metric_path)
    analyzed = dataset_of(samples)
    if analyzed is not None:
        analyzed.check(AnalyzedDataset.of(dataset), samples)
    if len(index) != len(dataset):
        raise DataError(
            f"`{samples}` must list the {len(dataset)} samples of the {dataset.name} dataset, but lists "
            f"{len(index)}; analyze it with the training's data, split, seed, sequence length and "
            "--train-data-exact-num-epochs, or give training those of the analysis."
        )
    return index
