"""Micro-batches of a step, read ahead or in line."""

from __future__ import annotations

import numpy as np
import pytest

from megazero.data import BatchSampler, SamplerSpec, batch_indices, sampler
from megazero.errors import DataError
from megazero.train.feed import make_feed


class Counting:
    """A dataset whose samples are their own numbers."""

    def batch(self, indices):
        return {"tokens": np.asarray(indices)}


def collate(arrays, samples):
    return arrays["tokens"].tolist(), samples


@pytest.mark.parametrize("ahead", [0, 1, 5])
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_a_feed_is_a_function_of_the_consumed_samples(kind, ahead):
    spec = SamplerSpec(24, 2, 1, 2, kind, seed=3)
    feed = make_feed(Counting(), BatchSampler(spec), collate, ahead)
    for consumed in (0, 8, 8, 0, 16):  # in order, again, and back
        found = feed.micro_batches(consumed, 2)
        starts = (consumed, consumed + 4)
        assert [tokens for tokens, _ in found] == [batch_indices(spec, s).tolist() for s in starts]
        assert [samples for _, samples in found] == [(s + 2, s + 3) for s in starts]
    feed.close()


def test_an_epoch_is_shuffled_once(monkeypatch):
    """Each micro-batch once shuffled the whole epoch anew, which takes seconds on a real corpus.

    Only Megatron's order is shuffled at all.
    """
    epochs = []
    real = sampler.part_permutation
    monkeypatch.setattr(sampler, "part_permutation", lambda spec, n: epochs.append(n) or real(spec, n))
    spec = SamplerSpec(24, 2, 0, 2, "cyclic", seed=3, data_sharding=True)
    feed = make_feed(Counting(), BatchSampler(spec), collate, 0)
    for consumed in range(0, 72, 8):
        feed.micro_batches(consumed, 2)
    assert epochs == [0, 1, 2]


def test_the_end_of_the_data_is_an_error_when_it_is_reached():
    feed = make_feed(Counting(), BatchSampler(SamplerSpec(8, 2, 0, 2)), collate, 4)
    feed.micro_batches(0, 2)
    with pytest.raises(DataError, match="must leave a micro-batch"):
        feed.micro_batches(8, 1)
    feed.close()
