"""The product trains a BERT as the oracle does, on the samples of its own dataset."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megazero.data.indexed.writer import IndexedDatasetWriter
from tests.docs.pages import says
from tests.oracle import product
from tests.oracle.bert import train_bert
from tests.oracle.cases import BERT_FACTORS, BERT_STEPS, RANKS, all_pairs, bert_flags_of, covering, pairs_of
from tests.oracle.trainer import total_samples

CASES = covering(BERT_FACTORS)
WORDS = 40


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of a dataset of sentences and its vocabulary, every third entry of which goes on a word."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(3)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [f"{'##' if number % 3 == 2 else ''}w{number}" for number in range(5, WORDS)]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    with IndexedDatasetWriter(folder / "sentences", np.uint16) as writer:
        for _ in range(40):
            sentences = rng.integers(2, 7)
            writer.add_document([rng.integers(5, WORDS, rng.integers(3, 14)) for _ in range(sentences)])
    return folder


def name_of(case) -> str:
    return "-".join(case.values())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_product_trains_a_bert_as_the_oracle(case, data, tmp_path):
    flags = {**bert_flags_of(case), "vocab-file": str(data / "vocab.txt")}
    initial = product.initial_weights(flags, data)
    arrays = product.arrays_of(flags, data, total_samples(flags, BERT_STEPS))
    wanted, both = train_bert(flags, arrays, initial, BERT_STEPS)
    records, tensors = product.train(flags, data, tmp_path, RANKS[case["layout"]])
    assert len(records) == len(wanted.steps) == BERT_STEPS
    for found, step, losses in zip(records, wanted.steps, both, strict=True):
        for name, loss in losses.items():
            assert found[name] == (None if loss is None else pytest.approx(loss, rel=2e-6)), name
        assert ("sop_loss" in found) == (case["two-tasks"] == "both")
        assert found["grad_norm"] == pytest.approx(step["grad_norm"], rel=2e-5)
        assert found["learning_rate"] == pytest.approx(step["learning_rate"], rel=1e-12)
        assert found["consumed_samples"] == step["consumed_samples"]
    moved = {name: (weight - initial[name]).abs().max() for name, weight in wanted.weights.items()}
    assert min(moved.values()) > 1e-4, "what does not move shows nothing"
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(tensors[name]["weight"].double(), weight, rtol=2e-5, atol=1e-5, msg=name)


def test_every_pair_of_settings_meets():
    assert set().union(*map(pairs_of, CASES)) == all_pairs(BERT_FACTORS)
    assert len(CASES) >= 12
    assert says("docs/features.md", f"{len(CASES)} of BERT")
