from __future__ import annotations

import struct

import numpy as np
import pytest

from megazero.data.indexed.format import dtype_for_vocab
from megazero.data.indexed.reader import IndexedDataset, open_indexed
from megazero.errors import DataError
from tests.data.corpora import GOLDEN_BIN, GOLDEN_IDX, GOLDEN_SEQUENCES, write_bytes
from tests.tables import over_table


def patched(at: int, content: bytes) -> bytes:
    return GOLDEN_IDX[:at] + content + GOLDEN_IDX[at + len(content) :]


def test_golden_bytes_read_as_megatron_reads_them(tmp_path):
    dataset = open_indexed(write_bytes(tmp_path / "g", GOLDEN_IDX, GOLDEN_BIN))
    assert [s.tolist() for s in dataset] == GOLDEN_SEQUENCES
    assert dataset.dtype == np.uint16
    assert dataset.lengths.tolist() == [3, 1, 1, 5, 2]
    assert dataset.offsets.tolist() == [0, 6, 8, 10, 20]
    assert dataset.document_index.tolist() == [0, 2, 3, 5]
    assert dataset.total_tokens == 12
    assert not dataset.has_checksums


@over_table(
    ("idx", "words"),
    [
        (b"", "34 bytes"),
        (GOLDEN_IDX[:33], "34 bytes"),
        (b"X" + GOLDEN_IDX[1:], "must start with"),
        (patched(9, b"\x02"), "`version`"),
        (patched(17, b"\x00"), "`element code`"),
        (patched(17, b"\x09"), "`element code`"),
        (patched(17, b"\x07"), "float32"),
        (patched(18, struct.pack("<Q", 6)), "must be 138 bytes"),
        (patched(18, struct.pack("<Q", (1 << 64) - 1)), "cut short, extended"),
        (patched(26, struct.pack("<Q", 1 << 63)), "cut short, extended"),
        # 12 * S wraps to a small number in 64 bits: only unbounded arithmetic sees through it.
        (patched(18, struct.pack("<Q", (1 << 64) // 12 + 6)), "cut short, extended"),
        (GOLDEN_IDX[:-1], "cut short, extended"),
        (GOLDEN_IDX + b"\x00", "cut short, extended"),
        (patched(34, struct.pack("<i", -3)), "`length` of sequence 0"),
        (patched(34, struct.pack("<i", 4)), "`offset` of sequence 1"),
        (patched(50, struct.pack("<i", 3)), "must be 26 bytes"),
        (patched(54, struct.pack("<q", 2)), "`offset` of sequence 0"),
        (patched(78, struct.pack("<q", 1 << 62)), "`offset` of sequence 3"),
        (patched(94, struct.pack("<q", 1)), "must run from 0 to 5"),
        (patched(102, struct.pack("<q", 4)), "never fall, but entry 2 is 3 after 4"),
        (patched(118, struct.pack("<q", 4)), "must run from 0 to 5"),
    ],
)
def test_each_damage_is_refused_by_name(tmp_path, idx, words):
    prefix = write_bytes(tmp_path / "d", idx, GOLDEN_BIN)
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix)
    assert words in str(caught.value)
    assert str(prefix) in str(caught.value)


@over_table("tokens", [GOLDEN_BIN[:-1], GOLDEN_BIN[:-2], GOLDEN_BIN + b"\x00\x00", b""])
def test_bin_of_another_size_is_refused(tmp_path, tokens):
    with pytest.raises(DataError, match="must be 24 bytes by the lengths of its index"):
        IndexedDataset(write_bytes(tmp_path / "d", GOLDEN_IDX, tokens))


def test_modes_are_read_when_told_and_suspected_when_not(tmp_path):
    prefix = write_bytes(tmp_path / "m", GOLDEN_IDX + bytes([0, 0, 1, 0, 1]), GOLDEN_BIN)
    assert IndexedDataset(prefix, multimodal=True).modes.tolist() == [0, 0, 1, 0, 1]
    with pytest.raises(DataError, match="seems to hold a mode for each"):
        IndexedDataset(prefix)
    plain = write_bytes(tmp_path / "p", GOLDEN_IDX, GOLDEN_BIN)
    with pytest.raises(DataError, match="has no modes"):
        IndexedDataset(plain, multimodal=True)


def test_more_sequences_than_one_chunk_of_the_checks(tmp_path):
    count = (1 << 20) + 3
    lengths = np.ones(count, dtype="<i4")
    offsets = np.arange(count, dtype="<i8") * 2
    documents = np.arange(count + 1, dtype="<i8")

    def index() -> bytes:
        head = GOLDEN_IDX[:18] + struct.pack("<QQ", count, count + 1)
        return head + lengths.tobytes() + offsets.tobytes() + documents.tobytes()

    prefix = write_bytes(tmp_path / "big", index(), bytes(2 * count))
    assert len(IndexedDataset(prefix)) == count
    offsets[1 << 20] += 2
    with pytest.raises(DataError, match=f"`offset` of sequence {1 << 20} "):
        IndexedDataset(write_bytes(prefix, index(), bytes(2 * count)))
    offsets[1 << 20] -= 2
    documents[1 << 20] -= 2
    with pytest.raises(DataError, match=f"entry {1 << 20} "):
        IndexedDataset(write_bytes(prefix, index(), bytes(2 * count)))


def legacy_index(**change: list[int]) -> bytes:
    """A TNTIDX file of the golden sequences in uint16."""
    parts = {
        "header": [1, 8, 2, 5, 5, 4],
        "dims": [0, 1, 2, 3, 4, 5],
        "starts": [0, 3, 4, 5, 10, 12],
        "sizes": [3, 1, 1, 5, 2],
        "documents": [0, 2, 3, 5],
    }
    parts.update(change)
    words = [word for part in parts.values() for word in part]
    return b"TNTIDX\x00\x00" + np.array(words, dtype="<i8").tobytes()


def test_legacy_kind_is_told_apart_and_read(tmp_path):
    dataset = open_indexed(write_bytes(tmp_path / "t", legacy_index(), GOLDEN_BIN))
    assert [s.tolist() for s in dataset] == GOLDEN_SEQUENCES
    assert dataset.document(0)[1].tolist() == [14]
    assert dataset.lengths.dtype == np.int32
    with pytest.raises(DataError, match="must start with"):
        IndexedDataset(tmp_path / "t")


@over_table(
    ("change", "words"),
    [
        ({"header": [2, 8, 2, 5, 5, 4]}, "`version`"),
        ({"header": [1, 8, 4, 5, 5, 4]}, "`element size`"),
        ({"header": [1, 8, 2, 6, 5, 4]}, "one size per item"),
        ({"header": [1, 8, 2, (1 << 62), (1 << 62), 4]}, "one size per item"),
        ({"dims": [0, 1, 2, 3, 4, 6]}, "`dim offsets`"),
        ({"starts": [0, 3, 4, 5, 10, 13]}, "must end at 12 elements"),
        ({"starts": [0, 3, -4, 5, 10, 12]}, "inside the .bin"),
        ({"starts": [0, 3, 5, 5, 10, 12]}, "`offset` of sequence 2"),
        ({"sizes": [3, 1, -1, 7, 2]}, "`sizes`"),
        ({"documents": [0, 4, 3, 5]}, "never fall"),
    ],
)
def test_legacy_damage_is_refused(tmp_path, change, words):
    with pytest.raises(DataError, match=words):
        open_indexed(write_bytes(tmp_path / "t", legacy_index(**change), GOLDEN_BIN))


def test_element_type_of_a_vocabulary():
    assert dtype_for_vocab(65499) == np.uint16
    assert dtype_for_vocab(65500) == np.int32
