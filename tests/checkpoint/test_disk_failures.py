"""Disks that fail while training goes on: all ranks are told, what was saved stays, later saves work."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.box import Box
from megazero.checkpoint.folder import (
    Retention,
    candidates,
    iteration_folder,
    latest_iteration,
    saved_iterations,
)
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.saver import Saver
from megazero.config.resolve import parse_config
from megazero.errors import CheckpointError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain
from tests.checkpoint.faulty_disk import Change, Counter, FaultyDisk, Full, Refuse, Verdict
from tests.forks import run

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 9 --save-interval 2 --eval-iters 0"
)
KEY = Key("a")


def save_one(saver: Saver, iteration: int) -> str | None:
    """Save, and wait until the checkpoint is visible; return the error's message, or None."""
    rank, ranks = saver.context.rank, saver.context.world_size
    part = Part(KEY, (ranks, 3), Box((rank, 0), (1, 3)), torch.full((1, 3), float(iteration)))
    try:
        saver.save(iteration, [part], {})
        while saver.unsettled:
            saver.settle()
    except CheckpointError as error:
        return str(error)
    return None


def holds(directory: Path, iteration: int) -> None:
    assert (CheckpointReader(iteration_folder(directory, iteration)).tensor(KEY) == iteration).all()


def hidden(directory: Path) -> list[str]:
    return [p.name for p in directory.iterdir() if p.name.startswith(".") and p.name != ".lock"]


class Once:
    """Refuses one change, by its number since `arm`."""

    def __init__(self, number: int):
        self.number, self.count, self.refused = number, None, None

    def arm(self) -> None:
        self.count = 0

    def __call__(self, change: Change) -> Verdict | None:
        if self.count is None:
            return None
        count, self.count = self.count, self.count + 1
        if count != self.number:
            return None
        self.refused = change
        return Refuse(errno.EIO)(change)


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_any_change_may_fail_once(tmp_path, rank, in_flight):
    def attempt(number: int) -> Change | None:
        """Save three checkpoints from two ranks, with a fault during the second."""
        directory, fault = tmp_path / str(number), Once(number)
        world, grid = ThreadWorld(2), ProcessGrid.factor(2)

        def work(mine: int) -> list[str | None]:
            disk = FaultyDisk(fault if mine == rank else None)
            context = thread_context(world, grid, mine)
            saver = Saver(directory, context, disk, Retention(last=1), in_flight)
            said = [save_one(saver, 10)]
            if mine == rank:
                fault.arm()
            said.append(save_one(saver, 20))
            whole.append((mine, saved_iterations(directory)))
            for iteration in saved_iterations(directory):
                holds(directory, iteration)
            context.world.barrier()
            fault.count = None
            said.append(save_one(saver, 30))
            saver.close()
            return said

        whole: list = []
        told = world.run(work)
        assert told[0] == told[1]
        first, second, third = told[0]
        assert first is third is None
        assert (second is None) == (fault.refused is None)
        if second is not None:
            assert f"rank {rank} could not " in second
            assert os.strerror(errno.EIO) in second
        assert all(saved in ([10], [10, 20], [20]) for _, saved in whole)
        assert latest_iteration(directory) == 30
        assert saved_iterations(directory) == [30]
        assert not hidden(directory)
        holds(directory, 30)
        return fault.refused

    failed = 0
    while attempt(failed) is not None:
        failed += 1
    assert failed > (20 if rank == 0 else 2)


@pytest.mark.parametrize("in_flight", [0, 2])
def test_a_full_disk_is_given_back(tmp_path, in_flight):
    log = Counter()
    saver = Saver(tmp_path / "a", solo_context(), FaultyDisk(log))
    assert save_one(saver, 10) is None
    total = sum(len(change.data) for change in log.log if change.name == "write")
    saver.close()
    for room in range(0, total, 50):
        directory, full = tmp_path / str(room), Full(errno.ENOSPC, on=False, room=room)
        saver = Saver(directory, solo_context(), FaultyDisk(full), in_flight=in_flight)
        assert save_one(saver, 10) is None
        full.on = True
        said = save_one(saver, 20)
        assert os.strerror(errno.ENOSPC) in said
        assert not hidden(directory), "what does not fit must not stay"
        holds(directory, 10)
        assert latest_iteration(directory) == 10
        full.on = False
        assert save_one(saver, 30) is None
        assert CheckpointReader(candidates(directory).folders[0]).manifest.iteration == 30
        saver.close()


def test_what_a_dead_disk_kept_goes_when_it_is_back(tmp_path):
    dead = Refuse(errno.EROFS, on=False)
    world, grid = ThreadWorld(2), ProcessGrid.factor(2)

    def work(rank: int) -> list[str | None]:
        disk = FaultyDisk()
        saver = Saver(tmp_path, thread_context(world, grid, rank), disk)
        said = [save_one(saver, 10)]
        if rank == 0:
            disk.fault = _dying(dead)
        said += [save_one(saver, 20), save_one(saver, 30)]
        left.append(hidden(tmp_path))
        saver.context.world.barrier()
        disk.fault = FaultyDisk().fault
        said.append(save_one(saver, 40))
        saver.close()
        return said

    left: list[list[str]] = []
    told = world.run(work)
    assert told[0] == told[1]
    assert [said is None for said in told[0]] == [True, False, False, True]
    assert left == [[".iter_0000020.partial"]] * 2
    assert not hidden(tmp_path)
    assert saved_iterations(tmp_path) == [10, 40]


