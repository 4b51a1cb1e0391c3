from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from megazero.data.indexed import checksum
from megazero.data.indexed.reader import write_sums
from megazero.data.indexed.writer import IndexedDatasetWriter
from megazero.data_tools.looking import validate
from megazero.data_tools.looking.validate import main


def write(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> str:
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for ids in documents:
            writer.add_document([np.array(ids)])
    return str(prefix)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write(tmp_path / "d", [[3, 4, 5], [], [6, 7, 8, 9, 10]])


def put_mask(prefix: str, values: list[int]) -> None:
    """Put a mask and its checksums beside a dataset."""
    Path(f"{prefix}.mask").write_bytes(bytes(values))
    Path(f"{prefix}.sum").unlink()
    write_sums(prefix)


def flip(path: str, place: int) -> None:
    content = bytearray(Path(path).read_bytes())
    content[place] ^= 4
    Path(path).write_bytes(content)


def test_a_line_for_each_whole_dataset(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_mask(prefix, [1, 0] * 4)
    for suffix in (".bin", ".idx", ".mask"):
        shutil.copy(prefix + suffix, str(tmp_path / "copy") + suffix)
    empty = write(tmp_path / "empty", [])
    assert main([prefix, str(tmp_path / "copy"), prefix, empty, "--vocab-size", "11", "--workers", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"whole    {prefix}: 3 documents, 8 tokens, every checksum right, ids below 11, a loss mask",
        f"whole    {tmp_path}/copy: 3 documents, 8 tokens, no checksums (.sum is missing), ids below 11, "
        f"a loss mask, the same as {prefix}",
        f"whole    {empty}: 0 documents, 0 tokens, every checksum right, ids below 11",
    ]


def test_each_damage_is_a_sentence(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_mask(prefix, [1, 0, 1, 0, 1, 0, 1, 0])
    flip(f"{prefix}.bin", 3)
    flip(f"{prefix}.mask", 4)
    whole = write(tmp_path / "whole", [[1]])
    signed = write(tmp_path / "signed", [[5, 2], [7, 1]], np.int32)
    Path(f"{signed}.sum").unlink()
    flip(f"{signed}.bin", 11)
    tokens = np.fromfile(f"{signed}.bin", dtype="<i4")
    tokens[2] = -7
    tokens.tofile(f"{signed}.bin")
    assert main([prefix, f"{prefix}x", whole, signed, "--vocab-size", "7"]) == 1
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0] == f"damaged  {prefix}"
    assert "must have CRC-32" in lines[1]
    assert "documents 0 to 2" in lines[1]
    assert "the mask is damaged (documents 0 to 2)" in lines[2]
    ids = f"`token ids` of {prefix}.bin must be in 0..6, but token 1 is 1028, and 4 of the next 8 are others"
    assert lines[3] == f"  {ids}; use the tokenizer the dataset was made with."
    assert f"`{prefix}.mask` must be 0 or 1 for each token, but is 5 for token 4" in lines[4]
    assert lines[5] == f"damaged  {prefix}x"
    assert "must be a readable file" in lines[6]
    assert lines[7].startswith(f"whole    {whole}: 1 documents")
    assert "token 2 is -7, and 0 of the next 4 are others" in lines[9]
    assert len(lines) == 10
    named = f"{prefix}x, {prefix}, {signed}"
    assert f"error: `datasets` must be whole, but 3 of 4 are not: {named}" in shown.err


def test_every_block_is_checked_and_many_faults_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last, short block too, and whatever the number of threads and the size of their parts."""
    monkeypatch.setattr(validate, "_MOST_SHOWN", 2)
    for module in (checksum, validate):
        monkeypatch.setattr(module, "BLOCK", 64)
    prefix = write(tmp_path / "d", [[1] * 29] * 5)  # 290 bytes
    for block in range(5):
        flip(f"{prefix}.bin", block * 64 + 11)
    for span in (64, 128):
        monkeypatch.setattr(validate, "_SPAN", span)
        for workers in ("1", "2"):
            assert main([prefix, "--workers", workers]) == 1
            lines = capsys.readouterr().out.splitlines()
            assert lines[0] == f"damaged  {prefix}"
            assert [f"in bytes {at * 64}..{at * 64 + 64}" in lines[1 + at] for at in (0, 1)] == [True, True]
            assert lines[3:] == ["  and 3 more faults"]


def test_a_mask_of_another_size_and_a_damaged_index(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.mask").write_bytes(bytes(5))
    (tmp_path / "d.sum").unlink()
    assert main([prefix]) == 1
    assert f"`{prefix}.mask` must have a byte for each of the 8 tokens, but has 5" in capsys.readouterr().out
    (tmp_path / "d.mask").unlink()
    write_sums(prefix)
    flip(f"{prefix}.idx", 40)
    assert main([prefix]) == 1
    assert "the index is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["x", "--workers", "0"], ["x", "--vocab-size", "0"]])
def test_wrong_flags(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
