"""All methods at once, as a DeepSpeed JSON says: samples by difficulty, lengths, random-LTD, a batch ramp."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megazero.config.resolve import parse_config
from tests.config.deepspeed.data_efficiency_keys import RARITY, TRUNCATE
from tests.data_efficiency.row_files import write_rows
from tests.train.random_ltd_json import random_ltd_section
from tests.train.test_cyclic import EPOCH, order, prefix, train

__all__ = ["prefix"]
VALUES = np.random.default_rng(1).integers(1, 9, EPOCH)
SIZES = [4, 4, 8, 8, 8, 8]
RAMP = "--num-layers 4 --global-batch-size 8 --rampup-batch-size 4 4 8"


def deepspeed_json(folder: Path) -> Path:
    """The three sections of published configurations, for the data of `test_cyclic.py`."""
    distinct = np.unique(VALUES).tolist()
    rows = [np.flatnonzero(value == VALUES).tolist() for value in distinct]
    rarity = {
        **RARITY,
        "index_to_sample_path": write_rows(folder / "rare_index_to_sample", rows),
        "index_to_metric_path": write_rows(folder / "rare_index_to_metric", [[v] for v in distinct]),
        "min_difficulty": 40,
        "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 1, "root_degree": 2},
    }
    lengths = {
        **TRUNCATE,
        "min_difficulty": 4,
        "max_difficulty": 8,
        "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 4},
    }
    learning = {
        "enabled": True,
        "data_cluster_path": "unused",
        "curriculum_metrics": {"seqlen_truncate": lengths, "vocabularyrarity": rarity},
    }
    section = {
        "enabled": True,
        "seed": 1234,
        "data_sampling": {"enabled": True, "num_workers": 0, "curriculum_learning": learning},
        "data_routing": {"enabled": True, "random_ltd": random_ltd_section(2, 8, 6, 2)},
    }
    path = folder / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "data_efficiency": section}))
    return path


@pytest.fixture
def flags(tmp_path) -> str:
    switches = "--data-efficiency-curriculum-learning --random-ltd --deepspeed --deepspeed_config"
    return f"{RAMP} {switches} {deepspeed_json(tmp_path)}"


def test_the_sections_are_one_tree(flags):
    argv = f"--hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-2 --train-iters 6 {flags}"
    config = parse_config([*argv.split(), "--mock-data", "--vocab-size", "64"], world_size=1).config
    assert [metric.name for metric in config.data_sampling.curriculum_metrics] == ["vocabularyrarity"]
    assert config.curriculum.seqlen_schedule == "fixed_linear"
    assert config.skipping.random_ltd_layer_id == (1, 2)
    assert config.data_sampling.curriculum_seed == 1234


def test_every_layout_and_every_stop_trains_the_same(prefix, flags, tmp_path):
    """In mid-ramp of everything, and on other numbers of ranks."""
    (alone,) = train([prefix], 1, 1, more=flags)
    samples = order([alone])
    assert len(samples) == sum(SIZES)
    easiest = np.sort(VALUES)[: EPOCH * 40 // 100]
    assert VALUES[samples[: SIZES[0]]].max() <= np.unique(easiest)[-1] + 1
    folder, losses, found = tmp_path / "run", [], []
    for ranks, micro, stop in ((2, 1, 1), (1, 4, 3), (4, 1, 5), (1, 1, 6)):
        more = flags.replace("ds.json", f"ds-{micro}.json")
        changed = (tmp_path / "ds.json").read_text().replace('gpu": 1', f'gpu": {micro}')
        (tmp_path / f"ds-{micro}.json").write_text(changed)
        seen = train([prefix], ranks, micro, stop, folder, more)
        losses, found = losses + seen[0].losses, found + order(seen)
    assert found == samples
    assert losses == pytest.approx(alone.losses, rel=1e-5)