def test_tidying_up_leaves_alone_what_is_on_its_way(tmp_path):
    """A save begins while an earlier one is being completed and has just set its predecessor aside."""
    saver = Saver(tmp_path, solo_context())
    assert save_one(saver, 20) is None
    saver.close()
    aside, begun = threading.Event(), threading.Event()

    def fault(change: Change) -> None:
        if change.name == "rename" and change.path.suffix == ".partial" and not begun.is_set():
            aside.set()
            assert begun.wait(10)

    saver = Saver(tmp_path, solo_context(), FaultyDisk(fault), in_flight=2)
    part = [Part(KEY, (1, 3), Box.whole((1, 3)), torch.full((1, 3), 20.0))]
    saver.save(20, part, {})
    assert saver.advance() is None
    assert aside.wait(10)
    assert ".iter_0000020.replaced" in hidden(tmp_path)
    saver.save(30, [replace(part[0], tensor=part[0].tensor + 10)], {})
    begun.set()
    assert [saver.settle(), saver.settle()] == [20, 30]
    saver.close()
    assert saved_iterations(tmp_path) == [20, 30]
    assert not hidden(tmp_path)
    for iteration in (20, 30):
        holds(tmp_path, iteration)


def _dying(dead: Refuse) -> Callable[[Change], Verdict | None]:
    """Refuses all changes from the first sync on."""

    def fault(change: Change) -> Verdict | None:
        dead.on = dead.on or change.name == "sync"
        return dead(change)

    return fault


def test_a_disk_that_cannot_be_written_is_told_before_training(tmp_path):
    with pytest.raises(CheckpointError, match=r"rank 0 could not open .*run for writing: OSError.*Read-only"):
        Saver(tmp_path / "run", solo_context(), FaultyDisk(Refuse(errno.EROFS)))
    (tmp_path / "run" / ".iter_0000010.partial").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="could not open"):
        Saver(tmp_path / "run", solo_context(), FaultyDisk(Refuse(errno.EROFS)))
    Saver(tmp_path / "run", solo_context()).close()  # the one that failed does not keep the lock


def train(folder: Path, disk: FaultyDisk, *flags: str) -> list[dict]:
    argv = [*SMALL.split(), "--save", str(folder / "run"), "--metrics-jsonl", str(folder / "m.jsonl"), *flags]
    pretrain(parse_config(argv, world_size=1).config, Launch(), disk)
    return [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("number", "how"),
    [(errno.ENOSPC, []), (errno.EIO, []), (errno.EROFS, ["--async-save"])],
    ids=["full", "failing", "read-only, in the background"],
)
def test_training_goes_on(tmp_path, capsys, number, how):
    fault = Refuse(number, lambda change: "iter_0000004" in str(change.path) and change.name == "write")
    records = train(tmp_path, FaultyDisk(fault), *how)
    assert len(records) == 9
    printed = capsys.readouterr()
    assert printed.err.count("error: training goes on without saving: ") == 1
    assert os.strerror(number) in printed.err
    assert saved_iterations(tmp_path / "run") == [2, 6, 8, 9]
    assert not hidden(tmp_path / "run")
    assert latest_iteration(tmp_path / "run") == 9


def test_a_failure_that_is_seen_late_costs_no_other_checkpoint(tmp_path):
    """The next save once waited for the failed one, and was given up with it."""

    def late(change) -> bool:
        fails = "iter_0000004" in str(change.path) and change.name == "write"
        time.sleep(1.0 if fails else 0.0)  # as long as many steps
        return fails

    records = train(tmp_path, FaultyDisk(Refuse(errno.EIO, late)), "--async-save")
    assert saved_iterations(tmp_path / "run") == [2, 6, 8, 9]
    assert sum(record["phase_seconds"].get("save", 0.0) for record in records) > 0.5  # the wait is timed


@pytest.mark.parametrize("how", [[], ["--async-save"]], ids=["in line", "in the background"])
def test_the_last_save_must_work(tmp_path, how):
    fault = Refuse(errno.EIO, lambda change: "iter_0000009" in str(change.path))
    with pytest.raises(CheckpointError, match="rank 0 could not .*Input/output error"):
        train(tmp_path, FaultyDisk(fault), *how)
    assert latest_iteration(tmp_path / "run") == 8
    assert not hidden(tmp_path / "run")
    assert train(tmp_path, FaultyDisk(), "--load", str(tmp_path / "run"))[-1]["iteration"] == 9


@pytest.mark.gloo
def test_real_ranks_go_on_and_the_first_says_so(tmp_path):
    """The second of two ranks can write neither the checkpoint of iteration 4 nor the last one.

    Every rank once said that it goes on, though all of them do, in the same words.
    """
    done = run("-m", "tests.checkpoint.failing_ranks", tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    for way in ("in_line", "background"):
        folder = tmp_path / way
        for rank in range(2):
            said = (folder / f"rank{rank}.txt").read_text()
            goes_on = "error: training goes on without saving: rank 1 could not write into"
            assert said.count(goes_on) == (rank == 0)
            assert said.count("error: ") == 1 + (rank == 0)
            assert "error: rank 1 could not write into" in said
            assert os.strerror(errno.ENOSPC) in said
        assert results[way] == [1, 1]
        assert saved_iterations(folder / "run") == [2, 6, 8]
        assert latest_iteration(folder / "run") == 8
        assert not hidden(folder / "run")
