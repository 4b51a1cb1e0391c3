"""Whatever changed in a file is found when it is read, and no more is read than that takes."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from xxhash import xxh3_64_hexdigest

from megazero.checkpoint.blocks import BlockFile, BlockHasher, FileRecord
from megazero.checkpoint.tensor_file import (
    TensorFile,
    memory_of,
    read_bytes,
    write_bytes,
    write_tensors,
)
from megazero.errors import DamagedCheckpointError
from tests.checkpoint.small_files import UnsyncedDisk, address, noise, read_all, small_file
from tests.tables import over_table


def test_a_hasher_does_not_mind_how_bytes_come():
    data = bytes(range(100))
    for step in range(1, 40):
        hasher = BlockHasher(block_size=32)
        for start in range(0, 100, step):
            hasher.update(data[start : start + step])
        expected = tuple(xxh3_64_hexdigest(data[i : i + 32]) for i in range(0, 100, 32))
        assert hasher.record() == FileRecord(100, expected)
    assert BlockHasher().record() == FileRecord(0, ())


def test_bytes_round_trip(tmp_path):
    for size in (0, 1, 31, 32, 33, 200):
        record = write_bytes(UnsyncedDisk(), tmp_path / f"{size}", bytes(range(size)), block_size=32)
        assert read_bytes(tmp_path / f"{size}", record, block_size=32) == bytes(range(size))
        assert len(record.blocks) == -(-size // 32)
    with pytest.raises(DamagedCheckpointError, match="200 bytes are more than the 199"):
        read_bytes(tmp_path / "200", record, block_size=32, most=199)


def is_damaged(path: Path, record: FileRecord | None, block_size: int = 512) -> bool:
    try:
        with TensorFile(path, record, block_size=block_size) as file:
            file.verify_all()
    except DamagedCheckpointError as error:
        return str(path) in str(error)
    return False


def test_every_truncation_and_extension_is_found(tmp_path):
    path = tmp_path / "f"
    record = small_file(path)
    assert not is_damaged(path, record)
    data = path.read_bytes()
    path.write_bytes(data + b"\0")
    assert is_damaged(path, record)
    assert is_damaged(path, None)
    for size in reversed(range(len(data))):
        os.truncate(path, size)
        assert is_damaged(path, record), size
        assert is_damaged(path, None), size


def test_a_changed_bit_of_any_byte_is_found(tmp_path):
    """Flips two bits of each byte, all eight positions within any four bytes."""
    path = tmp_path / "f"
    record = small_file(path)
    data = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for position, byte in enumerate(data):
            for bit in (position % 4, position % 4 + 4):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                assert is_damaged(path, record), (position, bit)
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert not is_damaged(path, record)


def test_a_changed_header_is_refused_or_still_whole_without_a_record(tmp_path):
    """No other exception is raised, and a file that opens has all tensors."""
    path = tmp_path / "f"
    small_file(path)
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    outcomes = set()
    with open(path, "r+b", buffering=0) as file:
        for position in range(header):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([data[position] ^ 1 << bit]), position)
                outcomes.add(is_damaged(path, None) or len(read_all(path)))
            os.pwrite(file.fileno(), data[position : position + 1], position)
    assert outcomes == {True, 3}


def test_a_changed_block_is_named_and_the_others_are_read(tmp_path):
    path = tmp_path / "f"
    record = small_file(path, block_size=256)
    data = bytearray(path.read_bytes())
    data[900] ^= 1
    path.write_bytes(data)
    found = xxh3_64_hexdigest(data[768:1024])
    expected = f"block 3 (bytes 768 to 1024) has hash {found} instead of {record.blocks[3]}"
    with TensorFile(path, record, block_size=256) as file:
        for start, length in ((0, 768), (767, 1), (1024, len(data) - 1024), (1030, 9)):
            memory = bytearray(length)
            file.read_into(memoryview(memory), start)
            assert memory == data[start : start + length]
        for start, length in ((768, 1), (1023, 2), (768, 256), (0, len(data)), (500, 300), (1000, 24)):
            for _ in range(2):
                with pytest.raises(DamagedCheckpointError) as caught:
                    file.read_into(memoryview(bytearray(length)), start)
                assert expected in str(caught.value)
                assert str(path) in str(caught.value)
    with TensorFile(path, record, verify=False) as file:
        assert len(file.entries) == 3


def test_the_header_s_block_is_checked_before_it_is_believed(tmp_path):
    path = tmp_path / "f"
    record = small_file(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"n"', b'"m"'))
    assert set(read_all(path)) == {"layers.0.w", "b", "m"}
    with pytest.raises(DamagedCheckpointError, match="block 0"):
        TensorFile(path, record, block_size=512)


@pytest.mark.parametrize("blocks", [("0" * 16,), ("0" * 16,) * 9], ids=["too few", "too many"])
def test_a_record_must_have_a_hash_for_each_block(tmp_path, blocks):
    path = tmp_path / "f"
    record = small_file(path)
    with pytest.raises(DamagedCheckpointError, match="hashes for its"):
        TensorFile(path, FileRecord(record.size, blocks), block_size=512)


def test_a_file_that_was_not_hashed_has_its_size_checked(tmp_path):
    path = tmp_path / "f"
    record = write_tensors(UnsyncedDisk(), path, [("x", torch.zeros(9))], hashed=False)
    assert record == FileRecord(path.stat().st_size, ())
    assert not is_damaged(path, record)
    assert is_damaged(path, FileRecord(record.size + 1, ()))


def nothing(path: Path) -> None:
    pass


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def link_to_a_good_file(path: Path) -> None:
    small_file(path.with_name("good"))
    path.symlink_to(path.with_name("good"))


@over_table("make", [nothing, os.mkdir, os.mkfifo, link_to_itself, link_to_a_good_file])
def test_only_a_file_is_opened(tmp_path, make: Callable[[Path], None]):
    make(tmp_path / "f")
    with pytest.raises(DamagedCheckpointError, match=str(tmp_path / "f")):
        TensorFile(tmp_path / "f")


@pytest.mark.parametrize("recorded", [True, False])
def test_a_file_cut_while_it_is_open(tmp_path, recorded):
    path = tmp_path / "f"
    record = small_file(path, block_size=256)
    with TensorFile(path, record if recorded else None, block_size=256) as file:
        os.truncate(path, 1024)
        with pytest.raises(DamagedCheckpointError, match=f"`{path}` .* but byte 1[0-9]+ is no longer there"):
            file.tensor("layers.0.w")


def test_a_bad_sector_is_damage_with_its_cause(tmp_path, monkeypatch):
    path = tmp_path / "f"
    record = small_file(path)
    with TensorFile(path, record, block_size=512) as file:

        def fail(*call):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(DamagedCheckpointError, match=f"`{path}`.*Input/output error") as caught:
            file.tensor("layers.0.w")
    assert caught.value.__cause__.errno == errno.EIO


def test_nothing_writes_into_the_memory_once_an_error_is_raised(tmp_path, monkeypatch):
    """Else a thread with another block could write later, over memory that is filled from elsewhere."""
    path = tmp_path / "f"
    write_bytes(UnsyncedDisk(), path, bytes(64), block_size=16)
    damaged = FileRecord(64, ("0" * 16,) * 4)
    running = []
    read_block = BlockFile._read_block

    def watched(self, *arguments):
        running.append(1)
        try:
            read_block(self, *arguments)
        finally:
            running.pop()

    monkeypatch.setattr(BlockFile, "_read_block", watched)
    file = BlockFile(path, damaged, block_size=16)
    for _ in range(50):
        with pytest.raises(DamagedCheckpointError, match="block 0"):
            file.read_into(memoryview(bytearray(64)), 0)
        assert running == []
    file.close()


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("block_size", [16, 33])
def test_any_range_is_read(tmp_path, block_size, every):
    path = tmp_path / "f"
    record = write_tensors(UnsyncedDisk(), path, [("a", noise(torch.uint8, (40,)))], block_size=block_size)
    data = path.read_bytes()
    ranges = [(i, j) for i in range(len(data) + 1) for j in range(i, len(data) + 1)]
    random.Random(0).shuffle(ranges)
    file = None
    for number, (start, stop) in enumerate(ranges[::every]):
        if number % 9 == 0:  # now and then without what an earlier read left
            if file is not None:
                file.close()
            file = TensorFile(path, record, block_size=block_size)
        memory = bytearray(stop - start)
        file.read_into(memoryview(memory), start)
        assert memory == data[start:stop]
    file.close()


@over_table(("start", "length"), [(-1, 1), (0, 10_000), (10_000, 1), (10_000, 0)])
def test_a_range_that_is_not_in_the_file(tmp_path, start, length):
    record = small_file(tmp_path / "f")
    message = f"bytes {start} to {start + length} are not in its {record.size}"
    with (
        TensorFile(tmp_path / "f", record, block_size=512) as file,
        pytest.raises(DamagedCheckpointError, match=message),
    ):
        file.read_into(memoryview(bytearray(length)), start)


@pytest.fixture
def reads(monkeypatch) -> list[tuple[int, int]]:
    """Start and length of each read."""
    preadv, found = os.preadv, []

    def noted(descriptor, buffers, start):
        found.append((start, len(buffers[0])))
        return preadv(descriptor, buffers, start)

    monkeypatch.setattr(os, "preadv", noted)
    return found


def test_small_neighbours_are_read_once(tmp_path, reads):
    """Their common block is read once, with the bytes between them."""
    tensors = {f"{i}": noise(torch.uint8, (7,), i) for i in range(256)}
    record = write_tensors(UnsyncedDisk(), tmp_path / "f", tensors.items(), block_size=1024)
    with TensorFile(tmp_path / "f", record, block_size=1024) as file:
        names = list(file.entries)[::2]
        loaded = {name: torch.empty(7, dtype=torch.uint8) for name in names}
        del reads[:]
        file.read_spans((file.entries[name].start, memory_of(loaded[name])) for name in reversed(names))
        first = file.entries["0"].start // 1024
    assert all(torch.equal(loaded[name], tensors[name]) for name in names)
    later = sorted((start, count) for start, count in reads if start >= (first + 1) * 1024)
    assert len(later) > 20
    assert all(start + count == following for (start, count), (following, _) in pairwise(later))
    assert sum(later[-1]) == record.size


def test_memories_may_want_the_same_bytes(tmp_path):
    record = small_file(tmp_path / "f", block_size=256)
    data = (tmp_path / "f").read_bytes()
    spans = [
        (start, memoryview(bytearray(count))) for start in (0, 40, 250, 300) for count in (0, 1, 60, 600)
    ]
    with TensorFile(tmp_path / "f", record, block_size=256) as file:
        file.read_spans(spans)
    for start, memory in spans:
        assert bytes(memory) == data[start : start + len(memory)]


def test_a_block_that_was_checked_is_not_read_whole_again(tmp_path, reads):
    record = small_file(tmp_path / "f", block_size=256)
    with TensorFile(tmp_path / "f", record, block_size=256) as file:
        file.read_into(memoryview(bytearray(512)), 512)
        file.read_into(memoryview(bytearray(2)), 1030)
        del reads[:]
        file.read_into(memoryview(bytearray(3)), 600)
        file.read_into(memoryview(bytearray(3)), 1100)
    assert reads == [(600, 3), (1100, 3)]


@pytest.mark.parametrize("how", [{}, {"verify": False}])
def test_without_checks_nothing_else_is_read(tmp_path, reads, how):
    record = small_file(tmp_path / "f") if how else None
    small_file(tmp_path / "g")
    with TensorFile(tmp_path / ("f" if how else "g"), record, **how) as file:
        header = file.entries["layers.0.w"].start
        file.tensor("b")
        entry = file.entries["b"]
        file.verify_all()
    assert reads == [(0, 8), (8, header - 8), (entry.start, 80)]


def test_bytes_go_straight_to_their_place(tmp_path, monkeypatch):
    tensor = noise(torch.uint8, (9000,))
    record = write_tensors(UnsyncedDisk(), tmp_path / "f", [("a", tensor)], block_size=1024)
    preadv, found = os.preadv, {}

    def located(descriptor, buffers, start):
        found[start] = address(buffers[0])
        return preadv(descriptor, buffers, start)

    monkeypatch.setattr(os, "preadv", located)
    into = torch.zeros_like(tensor)
    with TensorFile(tmp_path / "f", record, block_size=1024) as file:
        first = file.entries["a"].start
        found.clear()
        file.read_into(memory_of(into), first)
    assert torch.equal(into, tensor)
    assert sorted(found) == [first, *range(1024, 9 * 1024, 1024)]
    assert all(found[start] == into.data_ptr() + start - first for start in found)
