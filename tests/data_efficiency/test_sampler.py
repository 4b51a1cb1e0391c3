"""The curriculum sampler: what it may draw, how often, and that nothing but the place matters."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from megazero.config.difficulties import Difficulties
from megazero.config.steps import BatchRamp, Progress, SequenceLengths, Steps
from megazero.config.tree.data_sampling import CurriculumMetric, DataSamplingConfig
from megazero.data.sampler import SamplerKind, SamplerSpec
from megazero.data_efficiency.eligibility import EligibilityOrder
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.data_efficiency.sampler import CurriculumSampler
from megazero.errors import DataError
from tests.tables import over_table

SAMPLES, BATCH = 600, 12
ROOT = CurriculumMetric(
    name="rarity",
    difficulty_type="percentile",
    min_difficulty=2,
    max_difficulty=100,
    schedule_type="fixed_root",
    root_degree=2.0,
    total_curriculum_step=60,
)
DIFFICULTIES = Difficulties.of(DataSamplingConfig(curriculum_metrics=(ROOT,)))
SHUFFLED = np.random.default_rng(5).permutation(SAMPLES)
RANK_OF = np.argsort(SHUFFLED)  # place of a sample in the order of difficulty
INDEX = MetricIndex(np.arange(SAMPLES), np.arange(1, SAMPLES + 1), SHUFFLED)
ORDER = EligibilityOrder.of(DIFFICULTIES, [INDEX])
STEPS = Steps(BatchRamp.constant(BATCH), 1, SequenceLengths.constant(8))


def sampler(rank: int = 0, size: int = 1, micro: int = BATCH, steps: Steps = STEPS, seed: int = 3):
    spec = SamplerSpec(SAMPLES, micro, rank, size, SamplerKind.CYCLIC, seed)
    return CurriculumSampler.of(spec, ORDER, DIFFICULTIES, steps)


def drawn(steps: Steps, iterations: range, **rest) -> list[list[int]]:
    """Samples of each step, by one rank whose micro-batch is a single sample."""
    alone = sampler(micro=1, steps=steps, **rest)
    befores = [steps.before(iteration).samples for iteration in range(iterations.start, iterations.stop + 1)]
    return [[int(alone.at(place)[0]) for place in range(begin, end)] for begin, end in pairwise(befores)]


WHOLE = drawn(STEPS, range(100))


def test_no_sample_is_above_the_difficulty_of_its_step():
    for iteration, samples in enumerate(WHOLE):
        level = DIFFICULTIES.at(Progress(iteration=iteration))["rarity"]
        assert max(RANK_OF[samples]) < SAMPLES * level // 100
        assert level == ROOT.pacing.at(iteration + 1)


def test_the_hardest_samples_are_drawn_as_soon_as_they_may_be():
    """Half of a difficulty's new samples come within half of a lap over all that are eligible."""
    for piece, end in list(enumerate(ORDER.ends))[1:-1]:
        begin, new = DIFFICULTIES.starts[piece], range(ORDER.ends[piece - 1], end)
        draws = [RANK_OF[s] for step in WHOLE[begin : DIFFICULTIES.starts[piece + 1]] for s in step]
        share = sum(rank in new for rank in draws) / len(draws)
        assert share == pytest.approx(len(new) / end, abs=8 / len(draws))


def test_each_eligible_sample_is_about_equally_likely():
    """Over seeds: of any step, each sample within its difficulty is as likely as any other."""
    iteration, counts, seeds = 7, Counter(), 300
    for seed in range(seeds):
        counts.update(drawn(STEPS, range(iteration, iteration + 1), seed=seed)[0])
    end = SAMPLES * DIFFICULTIES.at(Progress(iteration=iteration))["rarity"] // 100
    mean = seeds * BATCH / end
    found = np.array([counts[int(s)] for s in SHUFFLED[:end]])
    assert counts.total() == found.sum()
    chi_square = ((found - mean) ** 2 / mean).sum()
    assert chi_square < end + 5 * np.sqrt(2 * end)


