"""Writing: what one process writes is read back in every dtype, and what does not fit together is refused."""

from __future__ import annotations

import errno
import json
import os
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megazero.checkpoint.box import Box
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import iteration_folder, latest_iteration, saved_iterations
from megazero.checkpoint.lock import WriterLock
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.safetensors_header import DTYPES
from megazero.checkpoint.tensor_file import Later, memory_of
from megazero.checkpoint.writer import Written, write_checkpoint, write_description, write_parts
from megazero.errors import CheckpointError
from tests.tables import over_table


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of random bits."""
    count = Box.whole(shape).numel * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def later(tensor: Tensor) -> Later:
    return Later(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def equal(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and memory_of(a.contiguous()) == memory_of(b.contiguous())


def part(tensor: Tensor, name: str = "w", kind: str = "weight", shape=None, offset=None) -> Part:
    shape = tuple(shape or tensor.shape)
    box = Box(tuple(offset or [0] * len(shape)), tuple(tensor.shape))
    return Part(Key(name, kind), shape, box, tensor)


@over_table("shape", [(), (0, 3), (5,), (3, 4, 2)], ids=str)
def test_tensors_of_all_dtypes_come_back(tmp_path, shape):
    tensors = {Key(name): sample(dtype, shape) for name, dtype in DTYPES.items()}
    tensors[Key("F32", "exp_avg")] = sample(torch.float32, shape)
    folder = write_checkpoint(tmp_path, 3, [(key, later(t)) for key, t in tensors.items()], {"a": [1, None]})
    assert folder == iteration_folder(tmp_path, 3) == tmp_path / "iter_0000003"
    reader = CheckpointReader(folder)
    assert reader.facts == {"a": [1, None]}
    assert reader.shapes == dict.fromkeys(tensors, shape)
    for key, tensor in tensors.items():
        assert equal(reader.tensor(key), tensor), key
    assert latest_iteration(tmp_path) == 3
    assert (folder / "latest_checkpointed_iteration.txt").exists() is False


def test_files_are_named_and_filled_as_asked(tmp_path):
    tensors = [(Key(f"t{i}"), later(torch.full((10,), float(i)))) for i in range(5)]
    tensors.insert(2, (Key("t0", "exp_avg"), later(torch.zeros(100))))
    folder = write_checkpoint(tmp_path, 0, tensors, {}, shard_bytes=80)
    model = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.json",
        "manifest.json",
        *model,
        "model.safetensors.index.json",
        "optimizer-00001-of-00001.safetensors",
        "state.json",
    ]
    assert [sorted(load_file(folder / name)) for name in model] == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    assert list(load_file(folder / "optimizer-00001-of-00001.safetensors")) == ["t0/exp_avg"]
    names = json.loads((folder / "model.safetensors.index.json").read_text())
    assert names["metadata"] == {"total_size": 200}
    assert names["weight_map"] == {f"t{i}": model[i // 2] for i in range(5)}


def test_one_tensor_is_alive_at_a_time(tmp_path):
    alive: set[int] = set()
    most = []

    def make(number: int) -> Tensor:
        memory = np.full(100_000, number, dtype=np.float32)
        weakref.finalize(memory, alive.discard, number)
        alive.add(number)
        most.append(len(alive))
        return torch.from_numpy(memory)

    tensors = [(Key(f"t{i}"), Later(torch.float32, (100_000,), partial(make, i))) for i in range(6)]
    write_checkpoint(tmp_path, 1, tensors, {}, shard_bytes=800_000)
    assert most == [1] * 6
    assert alive == set()


def test_a_tensor_that_cannot_be_made_leaves_nothing(tmp_path):
    write_checkpoint(tmp_path, 1, [(Key("w"), later(torch.ones(3)))], {})

    def fail() -> Tensor:
        raise CheckpointError("the source is damaged")

    tensors = [(Key("v"), later(torch.ones(3))), (Key("w"), Later(torch.float32, (3,), fail))]
    with pytest.raises(CheckpointError, match="the source is damaged"):
        write_checkpoint(tmp_path, 2, tensors, {})
    assert sorted(os.listdir(tmp_path)) == [".lock", "iter_0000001", "latest_checkpointed_iteration.txt"]


def test_a_full_disk_is_an_error_of_checkpoints(tmp_path):
    class Full(Disk):
        def create(self, path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with pytest.raises(CheckpointError, match="must be written, but cannot be.*No space left on device"):
        write_checkpoint(tmp_path, 2, [(Key("w"), later(torch.ones(3)))], {}, disk=Full())
    assert saved_iterations(tmp_path) == []


def test_another_writer_is_not_disturbed(tmp_path):
    lock = WriterLock(tmp_path)
    with pytest.raises(CheckpointError, match=f"one job at a time, but process {os.getpid()} on"):
        write_checkpoint(tmp_path, 2, [(Key("w"), later(torch.ones(3)))], {})
    lock.release()
    write_checkpoint(tmp_path, 2, [(Key("w"), later(torch.ones(3)))], {})


def test_a_rank_writes_weights_and_the_rest_to_two_files(tmp_path):
    grid = torch.arange(12.0).view(3, 4)
    parts = [
        part(grid[1:, 2:], shape=(3, 4), offset=(1, 2)),  # strided
        part(grid.t(), name="turned"),
        # One element is contiguous to torch, whatever its strides; this one once could not be written.
        part(grid.t()[3:, 2:], name="corner"),
        part(torch.tensor(7.0), name="scalar", kind="exp_avg"),
        part(torch.zeros(0, 3), name="nothing", kind="exp_avg"),
        part(grid[:0], name="none of it", shape=(3, 4)),
    ]
    written = write_parts(Disk(), tmp_path, parts, 1, 4)
    weights = load_file(tmp_path / "model-00002-of-00004.safetensors")
    assert {name: t.tolist() for name, t in weights.items()} == {
        "w[1:3,2:4]": [[6.0, 7.0], [10.0, 11.0]],
        "turned": grid.t().tolist(),
        "corner": [[11.0]],
    }
    rest = load_file(tmp_path / "optimizer-00002-of-00004.safetensors")
    assert {name: t.tolist() for name, t in rest.items()} == {"scalar/exp_avg": 7.0, "nothing/exp_avg": []}
    assert written.files.keys() == {path.name for path in tmp_path.iterdir()}


def test_a_rank_with_nothing_to_write_writes_no_file(tmp_path):
    assert write_parts(Disk(), tmp_path, [], 0, 1) == Written({}, [])
    write_parts(Disk(), tmp_path, [part(torch.ones(2), kind="exp_avg")], 0, 1)
    assert os.listdir(tmp_path) == ["optimizer-00001-of-00001.safetensors"]


@over_table(
    ("parts", "why"),
    [
        ([part(torch.ones(2), shape=(4,))], "2 of 4 elements are there"),
        ([part(torch.ones(3), shape=(4,)), part(torch.ones(2), shape=(4,), offset=(2,))], "overlap"),
        ([part(torch.ones(2), shape=(4,)), part(torch.ones(2).half(), shape=(4,), offset=(2,))], "F32.*F16"),
        ([part(torch.ones(2), shape=(4,)), part(torch.ones(2), shape=(3,), offset=(1,))], "the same on all"),
        ([part(torch.ones(2)), part(torch.ones(2))], "overlap"),
    ],
    ids=["gap", "overlap", "dtypes", "shapes", "twice"],
)
def test_what_ranks_wrote_must_make_whole_tensors(tmp_path: Path, parts, why):
    written = [write_parts(Disk(), tmp_path, [each], rank, 2) for rank, each in enumerate(parts)]
    with pytest.raises(CheckpointError, match=why):
        write_description(Disk(), tmp_path, 1, written, {})
    assert not (tmp_path / "manifest.json").exists(), "the folder is no checkpoint"
