"""Saving over all ranks, in line and in the background: what becomes visible when, what failures leave."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.checkpoint import saver as saver_module
from megazero.checkpoint import staging
from megazero.checkpoint.box import Box
from megazero.checkpoint.disk import Disk
from megazero.checkpoint.folder import Retention, iteration_folder, latest_iteration, saved_iterations
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.saver import Saver, Staging, together
from megazero.errors import CheckpointError, DamagedCheckpointError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld

W = Key("w")
RANKS = 3


class GatedDisk(Disk):
    """A disk without syncs that begins no tensor file before `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def create(self, path: Path):
        if path.suffix == ".safetensors":
            assert self.gate.wait(30)
        return super().create(path)

    def sync_folder(self, path: Path) -> None:
        pass


class FailingDisk(Disk):
    """Refuses to make files for which `fails` is true."""

    def __init__(self, fails) -> None:
        self.fails = fails

    def create(self, path: Path):
        if self.fails(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().create(path)


def on_ranks(work) -> list:
    """Run ``work(context)`` on each of `RANKS` ranks."""
    world = ThreadWorld(RANKS, timeout=30)
    return world.run(lambda rank: work(thread_context(world, ProcessGrid(dp=RANKS), rank)))


def row(rank: int, value: float, width: int = 4) -> tuple[Tensor, list[Part]]:
    """A row of a tensor [ranks, width], as the part that its rank writes."""
    tensor = torch.full((1, width), float(value))
    return tensor, [Part(W, (RANKS, width), Box((rank, 0), (1, width)), tensor)]


def save_now(saver: Saver, iteration: int) -> None:
    """Save this rank's row and wait until the checkpoint is visible."""
    saver.save(iteration, row(saver.context.rank, iteration)[1], {})
    while saver.unsettled:
        saver.settle()


def stored(directory: Path, iteration: int) -> list[list[float]]:
    return CheckpointReader(iteration_folder(directory, iteration)).tensor(W).tolist()


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_checkpoints_become_visible_in_order(tmp_path, in_flight):
    """Each has the values that the tensors had when `save` was called."""

    def work(context):
        saver = Saver(tmp_path, context, in_flight=in_flight)
        tensor, parts = row(context.rank, 0)
        visible, pending = [], []
        for iteration in range(1, 6):
            tensor.fill_(iteration * 10 + context.rank)
            visible.append(saver.save(iteration, parts, {"rank": context.rank}))
            saver.wait_for_copies()
            tensor.fill_(-1.0)  # the next step of the training
            pending.append(saver.unsettled)
            if context.rank == 0:
                named = visible[-1][-1] if visible[-1] else None
                assert named is None or latest_iteration(tmp_path) == named
        while saver.unsettled:
            visible.append([saver.settle()])
        saver.close()
        return visible, pending

    results = on_ranks(work)
    assert results == [results[0]] * RANKS, "all ranks agree"
    late = [[]] * in_flight
    assert results[0][0] == [*late, *([i] for i in range(1, 6))]
    assert results[0][1] == [min(i, in_flight) for i in range(1, 6)]
    assert saved_iterations(tmp_path) == [1, 2, 3, 4, 5]
    assert latest_iteration(tmp_path) == 5
    for iteration in range(1, 6):
        assert stored(tmp_path, iteration) == [[iteration * 10.0 + rank] * 4 for rank in range(RANKS)]
    assert CheckpointReader(iteration_folder(tmp_path, 5)).facts == {"rank": 0}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".iter")]


def test_a_save_without_room_for_its_copies_is_written_at_once(tmp_path, monkeypatch):
    """One rank lacks memory for copies, while the others have made theirs."""
    monkeypatch.setattr(staging, "available_memory", lambda: 256)

    def work(context):
        saver = Saver(tmp_path, context, in_flight=1)
        tensor, parts = row(context.rank, 2)
        if context.rank == 1:
            parts += [Part(Key("large"), (65,), Box((0,), (65,)), torch.zeros(65))]
        assert saver.save(2, parts, {}) == []
        saver.wait_for_copies()
        tensor.fill_(-1.0)
        saver.settle()
        saver.close()

    with pytest.warns(UserWarning, match="copies of an asynchronous save must fit into the host's memory"):
        on_ranks(work)
    assert stored(tmp_path, 2) == [[2.0] * 4] * RANKS


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_save_too_many_waits_for_the_oldest(tmp_path, in_flight):
    disk, full, passed = GatedDisk(), threading.Barrier(RANKS + 1), threading.Event()
    seen: dict[str, object] = {}

    def work(context):
        saver = Saver(tmp_path, context, disk, in_flight=in_flight)
        for iteration in range(1, in_flight + 1):
            assert saver.save(iteration, row(context.rank, iteration)[1], {}) == []
            assert saver.busy
        full.wait(30)
        visible = saver.save(in_flight + 1, row(context.rank, in_flight + 1)[1], {})
        passed.set()
        assert saver.unsettled == in_flight
        while saver.unsettled:
            saver.settle()
        assert not saver.busy
        saver.close()
        return visible

    def watch():
        full.wait(30)
        seen["waited"] = not passed.wait(0.2)
        seen["visible"] = saved_iterations(tmp_path)
        disk.gate.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert on_ranks(work) == [[1]] * RANKS
    watcher.join()
    assert seen == {"waited": True, "visible": []}
    assert saved_iterations(tmp_path) == list(range(1, in_flight + 2))


@pytest.mark.parametrize(("in_flight", "most"), [(0, 0), (1, 1), (2, 2)])
def test_host_memory_is_reused(tmp_path, monkeypatch, in_flight, most):
    taken: list[tuple[int, list[int]]] = []

    class Watched(Staging):
        def take(self, parts):
            copies, arrived = super().take(parts)
            taken.append((id(self), [part.tensor.data_ptr() for part in copies]))
            return copies, arrived

    monkeypatch.setattr(saver_module, "Staging", Watched)
    saver = Saver(tmp_path, solo_context(), in_flight=in_flight)
    part = Part(W, (8,), Box((0,), (8,)), torch.ones(8))
    for iteration in range(8):
        saver.save(iteration, [part], {})
    while saver.unsettled:
        saver.settle()
    saver.close()
    assert len({pointers[0] for _, pointers in taken}) == len({number for number, _ in taken}) == most
    assert all(part.tensor.data_ptr() not in pointers for _, pointers in taken)
    assert len(saver._free) == most, "nothing is kept that is not used again"


def test_staging_follows_its_parts():
    staging = Staging()
    first = [Part(W, (2, 2), Box.whole((2, 2)), torch.arange(4.0).view(2, 2).t())]
    copies, arrived = staging.take(first)
    arrived()
    assert copies[0].tensor.tolist() == [[0.0, 2.0], [1.0, 3.0]]
    again = [Part(W, (2, 2), Box.whole((2, 2)), torch.ones(2, 2))]
    assert staging.take(again)[0][0].tensor.data_ptr() == copies[0].tensor.data_ptr()
    for other in (torch.ones(2, 2).double(), torch.ones(3)):
        part = Part(W, tuple(other.shape), Box.whole(other.shape), other)
        (held,), fill = staging.take([part])
        fill()
        copy = held.tensor
        assert (copy.dtype, copy.tolist()) == (other.dtype, other.tolist())


@pytest.mark.parametrize("in_flight", [0, 1, 2])
@pytest.mark.parametrize("what", ["model-00002-of-00003.safetensors", "index.json", "manifest.json"])
def test_a_failure_of_one_rank_is_raised_on_all(tmp_path, in_flight, what):
    broken = threading.Event()
    disk = FailingDisk(lambda path: broken.is_set() and path.name == what)

    def work(context):
        saver = Saver(tmp_path, context, disk, in_flight=in_flight)
        save_now(saver, 1)
        context.world.barrier()
        broken.set()
        with pytest.raises(CheckpointError, match="No space left on device") as failure:
            save_now(saver, 2)
        assert (saver.unsettled, saved_iterations(tmp_path)) == (0, [1])
        context.world.barrier()
        if context.rank == 0:
            assert sorted(os.listdir(tmp_path)) == [
                ".lock",
                "iter_0000001",
                "latest_checkpointed_iteration.txt",
            ]
        context.world.barrier()
        broken.clear()
        context.world.barrier()
        save_now(saver, 3)
        saver.close()
        return str(failure.value)

    messages = on_ranks(work)
    rank = 1 if what.startswith("model") else 0
    assert messages == [messages[0]] * RANKS
    assert messages[0].startswith(f"rank {rank} could not ")
    assert saved_iterations(tmp_path) == [1, 3]
    assert latest_iteration(tmp_path) == 3
    assert stored(tmp_path, 1) == [[1.0] * 4] * RANKS


def test_a_failure_in_the_background_spares_the_next(tmp_path):
    disk = FailingDisk(lambda path: ".iter_0000001" in str(path) and path.name.startswith("model-00003"))

    def work(context):
        saver = Saver(tmp_path, context, disk, in_flight=2)
        saver.save(1, row(context.rank, 1)[1], {})
        saver.save(2, row(context.rank, 2)[1], {})
        with pytest.raises(CheckpointError, match="rank 2 could not write"):
            saver.settle()
        assert saver.settle() == 2
        saver.close()

    on_ranks(work)
    assert saved_iterations(tmp_path) == [2]
    assert stored(tmp_path, 2) == [[2.0] * 4] * RANKS


def test_what_was_not_settled_stays_invisible_and_is_cleared(tmp_path):
    def abandon(context):
        saver = Saver(tmp_path, context, in_flight=2)
        saver.save(1, row(context.rank, 1)[1], {})
        saver.settle()
        saver.save(2, row(context.rank, 2)[1], {})
        saver.close()
        context.world.barrier()
        return sorted(os.listdir(tmp_path))

    left = [".iter_0000002.partial", ".lock", "iter_0000001", "latest_checkpointed_iteration.txt"]
    assert on_ranks(abandon) == [left] * RANKS
    on_ranks(lambda context: Saver(tmp_path, context).close())
    assert sorted(os.listdir(tmp_path)) == left[1:]
    assert latest_iteration(tmp_path) == 1


def test_an_iteration_that_is_on_its_way_is_settled_before_it_is_saved_again(tmp_path):
    # Both were written into one folder: what became visible first could be a mixture.
    saver = Saver(tmp_path, solo_context(), in_flight=3)
    values = [torch.full((4,), float(i)) for i in range(3)]
    part = [Part(W, (4,), Box((0,), (4,)), value) for value in values]
    assert saver.save(7, part[:1], {}) == []
    assert saver.save(8, part[1:2], {}) == []
    assert saver.save(7, part[2:], {}) == [7]
    assert [saver.settle(), saver.settle()] == [8, 7]
    saver.close()
    assert stored(tmp_path, 7) == [2.0] * 4
    assert stored(tmp_path, 8) == [1.0] * 4


def test_older_ones_go_as_newer_ones_come(tmp_path):
    saver = Saver(tmp_path, solo_context(), retention=Retention(last=2, every=4), in_flight=1)
    part = Part(W, (2,), Box((0,), (2,)), torch.ones(2))
    for iteration in range(1, 8):
        saver.save(iteration, [part], {})
        assert len(saved_iterations(tmp_path)) <= 3
    saver.settle()
    saver.close()
    assert saved_iterations(tmp_path) == [4, 6, 7]


@pytest.mark.parametrize("below", ["", "sub/folder"])
def test_a_file_where_the_folder_should_be_is_refused_in_words(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        CheckpointError, match="`save` must be a folder that can be written, but is"
    ) as refusal:
        Saver(tmp_path / "file" / below, solo_context())
    assert "FileExistsError" not in str(refusal.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_second_job_is_refused_on_every_rank(tmp_path):
    first = Saver(tmp_path, solo_context())

    def work(context):
        with pytest.raises(CheckpointError, match="rank 0 could not open.*one job at a time"):
            Saver(tmp_path, context)

    on_ranks(work)
    first.close()
    on_ranks(lambda context: Saver(tmp_path, context).close())


def test_work_together_tells_everyone(tmp_path):
    def work(context):
        assert together(context, lambda: context.rank * 2, "count") == 0
        assert together(context, None, "rest") is None

        def fail():
            if context.rank:
                raise DamagedCheckpointError(f"file {context.rank} is damaged")
            return "fine"

        with pytest.raises(DamagedCheckpointError, match="^rank 1 could not read: file 1 is damaged$"):
            together(context, fail, "read")
        with pytest.raises(CheckpointError, match="FileNotFoundError") as failure:
            together(context, (tmp_path / "absent").read_bytes if context.rank == 2 else None, "read")
        assert not isinstance(failure.value, DamagedCheckpointError), "no older checkpoint helps"

    on_ranks(work)


@pytest.mark.gpu
def test_memory_of_a_device_is_copied_in_the_order_of_its_work(tmp_path):
    tensor = torch.zeros(1 << 22, device="cuda")
    part = Part(W, (1 << 22,), Box.whole((1 << 22,)), tensor)
    saver = Saver(tmp_path, solo_context(), in_flight=1)
    for iteration in (1, 2):
        for _ in range(100):
            tensor.add_(1.0)
        assert saver.save(iteration, [part], {}) == ([1] if iteration == 2 else [])
        saver.wait_for_copies()
        tensor.add_(0.5)
    saver.settle()
    saver.close()
    for iteration, value in ((1, 100.0), (2, 200.5)):
        loaded = torch.zeros_like(tensor)
        reader = CheckpointReader(iteration_folder(tmp_path, iteration))
        reader.read([Part(W, (1 << 22,), Box.whole((1 << 22,)), loaded)])
        assert loaded.eq(value).all()


def offloaded(values: Tensor, other: Tensor) -> list[Part]:
    """Parts: masters in the memory of an offloading store, and a moment on the device."""
    masters = Part(W, tuple(values.shape), Box.whole(values.shape), values, offloaded=True)
    return [masters, Part.whole(Key("w", "exp_avg"), other)]


def test_what_is_asleep_is_written_from_where_it_is(tmp_path):
    """No memory is taken, an update waits until files are written, and they have the values of the save."""
    disk, context = GatedDisk(), solo_context()
    saver = Saver(tmp_path, context, disk, in_flight=1)
    masters, moments = torch.ones(1000), torch.ones(1000)
    saver.save(1, offloaded(masters, moments), {})
    waited = threading.Thread(target=saver.wait_for_copies)
    waited.start()
    waited.join(0.05)
    assert waited.is_alive()  # nothing is written yet
    assert latest_iteration(tmp_path) is None
    disk.gate.set()
    waited.join(30)
    masters.fill_(2)
    moments.fill_(2)
    assert saver.settle() == 1
    assert sum(copy.nbytes for copy in saver._free[0]._copies) == moments.nbytes
    saver.close()
    reader = CheckpointReader(iteration_folder(tmp_path, 1))
    assert reader.tensor(W).eq(1).all()
    assert reader.tensor(Key("w", "exp_avg")).eq(1).all()
    names = sorted(path.name for path in iteration_folder(tmp_path, 1).glob("*.safetensors"))
    assert names == ["model-offloaded-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"]


@pytest.mark.parametrize("broken", ["model-offloaded", "optimizer-0"])
def test_a_disk_that_fails_while_what_is_asleep_is_written_is_told_when_it_is_settled(tmp_path, broken):
    disk = FailingDisk(lambda path: path.name.startswith(broken))
    saver = Saver(tmp_path, solo_context(), disk, in_flight=1)
    values = torch.ones(10)
    saver.save(1, offloaded(values, values.clone()), {})
    saver.wait_for_copies()  # the step that changes them goes on
    with pytest.raises(CheckpointError, match="No space left"):
        saver.settle()
    saver.close()
    assert saved_iterations(tmp_path) == []
    assert list(tmp_path.glob("*partial*")) == []


def test_in_line_there_is_one_file_of_each_sort(tmp_path):
    saver = Saver(tmp_path, solo_context())
    saver.save(1, offloaded(torch.ones(3), torch.ones(3)), {})
    saver.close()
    names = sorted(path.name for path in iteration_folder(tmp_path, 1).glob("*.safetensors"))
    assert names == ["model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"]
