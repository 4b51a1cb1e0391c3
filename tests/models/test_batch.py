"""What the collate function keeps of a dataset's arrays, and the random arrays that stand in for one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megazero.models.batch import TextCollate, random_text
from megazero.mpu.context import solo_context
from megazero.mpu.rng import sample_keys
from tests.config.samples import make_config

CPU = torch.device("cpu")


def arrays(**more):
    tokens = np.arange(6, dtype=np.int64).reshape(2, 3)
    return {"tokens": tokens, "labels": tokens + 1, **more}


@pytest.mark.parametrize(("with_positions", "kept"), [(False, None), (True, [[0, 1, 0], [0, 1, 2]])])
def test_positions_are_kept_where_they_do_not_count_from_0(with_positions, kept):
    positions = np.array([[0, 1, 0], [0, 1, 2]])
    batch = TextCollate(8, CPU, with_positions)(arrays(position_ids=positions), (0, 1))
    assert (batch.places.embedded if kept is None else batch.places.embedded.tolist()) == kept
    assert batch.tokens.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert batch.learnt.labels.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("reset", [False, True])
def test_it_follows_the_configuration(reset):
    config = make_config({"data.reset_position_ids": reset})
    assert TextCollate.of(config, 8, solo_context(), 5) == TextCollate(8, CPU, with_positions=reset, seed=5)


def test_a_mask_of_ones_is_left_out_and_any_other_kept():
    collate = TextCollate(8, CPU)
    routed = {"tokens": 6.0, "sequences": 2.0, "micro_batches": 1.0}
    ones = collate(arrays(loss_mask=np.ones((2, 3), np.float32)), (0, 1))
    assert (ones.learnt.weights, ones.learnt.counted, ones.counts) == (None, None, {"lm": 6.0, **routed})
    mask = np.array([[1, 0, 1], [1, 1, 0.5]], np.float32)
    some = collate(arrays(loss_mask=mask), (0, 1))
    assert some.learnt.weights.tolist() == mask.tolist()
    assert some.counts == {"lm": 4.5, **routed}


def test_dropout_keys_are_those_of_the_seed_and_the_samples():
    assert TextCollate(8, CPU)(arrays(), (4, 7)).places.sample_keys is None
    keys = TextCollate(8, CPU, seed=3)(arrays(), (4, 7)).places.sample_keys
    assert keys.tolist() == torch.as_tensor(sample_keys(3, (4, 7))).tolist()


def test_random_text_covers_the_vocabulary_and_counts_fewer_positions_from_sequence_to_sequence():
    text = random_text(np.random.default_rng(1), 4, 3000, 5)
    assert sorted(text) == ["labels", "loss_mask", "tokens"]
    assert all(each.shape == (4, 3000) and each.flags.c_contiguous for each in text.values())
    assert np.unique(text["tokens"]).tolist() == [0, 1, 2, 3, 4]
    assert (text["tokens"][:, 1:] == text["labels"][:, :-1]).all()  # each label is the token that follows
    assert text["loss_mask"].mean(1) == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], abs=0.03)
    assert np.unique(text["loss_mask"]).tolist() == [0.0, 1.0]
