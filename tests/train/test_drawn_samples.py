"""Trainings whose samples are drawn by difficulty, from an analyzer's files, and how they go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megazero.config.pacing import Root
from megazero.config.resolve import parse_config
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data_efficiency.analyzed import AnalyzedDataset, facts_path
from megazero.data_efficiency.metric_index import MetricIndex
from megazero.data_tools.analyze_dataset import main as analyze
from megazero.errors import DataError
from megazero.mpu.launch import Launch
from megazero.train.pretraining import pretrain
from tests.data_efficiency.row_files import write_rows
from tests.train.test_cyclic import EPOCH, STEPS, order, train

BATCH = 12
VALUES = np.random.default_rng(1).integers(1, 9, EPOCH)
PACING = Root(4, 8, 4)
LEVELS = [PACING.at(step) for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    """The data of `test_cyclic.py`: 31 samples for training."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_raw(np.random.default_rng(3).integers(0, 64, 40 * 8), np.full(40, 8))
    return str(prefix)


def files(folder: Path, values: np.ndarray) -> dict[str, str]:
    """An analyzer's files of samples with these values, as a metric's settings."""
    distinct = np.unique(values).tolist()
    rows = [np.flatnonzero(values == value).tolist() for value in distinct]
    return {
        "index_to_sample_path": write_rows(folder / "easy_index_to_sample", rows),
        "index_to_metric_path": write_rows(folder / "easy_index_to_metric", [[value] for value in distinct]),
    }


def metrics(folder: Path, values: np.ndarray = VALUES, **changes: object) -> str:
    """A file with the metric `easy`, as a flag."""
    settings = {
        **files(folder, values),
        "min_difficulty": 4,
        "max_difficulty": 8,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4},
        **changes,
    }
    path = folder / "metrics.json"
    path.write_text(json.dumps({"easy": settings}))
    return f"--curriculum-metrics {path}"


@pytest.fixture(scope="module")
def curriculum(tmp_path_factory) -> str:
    return metrics(tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def alone(prefix, curriculum):
    (seen,) = train([prefix], 1, BATCH, more=curriculum)
    return seen


def test_samples_are_within_the_difficulty_of_their_step(alone):
    samples = order([alone])
    assert alone.epoch == EPOCH
    for step, level in enumerate(LEVELS):
        assert VALUES[samples[step * BATCH : (step + 1) * BATCH]].max() <= level
    assert len(set(LEVELS)) > 2
    assert sorted(set(samples)) == list(range(EPOCH))


@pytest.mark.parametrize(("ranks", "micro"), [(2, 6), (2, 1), (3, 2), (4, 3)])
def test_ranks_and_micro_batches_change_nothing(alone, prefix, curriculum, ranks, micro):
    found = train([prefix], ranks, micro, more=curriculum)
    assert order(found) == order([alone])
    for seen in found:
        assert seen.losses == pytest.approx(alone.losses, rel=1e-5)


def test_a_run_continues_on_any_number_of_ranks(alone, prefix, curriculum, tmp_path):
    losses, found = [], []
    for ranks, micro, stop in ((2, 3, 1), (3, 4, 2), (1, 12, 3), (4, 3, 5), (2, 2, 6)):
        seen = train([prefix], ranks, micro, stop, tmp_path / "run", curriculum)
        losses, found = losses + seen[0].losses, found + order(seen)
    assert losses == pytest.approx(alone.losses, rel=1e-5)
    assert found == order([alone])


def test_the_length_of_the_training_does_not_change_the_data(prefix, curriculum):
    (longer,) = train([prefix], 1, BATCH, 1, more=f"{curriculum} --train-iters 50")
    assert longer.epoch == EPOCH


def test_epochs_are_those_of_the_analysis(prefix, tmp_path):
    """`--train-data-exact-num-epochs` makes the dataset longer, and an index of one epoch is not its."""
    more = "--train-data-exact-num-epochs 3 --dataloader-type single"
    three = 3 * EPOCH + 2  # what is left of each epoch goes on in the next
    (seen,) = train([prefix], 1, BATCH, 1, more=f"{more} {metrics(tmp_path, np.full(three, 4))}")
    assert seen.epoch == three
    with pytest.raises(DataError, match=f"list the {three} samples of the train dataset, but lists {EPOCH}"):
        train([prefix], 1, BATCH, 1, more=f"{more} {metrics(tmp_path)}")


def test_an_index_of_another_dataset_is_refused(prefix, tmp_path):
    """Where something beside it says which one it is of: DeepSpeed's files do not."""
    more = metrics(tmp_path)
    other = AnalyzedDataset("0" * 32, EPOCH, {"seed": 1})
    facts_path(tmp_path / "easy_index_to_sample").write_text(other.to_json())
    with pytest.raises(DataError, match="must be of the dataset that is trained on"):
        train([prefix], 1, BATCH, 1, more=more)


def test_a_blend_without_weights_has_the_numbers_of_the_blend(prefix, tmp_path):
    both = np.tile([2, 9], EPOCH)
    flag = metrics(tmp_path, both, schedule_type="fixed_discrete", schedule_config={"difficulty": [2]})
    flag = flag.replace("metrics.json", "blend.json")
    settings = json.loads((tmp_path / "metrics.json").read_text())
    for name in ("min_difficulty", "max_difficulty"):
        del settings["easy"][name]
    (tmp_path / "blend.json").write_text(json.dumps(settings))
    second = tmp_path / "second"  # a path named twice would be one dataset
    for end in (".bin", ".idx"):
        shutil.copy(prefix + end, f"{second}{end}")
    (seen,) = train([prefix, str(second)], 1, BATCH, 2, more=flag)
    assert seen.epoch == 2 * EPOCH
    assert set(both[order([seen])]) == {2}


SMALL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 12 --train-iters 6 --eval-interval 3 --eval-iters 1 "
    "--hidden-dropout 0.1"
)


