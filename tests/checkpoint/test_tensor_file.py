"""Tensor files are safetensors files, byte for byte; what is not as it was written is named, not loaded."""

from __future__ import annotations

import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from xxhash import xxh3_64_hexdigest

from megazero.checkpoint.blocks import BLOCK, FileRecord
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.safetensors_header import DTYPES
from megazero.checkpoint.tensor_file import (
    Later,
    TensorFile,
    memory_of,
    write_tensors,
)
from tests.checkpoint.small_files import UnsyncedDisk, address, noise, read_all
from tests.tables import over_table

ONE = torch.ones(1)
SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 0, 3), (33, 17), (2, 1, 3, 2)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return bytes(memory_of(a.contiguous())) == bytes(memory_of(b.contiguous()))


def all_kinds() -> dict[str, torch.Tensor]:
    return {f"{name}{list(shape)}": noise(d, shape) for name, d in DTYPES.items() for shape in SHAPES}


def test_a_file_byte_by_byte(tmp_path):
    tensors = {"w": torch.tensor([[1.0, -2.0]]), "é": torch.tensor(True)}
    record = write_tensors(Disk(), tmp_path / "f", tensors.items())
    header = (
        b'{"w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
        b'"\xc3\xa9":{"dtype":"BOOL","shape":[],"data_offsets":[8,9]}}'
    )
    expected = b"\x78\0\0\0\0\0\0\0" + header + b" " * 10 + b"\0\0\x80\x3f\0\0\0\xc0\x01"
    assert (tmp_path / "f").read_bytes() == expected
    assert record == FileRecord(137, (xxh3_64_hexdigest(expected),))


def test_the_library_reads_ours(tmp_path):
    tensors = all_kinds()
    write_tensors(Disk(), tmp_path / "f", tensors.items())
    loaded = load_file(tmp_path / "f")
    assert loaded.keys() == tensors.keys()
    assert [name for name in tensors if not same(loaded[name], tensors[name])] == []


def test_ours_reads_the_library_s(tmp_path):
    tensors = all_kinds()
    save_file(tensors, tmp_path / "f", metadata={"format": "pt"})
    loaded = read_all(tmp_path / "f")
    assert loaded.keys() == tensors.keys()
    assert [name for name in tensors if not same(loaded[name], tensors[name])] == []
    with TensorFile(tmp_path / "f") as file:
        assert file.metadata == {"format": "pt"}


def test_ours_reads_ours_in_the_order_given(tmp_path):
    tensors = dict(sorted(all_kinds().items(), key=lambda item: item[0][::-1]))
    record = write_tensors(UnsyncedDisk(), tmp_path / "f", tensors.items(), metadata={"a": "b"})
    loaded = read_all(tmp_path / "f", record)
    assert set(loaded) == set(tensors)
    assert [n for n, t in loaded.items() if t.numel()] == [n for n, t in tensors.items() if t.numel()]
    assert [name for name in tensors if not same(loaded[name], tensors[name])] == []
    with TensorFile(tmp_path / "f", record) as file:
        assert file.metadata == {"a": "b"}


def test_no_tensors_are_a_file_too(tmp_path):
    record = write_tensors(UnsyncedDisk(), tmp_path / "f", [])
    assert load_file(tmp_path / "f") == read_all(tmp_path / "f", record) == {}


@over_table(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12).view(3, 4)[:, 1::2],
        torch.arange(5, dtype=torch.bfloat16)[1:4],
        torch.tensor([3]).expand(4, 2),
        torch.nn.Parameter(torch.ones(2, 2)),
    ],
    ids=["transposed", "stepped", "shifted", "expanded", "parameter"],
)
def test_any_strides(tmp_path, tensor):
    record = write_tensors(UnsyncedDisk(), tmp_path / "f", [("x", tensor)])
    assert torch.equal(read_all(tmp_path / "f", record)["x"], tensor)


@pytest.mark.gpu
def test_memory_of_an_accelerator(tmp_path):
    tensors = {"a": torch.randn(300, 7, device="cuda").t(), "b": torch.tensor(3, device="cuda")}
    record = write_tensors(Disk(), tmp_path / "f", tensors.items())
    loaded = read_all(tmp_path / "f", record)
    assert all(torch.equal(loaded[name], tensors[name].cpu()) for name in tensors)


@pytest.mark.parametrize("block_size", [BLOCK, 1000, 1 << 20, 3 << 20])
def test_blocks_are_hashed_as_they_lie_in_the_file(tmp_path, block_size):
    sizes = [5, 3 << 20, 70_000, 0, 9, 1 << 20, 63 << 10, 65 << 10, 4_200_000, 1]
    tensors = {f"{i}": noise(torch.uint8, (size,), i) for i, size in enumerate(sizes)}
    record = write_tensors(UnsyncedDisk(), tmp_path / "f", tensors.items(), block_size=block_size)
    data = (tmp_path / "f").read_bytes()
    blocks = [data[start : start + block_size] for start in range(0, len(data), block_size)]
    assert record == FileRecord(len(data), tuple(xxh3_64_hexdigest(block) for block in blocks))
    loaded = read_all(tmp_path / "f", record, block_size=block_size)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_thousands_of_small_tensors_are_few_writes(tmp_path):
    disk = UnsyncedDisk()
    write_tensors(disk, tmp_path / "f", ((f"t{i}", torch.zeros(100)) for i in range(5000)))
    assert (tmp_path / "f").stat().st_size > 2 << 20
    assert len(disk.writes) == 6  # the header, and what fills the file up to each half MiB and to its end


def test_a_large_tensor_is_written_from_its_own_memory(tmp_path):
    disk, tensor = UnsyncedDisk(), torch.zeros(3 << 20, dtype=torch.uint8)
    write_tensors(disk, tmp_path / "f", [("x", tensor)])
    begin = tensor.data_ptr()
    own = [len(data) for data in disk.writes if begin <= address(data) < begin + len(tensor)]
    assert sum(own) > len(tensor) - (64 << 10)
    assert max(own) == 512 << 10


def test_tensors_made_later_live_one_at_a_time(tmp_path):
    living: list[weakref.ref] = []

    def make() -> torch.Tensor:
        assert [ref() for ref in living if ref() is not None] == []
        made = torch.full((200_000,), float(len(living)))
        living.append(weakref.ref(made))
        return made

    later = Later(torch.float32, (200_000,), make)
    record = write_tensors(UnsyncedDisk(), tmp_path / "f", [("a", later), ("b", later), ("c", later)])
    assert [t[7].item() for t in read_all(tmp_path / "f", record).values()] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("made", [torch.zeros(3), torch.zeros(2, dtype=torch.int32)], ids=["shape", "dtype"])
def test_a_tensor_made_later_must_be_as_announced(tmp_path, made):
    with pytest.raises(ValueError, match=r"`w` must be torch.float32 \[2\], but is"):
        write_tensors(UnsyncedDisk(), tmp_path / "f", [("w", Later(torch.float32, (2,), lambda: made))])


@over_table(
    ("tensors", "message"),
    [
        ([("a", ONE), ("b", ONE), ("a", ONE)], "`a` must be the name of one"),
        ([("__metadata__", ONE)], "`__metadata__` must be the name of one"),
        ([("a", ONE.to(torch.complex64))], "safetensors knows, but has torch.complex64"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_a_file_is_made(tmp_path, tensors, message):
    with pytest.raises(ValueError, match=message):
        write_tensors(Disk(), tmp_path / "f", tensors)
    assert not (tmp_path / "f").exists()
