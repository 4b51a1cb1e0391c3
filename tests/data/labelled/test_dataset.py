"""Epochs bring each sample once, on any ranks and with any batch size."""

from __future__ import annotations

import numpy as np
import pytest

from megazero.data.labelled.dataset import EpochOrder, LabelledSamples
from tests.tables import over_table


def samples(count: int, choices: int = 1) -> LabelledSamples:
    """Sample i has the ids [10 i + choice, 1, ...] of i % 3 + 1 tokens, of which the first text has one."""
    rows = [[10 * i + choice, 1, 2][: i % 3 + 1] for i in range(count) for choice in range(choices)]
    offsets = np.cumsum([0, *map(len, rows)])
    firsts = np.ones(len(rows), dtype=np.int64)
    return LabelledSamples(np.concatenate(rows), offsets, firsts, np.arange(count) % 2, choices, 4)


def test_rows_are_padded_and_know_their_segments():
    found = samples(3, choices=2).batch([2, -1])
    assert found["tokens"].tolist() == [[[20, 1, 2, 0], [21, 1, 2, 0]], [[0] * 4, [0] * 4]]
    assert found["token_types"].tolist() == [[[0, 1, 1, 0], [0, 1, 1, 0]], [[0] * 4, [0] * 4]]
    assert found["lengths"].tolist() == [[3, 3], [1, 1]]
    assert found["labels"].tolist() == [0, -1]


@over_table(("count", "batch", "steps"), [(7, 4, 2), (8, 4, 2), (3, 8, 1), (1, 1, 1), (9, 2, 5)])
def test_an_epoch_is_every_sample_once_and_whole_batches(count, batch, steps):
    order = EpochOrder(samples(count), batch, epochs=3, seed=5)
    assert (order.steps, len(order)) == (steps, 3 * steps * batch)
    orders = []
    for epoch in range(3):
        found = order.batch(range(epoch * steps * batch, (epoch + 1) * steps * batch))
        real = found["labels"] >= 0
        orders.append((found["tokens"][real, 0, 0] // 10).tolist())
        assert sorted(orders[-1]) == list(range(count))
        assert real.tolist() == [True] * count + [False] * (len(real) - count)
    if count > 6:
        assert orders[0] != orders[1] != orders[2]


def test_the_order_is_that_of_the_seed_and_epoch():
    order = EpochOrder(samples(7), 4, epochs=2, seed=5)
    assert [int(i) // 10 for i in order.batch(range(7))["tokens"][:, 0, 0]] == [3, 6, 2, 1, 0, 5, 4]
    assert (EpochOrder(samples(7), 4).batch(range(7))["tokens"][:, 0, 0] // 10).tolist() == list(range(7))
    with pytest.raises(IndexError, match="must be in 0..15 of the train split"):
        order.batch([16])


def test_another_content_or_order_has_another_description():
    settings = [(7, 4, 1, 5), (8, 4, 1, 5), (7, 5, 1, 5), (7, 4, 2, 5), (7, 4, 1, 6), (7, 4, 1, None)]
    found = [str(EpochOrder(samples(n), b, e, s).description) for n, b, e, s in settings]
    assert len(set(found)) == len(settings)
