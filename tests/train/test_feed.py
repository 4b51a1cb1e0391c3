"""Micro-batches of a step, read ahead or in line."""

from __future__ import annotations

import numpy as np
import pytest

from megazero.data import sampler
from megazero.data.gpt_dataset import DocumentEnds, GPTSettings, finish_batch
from megazero.data.sampler import BatchSampler, SamplerSpec, batch_indices
from megazero.errors import DataError
from megazero.mpu.rng import sample_keys
from megazero.train.step.feed import ReadAhead, crop, make_feed
from tests.tables import over_table


class Counting:
    """A dataset whose samples are their own numbers."""

    def batch(self, indices):
        return {"tokens": np.asarray(indices)}


def collate(arrays, samples):
    return arrays["tokens"].tolist(), samples


@over_table("ahead", [0, 1, 5])
@over_table("kind", ["single", "cyclic"])
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


def test_rows_of_samples_are_their_columns_in_order():
    arrays = {"tokens": np.arange(20).reshape(2, 10), "index": np.array([7, 9])}
    whole = {name: array.tolist() for name, array in arrays.items()}
    found, places = crop(arrays, (4, 5), None)
    assert ({name: array.tolist() for name, array in found.items()}, places) == (whole, (4, 5))
    found, places = crop(arrays, (4, 5), 6)
    assert found["tokens"].tolist() == [[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]
    assert (found["index"].tolist(), places) == ([7, 9], (4, 5))
    assert crop(arrays, (4, 5), 99)[0]["tokens"].tolist() == whole["tokens"]  # narrower than that
    found, places = crop(arrays, (4, 5), 3, 3)  # the last column of each sample fills no row
    assert found["tokens"].tolist() == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [10, 11, 12],
        [13, 14, 15],
        [16, 17, 18],
    ]
    assert found["index"].tolist() == [7, 7, 7, 9, 9, 9]
    assert places == (4, (4, 1), (4, 2), 5, (5, 1), (5, 2))
    assert all(array.flags.c_contiguous for array in found.values())
    keys = sample_keys(3, places)
    assert len(set(keys.tolist())) == 6
    assert keys[[0, 3]].tolist() == sample_keys(3, (4, 5)).tolist()


@over_table(("length", "rows"), [(16, 1), (7, 1), (8, 2), (5, 3), (1, 16)])
def test_documents_in_a_row_are_those_of_a_row_of_its_own(length, rows):
    """Positions, masks and the bounds of documents follow a cut as if the text had been cut before."""
    rng = np.random.default_rng(5)
    text = rng.integers(0, 5, (3, 17))  # many ends of documents, which are 0
    settings = GPTSettings(
        16, ends=DocumentEnds(0, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True)
    )
    tokens, labels = text[:, :-1].copy(), text[:, 1:].copy()
    found, _ = crop(finish_batch(tokens, labels, settings), (0, 1, 2), length, rows)
    short = [np.ascontiguousarray(a[:, : rows * length].reshape(-1, length)) for a in (tokens, labels)]
    wanted = finish_batch(*short, settings)
    assert found.keys() == wanted.keys()
    for arrays in (found, wanted):
        arrays["document_ids"] = arrays["document_ids"] - arrays["document_ids"][:, :1]
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_what_was_read_ahead_is_dropped_when_the_order_changes():
    order = {"is": 0}

    def read(start: int) -> dict[str, np.ndarray]:
        return {"tokens": np.array([start + order["is"]])}

    reader = ReadAhead(read, ahead=2)
    reader.expect(4, 4)
    assert reader.take(4)["tokens"].tolist() == [4]
    reader.expect(8, 4)
    reader._pending[8].result()  # it has been read
    order["is"] = 100
    reader.forget()
    assert reader.take(8)["tokens"].tolist() == [108]
    reader.close()
