"""The contenders of `checkpoint.py`: ways to bring a rank's tensors to disk and back into memory.

All hold the same state, the weights and two moments of a GPT in fp32; each rank has an equal share along dim
0 of every tensor. All load into the same tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megazero.checkpoint import writer as writer_module
from megazero.checkpoint.blocks import BLOCK, FileRecord
from megazero.checkpoint.box import Box
from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.part import WEIGHT, Key, Part
from megazero.checkpoint.reader import CheckpointReader, Verify
from megazero.checkpoint.saver import Saver
from megazero.checkpoint.tensor_file import memory_of, write_tensors
from megazero.mpu.context import ParallelContext

LAYERS, VOCAB, SEQUENCE = 4, 50304, 1024
KINDS = (WEIGHT, "exp_avg", "exp_avg_sq")
ITERATION = 1


@dataclass(frozen=True)
class State:
    """What a rank saves, and other memory of the same shapes to load into.

    Attributes:
        parts: what is saved.
        targets: what is loaded into.
        whole_bytes: the bytes of all ranks together.
    """

    parts: tuple[Part, ...]
    targets: tuple[Part, ...]
    whole_bytes: int

    @property
    def saved(self) -> dict[str, Tensor]:
        """By name."""
        return {str(part.key): part.tensor for part in self.parts}

    @property
    def loaded(self) -> dict[str, Tensor]:
        """By name."""
        return {str(part.key): part.tensor for part in self.targets}


@dataclass(frozen=True)
class Place:
    """Where a way works: its folder, and the ranks that share it."""

    folder: Path
    context: ParallelContext


class Way(Protocol):
    """A contender; all ranks call its methods together."""

    def save(self) -> None:
        """Write this rank's tensors."""

    def load(self) -> None:
        """Fill this rank's targets."""


class Background(Protocol):
    """A contender that writes while its caller goes on; ranks call everything but `writing` together."""

    def begin(self) -> None:
        """Begin to save; the tensors must not change yet."""

    def hold(self) -> None:
        """Return when the tensors may change."""

    def writing(self) -> bool:
        """Whether this rank is still writing."""

    def advance(self) -> bool:
        """Do what is due once no rank is writing. Returns whether the checkpoint is visible."""


def gpt_shapes(size: float) -> dict[str, tuple[int, ...]]:
    """Parameters of a GPT whose weights and two moments in fp32 take about `size` bytes."""

    def shapes(hidden: int) -> dict[str, tuple[int, ...]]:
        found = {"embedding.word": (VOCAB, hidden), "embedding.position": (SEQUENCE, hidden)}
        for layer in range(LAYERS):
            for name, out, width in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)):
                found[f"layers.{layer}.{name}.weight"] = (out * hidden, width * hidden)
                found[f"layers.{layer}.{name}.bias"] = (out * hidden,)
            for norm in ("norm1", "norm2"):
                found |= {f"layers.{layer}.{norm}.{each}": (hidden,) for each in ("weight", "bias")}
        return found | {"norm.weight": (hidden,), "norm.bias": (hidden,)}

    def distance(hidden: int) -> float:
        return abs(size - _bytes(shapes(hidden)))

    return shapes(min(range(64, 8192, 64), key=distance))


def make_state(size: float, rank: int, ranks: int) -> State:
    """This rank's share of about `size` bytes."""
    generator = torch.Generator().manual_seed(rank)
    shapes = gpt_shapes(size)
    parts, targets = [], []
    for kind in KINDS:
        for name, shape in shapes.items():
            rows = shape[0] // ranks
            box = Box((rank * rows, *[0] * (len(shape) - 1)), (rows, *shape[1:]))
            tensor = torch.rand(box.shape, generator=generator)
            parts.append(Part(Key(name, kind), shape, box, tensor))
            targets.append(Part(Key(name, kind), shape, box, torch.zeros_like(tensor)))
    return State(tuple(parts), tuple(targets), _bytes(shapes))


def _bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return len(KINDS) * sum(4 * Box.whole(shape).numel for shape in shapes.values())


class Megazero:
    """Blocking saves of a run: fsynced, hashed, made visible; loads that compare the hashes."""

    def __init__(self, place: Place, state: State):
        self.saver = Saver(place.folder, place.context)
        self.state = state

    def save(self) -> None:
        self.saver.save(ITERATION, self.state.parts, {})

    def load(self) -> None:
        self.read(Verify.FULL)

    def read(self, verify: Verify) -> None:
        reader = CheckpointReader(iteration_folder(self.saver.directory, ITERATION), verify=verify)
        reader.read(self.state.targets)


