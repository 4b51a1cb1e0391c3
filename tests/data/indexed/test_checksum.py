from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from megazero.data.indexed import checksum as indexed_checksum
from megazero.data.indexed.checksum import BlockChecksum
from megazero.data.indexed.reader import open_indexed
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.errors import DataError
from tests.data.corpora import GOLDEN_BIN, write_golden
from tests.tables import over_table


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@over_table("sizes", [[0], [1], [10], [9, 1], [3, 3, 3, 3], [25], [10, 10], [4, 20, 1]])
def test_block_checksum_does_not_depend_on_the_pieces(monkeypatch, sizes):
    monkeypatch.setattr(indexed_checksum, "BLOCK", 10)
    data = bytes(range(sum(sizes)))
    checksum = BlockChecksum()
    at = 0
    for size in sizes:
        checksum.update(data[at : at + size])
        at += size
    assert checksum.blocks() == [zlib.crc32(data[b : b + 10]) for b in range(0, len(data), 10)]
    assert checksum.size == len(data)


def test_sums_are_those_of_zlib():
    content = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8).tobytes()
    for size in [*range(300), 4095, 4097, (1 << 20) - 1]:
        for begin in (0, 1, 7):
            piece = content[begin : begin + size]
            half = size // 3
            found = indexed_checksum.crc32(piece[half:], indexed_checksum.crc32(piece[:half]))
            assert found == zlib.crc32(piece)


def test_sidecar_content(tmp_path):
    content = json.loads(Path(f"{write_golden(tmp_path / 'g')}.sum").read_text())
    assert content["format"] == "megazero-sum-1"
    assert content["idx"]["size"] == 126
    assert content["bin"] == {"size": 24, "block": 4194304, "crc32": f"{zlib.crc32(GOLDEN_BIN):08x}"}


def test_flipped_token_is_seen_by_verify_and_names_the_block(tmp_path):
    prefix = tmp_path / "g"
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        writer.add_raw(np.zeros(3 << 20, "uint16"), np.array([3 << 20]))
    open_indexed(prefix, verify=True)
    flip(Path(f"{prefix}.bin"), 5 << 20)
    dataset = open_indexed(prefix)  # not asked to read the tokens
    with pytest.raises(DataError, match=r"bytes 4194304\.\.6291456"):
        dataset.validate(full=True)
    with pytest.raises(DataError, match="tokens are damaged"):
        open_indexed(prefix, verify=True)


def test_moved_document_boundary_is_seen_at_open(tmp_path):
    prefix = write_golden(tmp_path / "g")
    flip(Path(f"{prefix}.idx"), 110)  # boundary 3 -> 2: still rising, so the format alone cannot object
    with pytest.raises(DataError, match="must hash to"):
        open_indexed(prefix)
    Path(f"{prefix}.sum").unlink()
    assert open_indexed(prefix).document_index.tolist() == [0, 2, 2, 5]


def test_sizes_are_checked_first(tmp_path):
    prefix = write_golden(tmp_path / "g")
    with open(f"{prefix}.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match="must be 24 bytes by its checksum file"):
        open_indexed(prefix)


@over_table(
    "text",
    [
        "", "[]", "{}", "3", "{", '{"format": "other"}', "\xff",
        '{"format": "megazero-sum-1", "idx": {"size": 1e999, "blake2b": ""}, '
        '"bin": {"size": 0, "block": 4194304, "crc32": ""}}',
        '{"format": "megazero-sum-1", "idx": {"size": 126, "blake2b": ""}, '
        '"bin": {"size": 24, "block": 4194304, "crc32": ""}}',
    ],
)  # fmt: skip
def test_unreadable_sidecar_is_refused_not_ignored(tmp_path, text):
    prefix = write_golden(tmp_path / "g")
    Path(f"{prefix}.sum").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match="must be a checksum file"):
        open_indexed(prefix)


def test_verify_without_sidecar_is_refused(tmp_path):
    prefix = write_golden(tmp_path / "g")
    Path(f"{prefix}.sum").unlink()
    assert len(open_indexed(prefix)) == 5
    with pytest.raises(DataError, match="must exist to verify"):
        open_indexed(prefix, verify=True)
