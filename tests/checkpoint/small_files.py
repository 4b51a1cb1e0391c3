"""Small tensor files for tests, written quickly."""

from __future__ import annotations

from pathlib import Path

import torch

from megazero.checkpoint.blocks import FileRecord
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.tensor_file import TensorFile, write_tensors


class UnsyncedDisk(Disk):
    """A disk without syncs that records the memory of each write."""

    def __init__(self) -> None:
        self.writes: list[memoryview] = []

    def create(self, path):
        file, write = super().create(path), None
        write = file.write

        def noted(data):
            self.writes.append(memoryview(data))
            write(data)

        file.write, file.sync = noted, lambda: None
        return file


def noise(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bit patterns, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(2, (numel,), generator=generator).bool().view(shape)
    data = torch.randint(256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).view(shape)


def read_all(path: Path, record: FileRecord | None = None, **how) -> dict[str, torch.Tensor]:
    with TensorFile(path, record, **how) as file:
        return {name: file.tensor(name) for name in file.entries}


def address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def small_file(path: Path, block_size: int = 512) -> FileRecord:
    """Write a file of about 1.5 KB in several blocks."""
    tensors = [
        ("layers.0.w", noise(torch.float32, (9, 31))),
        ("b", noise(torch.bfloat16, (40,))),
        ("n", torch.tensor(3)),
    ]
    return write_tensors(UnsyncedDisk(), path, tensors, block_size=block_size)