def run(folder: Path, *flags: object) -> list[dict]:
    """Train in this process; the metrics of every iteration."""
    path = folder / "metrics.jsonl"
    argv = [word for each in (SMALL, "--metrics-jsonl", path, *flags) for word in str(each).split()]
    pretrain(parse_config(argv, world_size=1).config, Launch())
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("data", ["--data-path {} --split 8,1,1", "--model-family bert --mock-data"])
def test_a_run_that_stops_in_the_ramp_goes_on_bit_for_bit(prefix, tmp_path, data):
    """With lengths that grow too, and micro-batches that are read ahead across a change of difficulty."""
    size = 100_000 if "mock" in data else EPOCH
    values = VALUES if size == EPOCH else np.arange(size) % 8 + 1
    lengths = "--seqlen-schedule fixed_discrete --seqlen-difficulty 6 8 --seqlen-max-step 3"
    flags = (data.format(prefix), metrics(tmp_path, values), lengths)
    whole = run(tmp_path, *flags, "--num-workers 0")
    assert [step["difficulties"] for step in whole] == [{"easy": level} for level in LEVELS]
    keys = ("iteration", "consumed_tokens", "lm_loss", "grad_norm", "learning_rate")
    for stop in (1, 3):
        folder = tmp_path / str(stop)
        folder.mkdir()
        again = (*flags, "--num-workers 5", "--save", folder / "run", "--load", folder / "run")
        run(folder, *again, "--exit-interval", stop)
        assert [[s[k] for k in keys] for s in run(folder, *again)] == [[s[k] for k in keys] for s in whole]


def test_deepspeed_s_section_draws_the_same(prefix, tmp_path):
    flag = metrics(tmp_path)
    metric = json.loads((tmp_path / "metrics.json").read_text())["easy"]
    section = {
        "enabled": True,
        "seed": 99,
        "data_sampling": {
            "enabled": True,
            "num_workers": 0,
            "curriculum_learning": {
                "enabled": True,
                "data_cluster_path": str(tmp_path / "clusters"),
                "curriculum_metrics": {"easy": {**metric, "clustering_type": "schedule_based"}},
            },
        },
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "data_efficiency": section}))
    data = f"--data-path {prefix} --split 8,1,1 --num-workers 0"
    json_flags = f"--deepspeed --deepspeed_config {path} --data-efficiency-curriculum-learning"
    by_json = run(tmp_path, data, json_flags)
    assert not (tmp_path / "clusters").exists()
    assert [s["lm_loss"] for s in by_json] == [
        s["lm_loss"] for s in run(tmp_path, data, flag, "--curriculum-seed 99")
    ]
    assert [s["lm_loss"] for s in by_json] != [s["lm_loss"] for s in run(tmp_path, data, flag)]


def test_a_difficulty_is_a_line_in_charts(prefix, tmp_path):
    run(tmp_path, f"--data-path {prefix} --split 8,1,1 --csv-dir {tmp_path / 'csv'}", metrics(tmp_path))
    rows = (tmp_path / "csv" / "curriculum_easy.csv").read_text().splitlines()
    assert rows == ["iteration,curriculum/easy", *(f"{i},{float(n)}" for i, n in enumerate(LEVELS, 1))]


@pytest.mark.parametrize("kind", ["value", "percentile"])
def test_from_text_to_a_curriculum(prefix, tmp_path, kind):
    """Our analyzer's files, as it writes them: the rarest words come last."""
    argv = (
        f"--data-path {prefix} --split 8,1,1 --seq-length 8 --seed 1234 --vocab-size 64 --output {tmp_path}"
    )
    assert analyze([*argv.split(), "--metric", "total_vocab_freq", "vocab_rarity"]) == 0
    folder = tmp_path / "vocab_rarity"
    values = np.empty(EPOCH, dtype=np.int64)
    index = MetricIndex.open(folder / "vocab_rarity_index_to_sample", folder / "vocab_rarity_index_to_metric")
    values[index.samples] = np.repeat(index.values, np.diff(index.ends, prepend=0))
    easiest, hardest = int(np.median(values)), int(values.max())
    settings = {
        "index_to_sample_path": str(folder / "vocab_rarity_index_to_sample"),
        "index_to_metric_path": str(folder / "vocab_rarity_index_to_metric"),
        "difficulty_type": kind,
        "schedule_type": "fixed_discrete",
        "schedule_config": {
            "difficulty": [easiest, hardest] if kind == "value" else [50, 100],
            "max_step": [3],
        },
    }
    if kind == "percentile":
        settings["index_to_sample_path"] += "_percentile_merged"
    (tmp_path / "metrics.json").write_text(json.dumps({"vocabularyrarity": settings}))
    more = f"--curriculum-metrics {tmp_path / 'metrics.json'}"
    (seen,) = train([prefix], 1, BATCH, more=more)
    samples = order([seen])
    bound = easiest if kind == "value" else np.sort(values)[EPOCH // 2 - 1]
    assert values[samples[: 3 * BATCH]].max() == bound
    assert values[samples].max() == hardest
    with pytest.raises(DataError, match=r"another dataset .*: seed was 1234 and is 5"):
        train([prefix], 1, BATCH, 1, more=f"{more} --seed 5")