def test_samples_are_not_repeated_needlessly():
    """Of those that become eligible together, none comes again before each has come: as in DeepSpeed."""
    draws = [s for step in WHOLE for s in step]
    for low, high in zip((0, *ORDER.ends), ORDER.ends, strict=False):
        counts, cluster = Counter(), set(SHUFFLED[low:high].tolist())
        for sample in (s for s in draws if s in cluster):
            counts[sample] += 1
            assert counts[sample] <= min(counts[each] for each in cluster) + 1
    later = drawn(STEPS, range(100, 100 + 2 * SAMPLES // BATCH))
    assert max(Counter(s for step in later for s in step).values()) <= 4
    assert len({s for step in later for s in step}) == SAMPLES


@over_table(
    ("ranks", "micro"),
    [(size, micro) for size, micro in product((1, 2, 3, 4, 6, 12), repeat=2) if BATCH % (size * micro) == 0],
)
def test_ranks_and_micro_batches_change_nothing(ranks, micro):
    """Tensor and pipeline ranks of a replica have the same spec, so each of them draws by itself."""
    each = [sampler(rank, ranks, micro) for rank in range(ranks)]
    for iteration in (0, 1, 7, 40, 99):
        begin, stride = iteration * BATCH, ranks * micro
        found = [s.at(place).tolist() for place in range(begin, begin + BATCH, stride) for s in each]
        assert [x for micro_batch in found for x in micro_batch] == WHOLE[iteration]


def test_a_resume_goes_on_where_the_run_stopped():
    """DeepSpeed's replays the draws since its start: it saves numpy's state and not its own generator's."""
    for stop in (1, 29, 60, 77):
        resumed = replace(STEPS, start=STEPS.before(stop))
        assert drawn(resumed, range(stop, 100)) == WHOLE[stop:]


def test_the_order_of_the_questions_does_not_matter():
    """Read-ahead asks for places of later difficulties, and asks twice."""
    alone, places = sampler(), np.random.default_rng(0).integers(0, 99, 30) * BATCH
    for place in places.tolist():
        assert alone.at(place).tolist() == WHOLE[place // BATCH]


def test_threads_may_ask_at_once():
    alone, wrong = sampler(), []

    def ask(seed: int) -> None:
        for iteration in np.random.default_rng(seed).integers(0, 99, 12).tolist():
            if alone.at(iteration * BATCH).tolist() != WHOLE[iteration]:
                wrong.append(iteration)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_batch_may_grow():
    """DeepSpeed's sampler fixes the batch when it is made."""
    steps = Steps(BatchRamp(4, 4, 300, 12), 1, SequenceLengths.constant(8))
    for iteration, samples in enumerate(drawn(steps, range(80))):
        level = DIFFICULTIES.at(Progress(iteration=iteration))["rarity"]
        assert len(samples) == steps.at(steps.before(iteration)).batch_size
        assert max(RANK_OF[samples]) < SAMPLES * level // 100


def test_a_run_may_go_on_with_another_batch_size():
    """Its difficulty is that of its step, and going on once more gives the same samples."""
    start = Progress(iteration=20, samples=20 * BATCH)
    changed = Steps(BatchRamp.constant(5), 1, SequenceLengths.constant(8), start)
    found = drawn(changed, range(20, 60))
    for iteration, samples in enumerate(found, 20):
        level = DIFFICULTIES.at(Progress(iteration=iteration))["rarity"]
        assert max(RANK_OF[samples]) < SAMPLES * level // 100
    later = replace(changed, start=changed.before(33))
    assert drawn(later, range(33, 60)) == found[13:]


def test_a_cluster_smaller_than_a_batch_gives_whole_batches():
    """DeepSpeed's gives a short batch, and with drop-last never gets further."""
    tiny = EligibilityOrder(SHUFFLED, (5, *ORDER.ends[1:]))
    spec = SamplerSpec(SAMPLES, BATCH, 0, 1, SamplerKind.CYCLIC, 3)
    samples = CurriculumSampler.of(spec, tiny, DIFFICULTIES, STEPS).at(0)
    counts = Counter(samples.tolist())
    assert counts.total() == BATCH
    assert set(counts) == set(SHUFFLED[:5].tolist())
    assert set(counts.values()) == {2, 3}


def test_another_seed_gives_another_order():
    assert drawn(STEPS, range(5), seed=4) != WHOLE[:5]
    assert drawn(STEPS, range(5), seed=3) == WHOLE[:5]


def test_without_a_ramp_every_lap_holds_each_sample_once():
    full = Difficulties.of(
        DataSamplingConfig(curriculum_metrics=(ROOT.model_copy(update={"min_difficulty": 100}),))
    )
    spec = SamplerSpec(SAMPLES, 1, 0, 1, SamplerKind.CYCLIC, 3)
    alone = CurriculumSampler.of(spec, EligibilityOrder.of(full, [INDEX]), full, STEPS)
    for lap in range(2):
        found = [int(alone.at(place)[0]) for place in range(lap * SAMPLES, (lap + 1) * SAMPLES)]
        assert sorted(found) == list(range(SAMPLES))


def test_a_sample_beyond_the_dataset_is_an_error():
    spec = SamplerSpec(SAMPLES // 2, BATCH, 0, 1, SamplerKind.CYCLIC, 3)
    foreign = CurriculumSampler.of(spec, ORDER, DIFFICULTIES, STEPS)
    with pytest.raises(DataError, match=r"samples of the dataset, 0..299"):
        foreign.at(0)
