"""Reading: any box of any piece into any memory, block by block, and nothing that is not needed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megazero.checkpoint import reader as reader_module
from megazero.checkpoint.blocks import BLOCK, BlockFile
from megazero.checkpoint.box import Box
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import iteration_folder, publish
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.reader import CheckpointReader, Verify
from megazero.checkpoint.saver import Saver
from megazero.checkpoint.shards import parts_to_read, parts_to_write
from megazero.checkpoint.tensor_file import Later
from megazero.checkpoint.writer import write_checkpoint, write_description, write_parts
from megazero.errors import DamagedCheckpointError
from megazero.layers.placement import Placement
from megazero.mpu.context import ParallelContext, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.param_spec import Cut, InitialValues, ParamSpec
from megazero.mpu.thread_group import ThreadWorld
from megazero.optim.elementwise import Adam
from megazero.zero.build import build_store
from megazero.zero.optimizer import Optimizer
from megazero.zero.unit import Unit
from tests.zero.policies import make_policy

W = Key("w")
ROOT = Path(__file__).resolve().parents[2]


def cut(directory: Path, tensor: Tensor, cuts: list[list[int]]) -> CheckpointReader:
    """Write a checkpoint with a tensor cut into pieces along each dim, spread over three files."""
    edges = [[0, *at, n] for at, n in zip(cuts, tensor.shape, strict=True)]
    boxes = [
        Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))
        for pairs in product(*(list(pairwise(each)) for each in edges))
    ]
    parts = [Part(W, tuple(tensor.shape), box, tensor[box.slices]) for box in boxes]
    folder = directory / ".iter_0000001.partial"
    folder.mkdir(parents=True)
    written = [write_parts(Disk(), folder, parts[rank::3], rank, 3) for rank in range(3)]
    write_description(Disk(), folder, 1, written, {})
    return CheckpointReader(publish(Disk(), directory, 1))


@pytest.mark.parametrize("staged", [4, 24, 64 << 20], ids="staged{}".format)
@pytest.mark.parametrize("cuts", [[[], [], []], [[2], [], []], [[1, 3], [2], [1]], [[], [], [2]]], ids=str)
def test_every_box_of_every_cut(tmp_path, monkeypatch, staged, cuts):
    monkeypatch.setattr(reader_module, "_STAGED", staged)
    whole = torch.arange(4 * 3 * 5, dtype=torch.float32).view(4, 3, 5)
    reader = cut(tmp_path, whole, cuts)
    edges = [[(a, n) for a in range(size) for n in range(1, size - a + 1)] for size in whole.shape]
    boxes = [Box(tuple(a for a, _ in p), tuple(n for _, n in p)) for p in product(*edges)]
    memory = [torch.full(box.shape, -1.0) for box in boxes[::7]]
    reader.read([Part(W, (4, 3, 5), box, t) for box, t in zip(boxes[::7], memory, strict=True)])
    for box, tensor in zip(boxes[::7], memory, strict=True):
        assert tensor.equal(whole[box.slices]), box


@pytest.mark.parametrize("staged", [8, 64 << 20], ids="staged{}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_memory_of_any_strides_and_dtype(tmp_path, monkeypatch, staged, dtype):
    monkeypatch.setattr(reader_module, "_STAGED", staged)
    whole = torch.randn(6, 4)
    reader = cut(tmp_path, whole, [[3], [1]])
    box = Box((1, 1), (4, 3))
    around = torch.full((3, 8), 9.0, dtype=dtype)
    target = around[:, ::2].t()[:, :]  # [4, 3], backwards in memory, with gaps
    reader.read([Part(W, (6, 4), box, target)])
    assert target.equal(whole[box.slices].to(dtype))
    assert (around[:, 1::2] == 9.0).all(), "what lies between stays as it was"


def test_scalars_and_tensors_without_elements(tmp_path):
    tensors = {W: torch.tensor(3.5), Key("none"): torch.zeros(0, 2)}
    later = [(key, Later(t.dtype, tuple(t.shape), lambda t=t: t)) for key, t in tensors.items()]
    reader = CheckpointReader(write_checkpoint(tmp_path, 1, later, {}))
    assert reader.tensor(W) == 3.5
    assert reader.tensor(Key("none")).shape == (0, 2)
    double = torch.zeros((), dtype=torch.float64)
    reader.read([Part(W, (), Box((), ()), double)])
    assert double == 3.5


@pytest.mark.parametrize("limit", [1, 2, 7, 10, 24, 100])
def test_staging_is_bounded_by_what_a_box_spans(tmp_path, monkeypatch, limit):
    # Once a column of a wide tensor was staged with all that lies between its elements.
    whole = torch.arange(600.0).view(6, 4, 25)
    reader = cut(tmp_path, whole, [[], [], []])
    monkeypatch.setattr(reader_module, "_STAGED", 4 * limit)
    staged, empty = [], torch.empty

    def counted(*args, **kwargs):
        staged.append(empty(*args, **kwargs))
        return staged[-1]

    monkeypatch.setattr(torch, "empty", counted)
    for box in (Box((0, 0, 3), (6, 4, 1)), Box((1, 1, 0), (4, 2, 25)), Box((0, 2, 5), (6, 1, 20))):
        target = torch.zeros(box.shape, dtype=torch.float64)
        reader.read([Part(W, (6, 4, 25), box, target)])
        assert target.equal(whole[box.slices].double())
    assert max(t.numel() for t in staged) <= limit


def test_a_file_is_opened_once_and_another_not_at_all(tmp_path, monkeypatch):
    reader = cut(tmp_path, torch.arange(60.0).view(6, 10), [[2, 4], []])
    opened: list[str] = []
    original = BlockFile.__init__

    def counted(self, path, *args, **kwargs):
        opened.append(path.name)
        original(self, path, *args, **kwargs)

    monkeypatch.setattr(BlockFile, "__init__", counted)
    boxes = [Box((row, 0), (1, 10)) for row in (5, 1, 0, 4)]
    reader.read([Part(W, (6, 10), box, torch.empty(box.shape)) for box in boxes])
    assert opened == ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"]


@pytest.mark.parametrize("verify", Verify)
def test_a_flipped_bit_is_found_where_it_is_read(tmp_path, verify):
    reader = cut(tmp_path, torch.arange(60.0).view(6, 10), [[2, 4], []])
    path = reader.folder / "model-00002-of-00003.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reader = CheckpointReader(reader.folder, verify=verify)
    row = torch.zeros(1, 10)
    reader.read([Part(W, (6, 10), Box((0, 0), (1, 10)), row)])  # it lies in another file
    assert row.tolist() == [list(range(10))]
    if verify is Verify.FULL:
        with pytest.raises(DamagedCheckpointError, match="model-00002-of-00003.safetensors.*block 0"):
            reader.tensor(W)
    else:
        assert not reader.tensor(W).equal(torch.arange(60.0).view(6, 10))


# What ranks read of a checkpoint: sharded by columns, by rows, and not at all; 70 MiB of weights.

SHAPES = {"column": (3072, 4096), "row": (1024, 4096), "norm": (1 << 18,), "embedding": (1027, 1024)}


def weights(context: ParallelContext) -> list[nn.Parameter]:
    cuts = {"column": Cut(0, "tp"), "row": Cut(1, "tp"), "norm": None, "embedding": Cut(0, "tp", 1028)}
    specs = [
        ParamSpec(name, shape, InitialValues("zeros"), (cuts[name],) if cuts[name] else ())
        for name, shape in SHAPES.items()
    ]
    return [Placement.of(context, torch.float32).parameter(spec) for spec in specs]


def on_ranks(grid: ProcessGrid, stage: int, work):
    """Run ``work(optimizer, context)``, without moments, on every rank."""
    world = ThreadWorld(grid.world_size)

    def body(rank: int):
        context = thread_context(world, grid, rank)
        units = [Unit(0, nn.Module(), (param,)) for param in weights(context)]
        policy = make_policy(stage=stage, bucket_size=3 << 20, persistence_threshold=0)
        return work(Optimizer(build_store(units, policy, context), Adam(), context, 0.0), context)

    return world.run(body)


@pytest.fixture(scope="module")
def saved_on_four(tmp_path_factory) -> Path:
    """A checkpoint that four tensor-parallel ranks saved."""
    folder = tmp_path_factory.mktemp("saved")

    def save(optimizer, context):
        for bucket in optimizer.store.buckets:
            master = optimizer.store.at_rest(bucket)["weight"]
            master.copy_(torch.arange(master.numel()) % 1021 + context.tp.rank)
        saver = Saver(folder, context)
        saver.save(1, parts_to_write(optimizer, context, moments=False), {})
        saver.close()

    on_ranks(ProcessGrid(tp=4), 0, save)
    return iteration_folder(folder, 1)


@pytest.fixture
def bytes_read(monkeypatch):
    """Bytes read from tensor files, by the thread that opened them (the rank), whichever threads read."""
    found: Counter[str] = Counter()
    lock = threading.Lock()
    opened, read = BlockFile.__init__, BlockFile._read

    def opening(self, *args, **kwargs):
        self.opener = threading.current_thread().name
        opened(self, *args, **kwargs)

    def reading(self, memory, start):
        if self.path.suffix == ".safetensors":
            with lock:
                found[self.opener] += len(memory)
        read(self, memory, start)

    monkeypatch.setattr(BlockFile, "__init__", opening)
    monkeypatch.setattr(BlockFile, "_read", reading)
    return found


def wanted_blocks(reader: CheckpointReader, parts: list[Part]) -> dict[tuple[str, int], int]:
    """Bytes of each block (file, number) with a part, or with the header of a file that has one."""
    blocks: set[tuple[str, int]] = set()
    sizes = {name: entry.size for name, entry in reader.directory.files().items()}
    for name in sizes:
        for tensor, piece in reader.directory.listed(name) if name.endswith(".safetensors") else ():
            for part in parts:
                common = piece.box.overlap(part.box) if part.key == tensor.key else None
                if common is None:
                    continue
                with reader.open(name) as file:
                    entry = file.entries[reader_module.piece_name(tensor.key, tensor.shape, piece.box)]
                numbers = torch.arange(piece.box.numel).view(piece.box.shape)[common.within(piece.box)]
                first = entry.start + 4 * int(numbers.min())
                last = entry.start + 4 * int(numbers.max()) + 3
                blocks |= {(name, 0)} | {(name, b) for b in range(first // BLOCK, last // BLOCK + 1)}
    return {(name, b): min(BLOCK, sizes[name] - b * BLOCK) for name, b in blocks}


@pytest.mark.parametrize(
    ("grid", "stage"),
    [
        (ProcessGrid(dp=4), 3),
        (ProcessGrid(dp=2), 1),
        (ProcessGrid(tp=4), 0),
        (ProcessGrid(tp=2, dp=2), 2),
        (ProcessGrid(), 0),
    ],
    ids=["D4Z3", "D2Z1", "T4", "T2D2Z2", "one rank"],
)
def test_a_rank_reads_the_blocks_that_hold_its_parts(saved_on_four, bytes_read, grid, stage):
    def load(optimizer, context):
        parts = parts_to_read(optimizer, context, moments=False)
        CheckpointReader(saved_on_four).read(parts)
        return parts

    everyone = on_ranks(grid, stage, load)
    read = dict(bytes_read)
    reader = CheckpointReader(saved_on_four)
    for rank, parts in enumerate(everyone):
        blocks = wanted_blocks(reader, parts)
        # Of a block that was checked before, for a header or a converted part, wanted bytes come again.
        again = 2 * BLOCK * len({name for name, _ in blocks})
        assert 0 <= read[f"rank {rank}"] - sum(blocks.values()) <= again
        own = sum(4 * part.box.numel for part in parts)
        pieces = sum(
            piece.box.overlap(part.box) is not None
            for part in parts
            for tensor in reader.directory.whole().tensors
            for piece in tensor.pieces
            if tensor.key == part.key
        )
        assert read[f"rank {rank}"] <= own + 2 * BLOCK * pieces


def test_without_hashes_a_rank_reads_its_bytes_and_headers(saved_on_four, bytes_read):
    def load(optimizer, context):
        parts = parts_to_read(optimizer, context, moments=False)
        CheckpointReader(saved_on_four, verify=Verify.SIZE).read(parts)
        return sum(4 * part.box.numel for part in parts)

    own = on_ranks(ProcessGrid(dp=4), 3, load)
    for rank, expected in enumerate(own):
        assert expected <= bytes_read[f"rank {rank}"] <= expected + 4 * 4096
    assert sum(own) == sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())


SCRIPT = """
import resource, sys, torch
from megazero.checkpoint.box import Box
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.part import Key, Part

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

reader = CheckpointReader(sys.argv[1])
parts = [
    Part(Key("wide"), (8192, 4096), box, torch.ones(box.shape, dtype=dtype))
    for box, dtype in (
        (Box((0, 1024), (8192, 1024)), torch.float32),
        (Box((1024, 0), (6144, 4096)), torch.bfloat16),
    )
]
reader.read([Part(Key("small"), (3,), Box((0,), (3,)), torch.ones(3))])  # not what a first call loads
before = peak()
reader.read(parts)
assert all((part.tensor == 2.0).all() for part in parts)
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_beside_the_destination_is_bounded(tmp_path):
    """Reads a quarter of the columns of a tensor of 128 MiB, and rows of it in another dtype."""
    tensors = [
        (Key(name), Later(torch.float32, shape, lambda shape=shape: torch.full(shape, 2.0)))
        for name, shape in (("small", (3,)), ("wide", (8192, 4096)))
    ]
    folder = write_checkpoint(tmp_path, 1, tensors, {})
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= (64 << 20) + (24 << 20), "what is staged, and a little"
