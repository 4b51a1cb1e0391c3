"""What becomes of a dataset's arrays: trimmed, packed, counted and checked."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from megazero.errors import DataError
from megazero.models.bert_batch import BertCollate, random_samples
from megazero.mpu.context import solo_context
from megazero.mpu.rng import sample_keys
from tests.config.samples import make_config
from tests.models.bert_samples import VOCABULARY, samples, widened
from tests.tables import over_table

CPU = torch.device("cpu")

TWO = {
    "tokens": np.array([[2, 9, 4, 3, 8, 3, 0, 0, 0, 0, 0, 0], [2, 7, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0]]),
    "token_types": np.array([[0, 0, 0, 0, 1, 1] + [0] * 6, [0] * 12]),
    "labels": np.array([[-1, -1, 6, -1, 8] + [-1] * 7, [-1, 5] + [-1] * 10]),
    "loss_mask": np.array([[0, 0, 1, 0, 1] + [0] * 7, [0, 1] + [0] * 10], dtype=np.float32),
    "lengths": np.array([6, 3]),
    "is_random": np.array([1, 0]),
    "truncated": np.array([0, 1]),
}


def told(batch) -> dict:
    """Its fields as lists, but for what a step skips, which the engine fills in."""
    assert batch.skipping.idle
    parts = (batch, batch.places, batch.targets)
    values = {field.name: getattr(part, field.name) for part in parts for field in fields(part)}
    found = {name: value for name, value in values.items() if name not in ("skipping", "places", "targets")}
    found["documents"] = batch.places.documents and batch.places.documents.ids
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def test_a_batch_holds_what_someone_reads():
    batch = BertCollate(VOCABULARY, CPU)(TWO, (4, 5))
    assert told(batch) == {
        "tokens": [[2, 9, 4, 3, 8, 3, 0, 0], [2, 7, 3, 0, 0, 0, 0, 0]],
        "token_types": [[0, 0, 0, 0, 1, 1, 0, 0], [0] * 8],
        "masked": [2 * 2 + 0, 4 * 2 + 0, 1 * 2 + 1],  # column x rows + row
        "labels": [6, 8, 5],
        "firsts": [0, 1],
        "is_random": [1, 0],
        "padding": 24 - 9,
        "room": 24,
        "embedded": None,
        "documents": [[0] * 6 + [-1] * 2, [1] * 3 + [-1] * 5],
        "sample_keys": None,
        "positions": None,
        "wanted": None,  # eight columns are all that there are
    }
    heads = {"lm": 3, "lm_accuracy": 3, "sop": 2, "sop_accuracy": 2, "padding": 24}
    assert batch.counts == {**heads, "tokens": 9, "sequences": 2, "micro_batches": 1}
    assert {
        batch.tokens.dtype,
        batch.targets.masked.dtype,
        batch.targets.labels.dtype,
        batch.targets.is_random.dtype,
    } == {torch.int64}


def test_packed_samples_share_a_row_and_keep_apart():
    batch = BertCollate(VOCABULARY, CPU, packed=True, seed=3)(TWO, (4, 5))
    assert told(batch) | {"sample_keys": None} == {
        "tokens": [[2, 9, 4, 3, 8, 3, 2, 7, 3, 0, 0, 0]],
        "token_types": [[0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]],
        "masked": [2, 4, 7],
        "labels": [6, 8, 5],
        "firsts": [0, 6],
        "is_random": [1, 0],
        "padding": 24 - 9,  # of the data, not of the rows
        "room": 24,
        "embedded": None,
        "documents": [[0] * 6 + [1] * 3 + [-1] * 3],
        "sample_keys": None,
        "positions": [[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 0, 0]],
        "wanted": [[0], [2], [4], [6], [7], [1], [3], [5]],  # five that are read, and others
    }
    first, second = sample_keys(3, (4, 5)).tolist()
    assert batch.places.sample_keys[0, :9].tolist() == [first] * 6 + [second] * 3


def test_packed_samples_keep_the_keys_that_they_have_alone():
    """Samples of a row once shared the first one's, so what was dropped depended on the micro-batch."""
    arrays = samples([5, 9, 7, 3], [1, 1, 1, 1], 12)
    batch = BertCollate(VOCABULARY, CPU, packed=True, seed=3)(arrays, (10, 11, 12, 13))
    # Longest first: 9 + 3, then 7 + 5.
    assert batch.places.documents.ids.tolist() == [[1] * 9 + [3] * 3, [2] * 7 + [0] * 5]
    alone = BertCollate(VOCABULARY, CPU, seed=3)(arrays, (10, 11, 12, 13)).places.sample_keys.tolist()
    assert alone == sample_keys(3, (10, 11, 12, 13)).tolist()
    assert batch.places.sample_keys.tolist() == [
        [alone[i] for i in row] for row in batch.places.documents.ids.tolist()
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_columns_that_only_pad_are_left_out_and_change_nothing(packed):
    arrays = samples([5, 14, 7, 3], [2, 0, 1, 3], 16)
    collate = BertCollate(VOCABULARY, CPU, packed=packed, seed=1)
    narrow, wide = told(collate(arrays, (0, 1, 2, 3))), told(collate(widened(arrays, 48), (0, 1, 2, 3)))
    assert (narrow["padding"], narrow["room"]) == (64 - 29, 64)
    assert (wide["padding"], wide["room"]) == (192 - 29, 192)
    if packed:  # longer rows take more
        assert (len(narrow["tokens"]), len(wide["tokens"])) == (2, 1)
        assert len(wide["tokens"][0]) == 32
        assert narrow["labels"] == wide["labels"]
    else:
        assert {k: v for k, v in narrow.items() if k not in ("padding", "room")} == {
            k: v for k, v in wide.items() if k not in ("padding", "room")
        }


@over_table(
    ("longest", "capacity", "multiple", "width"),
    [(3, 32, 8, 8), (8, 32, 8, 8), (9, 32, 8, 16), (9, 32, 12, 12), (30, 31, 8, 31), (31, 31, 8, 31)],
)
def test_widths_are_multiples_and_no_more_than_the_sequence(longest, capacity, multiple, width):
    batch = BertCollate(VOCABULARY, CPU, multiple)(samples([longest, 2], [1, 1], capacity), (0, 1))
    assert batch.tokens.shape == (2, width)


@over_table(("tp", "sp", "multiple"), [(1, False, 8), (3, False, 8), (3, True, 24), (16, True, 16)])
@over_table("packed", [False, True])
def test_it_follows_the_configuration(tp, sp, multiple, packed):
    changes = {"parallel.tensor_model_parallel_size": tp, "parallel.sequence_parallel": sp}
    config = make_config({**changes, "data.bert_pack": packed})
    assert BertCollate.of(config, 9, solo_context(), 5) == BertCollate(9, CPU, multiple, packed, 5)


@pytest.mark.parametrize(("packed", "lengths"), [(False, [8, 8, 8]), (True, [16, 16])])
def test_without_padding_there_is_nothing_to_keep_apart(packed, lengths):
    width = max(lengths)
    batch = BertCollate(VOCABULARY, CPU, packed=packed)(
        samples(lengths, [1] * len(lengths), width), tuple(range(len(lengths)))
    )
    assert (batch.places.documents, batch.padding) == (None, 0)


def test_two_samples_that_fill_a_row_are_kept_apart():
    batch = BertCollate(VOCABULARY, CPU, packed=True)(samples([8, 8], [1, 1], 16), (0, 1))
    assert batch.places.documents.ids.tolist() == [[0] * 8 + [1] * 8]


@over_table(("name", "bad"), [("tokens", 61), ("tokens", -1), ("labels", 61), ("labels", -1)])
def test_foreign_ids_are_refused_where_a_batch_is_made(name, bad):
    arrays = samples([5, 14], [2, 3], 16)
    row, column = np.argwhere(arrays["loss_mask"])[3]
    arrays[name][row, column] = bad
    with pytest.raises(DataError, match=rf"`{name}` must be in \[0, 61\), but is {bad}"):
        BertCollate(VOCABULARY, CPU)(arrays, (0, 1))


@over_table("outside", [-1, -100, 61, 10**6])
def test_labels_of_tokens_that_are_not_masked_are_never_looked_at(outside):
    arrays = samples([5, 14], [2, 3], 16)
    expected = told(BertCollate(VOCABULARY, CPU)(arrays, (0, 1)))
    arrays["labels"][arrays["loss_mask"] == 0] = outside
    assert told(BertCollate(VOCABULARY, CPU)(arrays, (0, 1))) == expected
    assert len(expected["labels"]) == 5
    assert min(expected["labels"]) >= 0


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_to_restore_is_a_batch_too(packed):
    batch = BertCollate(VOCABULARY, CPU, packed=packed)(samples([5, 14], [0, 0], 16), (0, 1))
    assert (batch.targets.masked.shape, batch.targets.labels.shape, batch.counts["lm"]) == ((0,), (0,), 0.0)
    assert batch.targets.masked.dtype == batch.targets.labels.dtype == torch.int64
    assert batch.counts["sop"] == 2.0


def test_random_samples_are_uneven_and_sound():
    found = random_samples(np.random.default_rng(1), 10, 400, 7)
    lengths, mask = found["lengths"], found["loss_mask"] == 1
    places = np.arange(400)
    assert lengths[0] == 400
    assert len(set(lengths.tolist())) > 5
    assert not mask[places >= lengths[:, None]].any()
    assert ((found["labels"] >= 0) == mask).all()
    assert (found["tokens"][places >= lengths[:, None]] == 0).all()
    shares = mask.sum(1) / lengths
    assert shares[[4, 9]].tolist() == [0.0, 0.0]
    others = [i for i in range(10) if i % 5 != 4]
    assert shares[others] == pytest.approx([1 / (3 + i) for i in others], abs=0.12)
    assert (np.diff(found["token_types"][0]) >= 0).all()
    assert set(np.unique(found["token_types"])) == set(np.unique(found["is_random"])) == {0, 1}
    assert np.unique(found["tokens"]).tolist() == list(range(7))


def test_samples_that_are_cut_are_shorter_ones():
    """Cutting the arrays is the same as a dataset of samples that end there."""
    arrays = random_samples(np.random.default_rng(0), 5, 32, 61)
    cut = {name: a[:, :16] if a.ndim == 2 else a for name, a in arrays.items()}
    shorter = {**cut, "lengths": np.minimum(arrays["lengths"], 16)}
    assert (arrays["lengths"] > 16).any()
    found, expected = (
        BertCollate(61, torch.device("cpu"), seed=1)(each, tuple(range(5))) for each in (cut, shorter)
    )
    assert told(found) == told(expected)
    assert found.tokens.shape == (5, 16)
    assert found.padding == 5 * 16 - shorter["lengths"].sum()


def test_a_gpus_batch_knows_where_its_documents_end():
    """As plain rows and packed; padding is a document too. A CPU's kernels find their own."""
    plain = BertCollate(VOCABULARY, torch.device("meta"))(TWO, (4, 5))
    assert plain.places.documents.runs.ends.shape == (5,)  # 0, two samples, and the padding behind each
    assert plain.places.documents.runs.longest == 6
    packed = BertCollate(VOCABULARY, torch.device("meta"), packed=True)(TWO, (4, 5))
    assert packed.places.documents.runs.ends.shape == (4,)
    assert packed.places.documents.runs.longest == 6
    assert BertCollate(VOCABULARY, CPU)(TWO, (4, 5)).places.documents.runs is None
