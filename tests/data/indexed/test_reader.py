from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from megazero.data.indexed import reader as indexed_reader
from megazero.data.indexed.reader import IndexedDataset, open_indexed
from megazero.errors import DataError
from tests.data.corpora import GOLDEN_BIN, GOLDEN_IDX, GOLDEN_SEQUENCES, write_bytes, write_golden


@pytest.fixture
def golden(tmp_path):
    return IndexedDataset(write_golden(tmp_path / "golden.v1"))


def test_reads_by_sequence_part_and_document(golden):
    assert len(golden) == 5
    assert golden[-1].tolist() == [36, 37]
    assert golden.get(3, offset=1, length=3).tolist() == [32, 33, 34]
    assert golden.get(3, offset=4).tolist() == [35]
    assert golden.get(3, offset=5).tolist() == []
    assert [s.tolist() for s in golden.document(2)] == [[31, 32, 33, 34, 35], [36, 37]]


def test_reads_are_views_and_read_only(golden):
    assert golden[0].base is not None
    with pytest.raises(ValueError, match="read-only"):
        golden[0][0] = 1


@pytest.mark.parametrize(("offset", "length"), [(-1, None), (6, None), (0, 6), (3, 3), (0, -1)])
def test_a_part_outside_its_sequence_is_refused(golden, offset, length):
    with pytest.raises(DataError, match="must stay inside the 5 tokens of sequence 3"):
        golden.get(3, offset, length)


def test_numbers_past_the_end(golden):
    with pytest.raises(IndexError):
        golden[5]
    with pytest.raises(DataError):
        golden.get(5)
    with pytest.raises(DataError):
        golden.get(-1)
    with pytest.raises(DataError):
        golden.document(3)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.idx"):
        open_indexed(tmp_path / "nothing")
    (tmp_path / "half.idx").write_bytes(GOLDEN_IDX)
    with pytest.raises(DataError, match=r"half\.bin"):
        open_indexed(tmp_path / "half")


def test_pickles_as_a_path(golden):
    text = pickle.dumps(golden)
    assert len(text) < 500
    assert [s.tolist() for s in pickle.loads(text)] == GOLDEN_SEQUENCES


def test_a_signed_type_with_negative_ids_is_refused(tmp_path):
    # Code 8 is uint16, 3 is int16 of the same width: ids from 32,768 on would turn negative unseen.
    idx = GOLDEN_IDX[:17] + b"\x03" + GOLDEN_IDX[18:]
    assert len(open_indexed(write_bytes(tmp_path / "small", idx, GOLDEN_BIN))) == 5
    with pytest.raises(DataError, match="must not be negative"):
        open_indexed(write_bytes(tmp_path / "large", idx, GOLDEN_BIN[:-1] + b"\x80"))


def test_full_validation_finds_negative_ids_without_a_sidecar(tmp_path):
    idx = GOLDEN_IDX[:17] + b"\x04" + GOLDEN_IDX[18:54]
    idx += np.array([0, 12, 16, 20, 40, 0, 2, 3, 5], "<i8").tobytes()
    tokens = np.arange(12, dtype="<i4")
    open_indexed(write_bytes(tmp_path / "n", idx, tokens.tobytes())).validate(full=True)
    tokens[7] = -5
    dataset = open_indexed(write_bytes(tmp_path / "n", idx, tokens.tobytes()))
    dataset.validate()
    with pytest.raises(DataError, match="token 7 is -5"):
        dataset.validate(full=True)


class TestFingerprint:
    def key(self, prefix):
        return open_indexed(prefix).fingerprint

    def test_is_of_the_content_alone(self, tmp_path):
        one = write_bytes(tmp_path / "one", GOLDEN_IDX, GOLDEN_BIN)
        two = write_bytes(tmp_path / "two", GOLDEN_IDX, GOLDEN_BIN)
        assert self.key(one) == self.key(two)

    def test_changes_with_a_token_and_with_the_index(self, tmp_path):
        seen = {self.key(write_bytes(tmp_path / "a", GOLDEN_IDX, GOLDEN_BIN))}
        seen.add(self.key(write_bytes(tmp_path / "a", GOLDEN_IDX, b"\xff" + GOLDEN_BIN[1:])))
        other = GOLDEN_IDX[:102] + b"\x01" + GOLDEN_IDX[103:]  # a document boundary, same sequences
        seen.add(self.key(write_bytes(tmp_path / "a", other, GOLDEN_BIN)))
        assert len(seen) == 3

    def test_of_a_large_file_sees_sampled_tokens_and_times(self, tmp_path, monkeypatch):
        monkeypatch.setattr(indexed_reader, "_FULL_HASH_LIMIT", 8)
        monkeypatch.setattr(indexed_reader, "_SAMPLE_BYTES", 4)
        monkeypatch.setattr(indexed_reader, "_SAMPLE_BLOCKS", 3)
        prefix = write_bytes(tmp_path / "a", GOLDEN_IDX, GOLDEN_BIN)
        os.utime(f"{prefix}.bin", ns=(1, 1))
        before = self.key(prefix)
        assert before == self.key(prefix)
        write_bytes(prefix, GOLDEN_IDX, GOLDEN_BIN[:-1] + b"\x01")
        os.utime(f"{prefix}.bin", ns=(1, 1))
        assert self.key(prefix) != before
        write_bytes(prefix, GOLDEN_IDX, GOLDEN_BIN)
        os.utime(f"{prefix}.bin", ns=(1, 2))
        assert self.key(prefix) != before