class MegazeroUnhashed(Megazero):
    """The same without hashes of the tensors, which users cannot choose: the difference is their cost."""

    def save(self) -> None:
        with mock.patch.object(writer_module, "write_tensors", _write_unhashed):
            super().save()

    def load(self) -> None:
        self.read(Verify.SIZE)


def _write_unhashed(*args: object) -> FileRecord:
    size = write_tensors(*args, hashed=False).size
    return FileRecord(size, ("0" * 16,) * -(-size // BLOCK))


class MegazeroBackground:
    """Saves whose copies are made during the next forward and backward."""

    def __init__(self, place: Place, state: State):
        self.saver = Saver(place.folder, place.context, in_flight=1)
        self.state = state

    def begin(self) -> None:
        self.saver.save(ITERATION, self.state.parts, {})

    def hold(self) -> None:
        self.saver.wait_for_copies()

    def writing(self) -> bool:
        return self.saver.busy

    def advance(self) -> bool:
        return self.saver.advance() is not None


class Safetensors:
    """The library's own file for each rank, left to the system to write out; loads copy from its mapping."""

    def __init__(self, place: Place, state: State):
        self.path = place.folder / f"rank{place.context.rank}.safetensors"
        self.state = state

    def save(self) -> None:
        save_file(self.state.saved, self.path)

    def load(self) -> None:
        loaded = self.state.loaded
        for name, tensor in load_file(self.path).items():
            loaded[name].copy_(tensor)


class SafetensorsDurable(Safetensors):
    """The same, on the medium when a save returns."""

    def save(self) -> None:
        super().save()
        sync(self.path)
        sync(self.path.parent)


class Plain:
    """One file for each rank, without names or shapes: what the system can do."""

    def __init__(self, place: Place, state: State):
        self.path = place.folder / f"rank{place.context.rank}"
        self.state = state

    def save(self) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for tensor in self.state.saved.values():
            rest = memory_of(tensor)
            while rest:
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
        os.close(file)

    def load(self) -> None:
        file = os.open(self.path, os.O_RDONLY)
        for tensor in self.state.loaded.values():
            rest = memory_of(tensor)
            while rest:
                rest = rest[os.readv(file, [rest]) :]
        os.close(file)


class Dcp:
    """torch.distributed.checkpoint as it comes, which fsyncs; on several ranks the tensors are DTensors."""

    def __init__(self, place: Place, state: State):
        self.folder = place.folder
        self.saved, self.loaded = _distributed(state.saved), _distributed(state.loaded)

    def save(self) -> None:
        dcp.save(self.saved, storage_writer=dcp.FileSystemWriter(self.folder))

    def load(self) -> None:
        dcp.load(self.loaded, storage_reader=dcp.FileSystemReader(self.folder))


class DcpBackground:
    """torch.distributed.checkpoint's own asynchronous save."""

    def __init__(self, place: Place, state: State):
        self.folder = place.folder
        self.saved = _distributed(state.saved)

    def begin(self) -> None:
        self.future = dcp.async_save(self.saved, storage_writer=dcp.FileSystemWriter(self.folder))

    def hold(self) -> None:
        """Nothing to do: it copied before `begin` returned."""

    def writing(self) -> bool:
        return not self.future.done()

    def advance(self) -> bool:
        self.future.result()
        return True


def _distributed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if dist.get_world_size() == 1:
        return dict(tensors)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: DTensor.from_local(each, mesh, [Shard(0)]) for name, each in tensors.items()}


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the medium."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


WAYS: Mapping[str, Callable[[Place, State], Way]] = MappingProxyType(
    {
        "megazero": Megazero,
        "megazero-unhashed": MegazeroUnhashed,
        "safetensors": Safetensors,
        "safetensors-durable": SafetensorsDurable,
        "plain": Plain,
        "dcp": Dcp,
    }
)
# a contender -> the same in the background
BACKGROUNDS: Mapping[str, Callable[[Place, State], Background]] = MappingProxyType(
    {"megazero": MegazeroBackground, "dcp": DcpBackground}
)
