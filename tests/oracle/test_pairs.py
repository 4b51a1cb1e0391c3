"""The product trains a T5 as the oracle does, on the samples of its own dataset."""

from __future__ import annotations

import pytest
import torch

from tests.docs.pages import says
from tests.oracle import product
from tests.oracle.cases import PAIR_FACTORS, PAIR_STEPS, RANKS, all_pairs, covering, pair_flags_of, pairs_of
from tests.oracle.pairs import train_pairs
from tests.oracle.test_bert import data, name_of  # noqa: F401 - a fixture
from tests.oracle.trainer import total_samples

CASES = covering(PAIR_FACTORS)
FEW = 5


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name_of(case), marks=[pytest.mark.slow] * (number >= FEW))
        for number, case in enumerate(CASES)
    ],
)
def test_product_trains_a_t5_as_the_oracle(case, data, tmp_path):  # noqa: F811
    flags = {**pair_flags_of(case), "vocab-file": str(data / "vocab.txt")}
    initial = product.initial_weights(flags, data)
    arrays = product.arrays_of(flags, data, total_samples(flags, PAIR_STEPS))
    wanted = train_pairs(flags, arrays, initial, PAIR_STEPS)
    records, tensors = product.train(flags, data, tmp_path, RANKS[case["layout"]])
    assert len(records) == len(wanted.steps) == PAIR_STEPS
    for found, step in zip(records, wanted.steps, strict=True):
        assert found["lm_loss"] == pytest.approx(step["lm_loss"], rel=2e-6)
        assert found["grad_norm"] == pytest.approx(step["grad_norm"], rel=2e-5)
        assert found["learning_rate"] == pytest.approx(step["learning_rate"], rel=1e-12)
        assert found["consumed_samples"] == step["consumed_samples"]
    moved = {name: (weight - initial[name]).abs().max() for name, weight in wanted.weights.items()}
    assert min(moved.values()) > 5e-5, "what does not move shows nothing"
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(tensors[name]["weight"].double(), weight, rtol=2e-5, atol=1e-5, msg=name)


def test_every_pair_of_settings_meets():
    assert set().union(*map(pairs_of, CASES)) == all_pairs(PAIR_FACTORS)
    assert len(CASES) >= 12
    assert says("docs/features.md", f"{len(CASES)} of T5")
