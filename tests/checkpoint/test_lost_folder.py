"""A folder that is deleted, made anew, replaced or moved under a running job: two jobs write no one run."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.box import Box
from megazero.checkpoint.folder import Retention, iteration_folder, saved_iterations
from megazero.checkpoint.lock import LOCK, WriterLock, saved_elsewhere
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.saver import Saver
from megazero.commands.checkpoint.verify import check
from megazero.config.resolve import parse_config
from megazero.errors import CheckpointError, LostFolderError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain, pretrain_on
from megazero.train.step.engine import Engine

SMALL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1e-2 --mock-data "
    "--vocab-size 32 --micro-batch-size 1 --global-batch-size 2 --eval-iters 0 --train-iters 8 "
    "--save-interval 2"
)
ANEW = "was deleted and made anew, or replaced, while this job ran, and now belongs to"


def save(saver: Saver, iteration: int) -> None:
    rank, ranks = saver.context.rank, saver.context.world_size
    part = Part(Key("a"), (ranks, 3), Box((rank, 0), (1, 3)), torch.full((1, 3), float(iteration)))
    saver.save(iteration, [part], {})


def anew(directory: Path) -> None:
    aside = directory.rename(directory.with_name(f"{directory.name}-before"))
    directory.mkdir()
    shutil.rmtree(aside, ignore_errors=True)  # a save in the background may go on writing there


def opened(directory: Path, in_flight: int = 0) -> Saver:
    return Saver(directory, solo_context(), retention=Retention(last=1), in_flight=in_flight)


def test_a_folder_that_another_job_made_anew_is_lost_on_every_rank(tmp_path):
    directory, world, grid = tmp_path / "run", ThreadWorld(2), ProcessGrid.factor(2)
    others: list[Saver] = []

    def work(rank: int) -> str:
        context = thread_context(world, grid, rank)
        saver = Saver(directory, context)
        save(saver, 10)
        context.world.barrier()
        if rank == 0:
            anew(directory)
            others.append(opened(directory))
            save(others[0], 5)
        context.world.barrier()
        with pytest.raises(LostFolderError) as caught:
            save(saver, 20)
        saver.close()
        return str(caught.value)

    told = world.run(work)
    assert told[0] == told[1]
    assert f"{ANEW} process {os.getpid()} on" in told[0]
    save(others[0], 6)
    others[0].close()
    assert saved_iterations(directory) == [6]
    assert sorted(os.listdir(directory)) == [LOCK, "iter_0000006", "latest_checkpointed_iteration.txt"]


def test_what_was_begun_before_is_neither_made_visible_nor_cleared_up_there(tmp_path):
    """The other job writes a checkpoint of the same iteration at the same time."""
    directory = tmp_path / "run"
    first = opened(directory, in_flight=1)
    save(first, 10)
    first._pending[0].job.result()
    anew(directory)
    second = opened(directory, in_flight=1)
    save(second, 10)
    with pytest.raises(LostFolderError, match=ANEW):
        first.settle()
    assert second.settle() == 10
    for saver in (first, second):
        saver.close()
    assert CheckpointReader(iteration_folder(directory, 10)).tensor(Key("a")).tolist() == [[10.0] * 3]


def test_a_folder_made_anew_that_nobody_took_is_taken_again(tmp_path):
    first = opened(tmp_path / "run")
    save(first, 10)
    anew(tmp_path / "run")
    save(first, 20)
    assert saved_iterations(tmp_path / "run") == [20]
    with pytest.raises(CheckpointError, match="one job at a time"):
        opened(tmp_path / "run")
    first.close()
    opened(tmp_path / "run").close()


def test_a_deleted_folder_fails_until_it_is_made_again(tmp_path):
    first = opened(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match="was deleted or moved; make it again, and the next"
        ) as caught:
            save(first, 10)
        assert not isinstance(caught.value, LostFolderError)
    (tmp_path / "run").mkdir()
    save(first, 20)
    first.close()
    assert saved_iterations(tmp_path / "run") == [20]


@pytest.mark.parametrize("locked", [True, False])
def test_a_folder_replaced_by_that_of_another_run_is_lost(tmp_path, locked):
    """Even if the other run has ended: its checkpoints must be neither mixed with this run's nor pruned."""
    second = opened(tmp_path / "b")
    save(second, 30)
    second.close()
    first = opened(tmp_path / "a")
    save(first, 10)
    (tmp_path / "a").rename(tmp_path / "old")
    (tmp_path / "b").rename(tmp_path / "a")
    if not locked:
        (tmp_path / "a" / LOCK).unlink()
    with pytest.raises(LostFolderError, match=ANEW):
        save(first, 20)
    first.close()
    assert saved_iterations(tmp_path / "a") == [30]
    assert [name for name in os.listdir(tmp_path / "a") if "partial" in name] == []


def test_a_lock_file_that_was_deleted_is_made_again(tmp_path):
    first = opened(tmp_path)
    identity = first._lock.identity
    save(first, 10)
    (tmp_path / LOCK).unlink()
    save(first, 20)
    assert saved_iterations(tmp_path) == [20]
    with pytest.raises(CheckpointError, match="one job at a time"):
        WriterLock(tmp_path)
    first.close()
    assert f"folder {identity}\n" in (tmp_path / LOCK).read_text()


@pytest.mark.parametrize("ended", [True, False])
def test_a_lock_file_that_another_job_made_again_is_lost(tmp_path, ended):
    first = WriterLock(tmp_path)
    (tmp_path / LOCK).unlink()
    second = WriterLock(tmp_path)
    if ended:
        second.release()
    with pytest.raises(LostFolderError, match=f"process {os.getpid()} on"):
        first.check()
    first.release()
    second.release()


def test_a_moved_folder_keeps_its_identity_and_its_lock(tmp_path):
    first = opened(tmp_path / "a")
    save(first, 10)
    identity = first._lock.identity
    (tmp_path / "a").rename(tmp_path / "b")
    with pytest.raises(CheckpointError, match="one job at a time"):
        opened(tmp_path / "b")
    with pytest.raises(CheckpointError, match="was deleted or moved"):
        save(first, 20)
    first.close()
    second = opened(tmp_path / "b")
    assert second._lock.identity == identity
    save(second, 20)
    second.close()
    reader = CheckpointReader(iteration_folder(tmp_path / "b", 20))
    assert reader.saved_into == identity
    assert saved_elsewhere(reader.folder, reader.saved_into) is None


def test_without_locks_a_job_that_begins_later_is_seen(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="has no locks"):
        first, second = opened(tmp_path), opened(tmp_path)
    with pytest.raises(LostFolderError, match=ANEW):
        save(first, 10)
    save(second, 20)
    assert saved_iterations(tmp_path) == [20]


def test_a_lock_file_that_was_deleted_by_another_machine_is_lost(tmp_path, monkeypatch):
    """A network file system then answers ESTALE for the open file."""
    lock = WriterLock(tmp_path)

    def stale(file):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        with pytest.raises(LostFolderError):
            lock.check()
    lock.check()
    lock.release()


def test_a_lock_file_of_an_earlier_version_gets_an_identity(tmp_path):
    (tmp_path / LOCK).write_text("process 1 on a-host-with-a-long-name" + "." * 200 + "\n")
    lock = WriterLock(tmp_path)
    lines = (tmp_path / LOCK).read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["process", "folder", "job"]
    assert lines[1] == f"folder {lock.identity}"
    lock.release()


def test_a_checkpoint_that_was_saved_elsewhere_is_told(tmp_path, capsys):
    runs, small = [tmp_path / "a", tmp_path / "b"], [*SMALL.split(), "--lr-decay-iters", "6"]
    for directory, iterations in zip(runs, ("2", "4"), strict=True):
        argv = [*small, "--train-iters", iterations, "--save", str(directory)]
        pretrain(parse_config(argv).config)
    shutil.copytree(iteration_folder(runs[1], 4), iteration_folder(runs[0], 4))
    argv = [*small, "--train-iters", "6", "--load", str(runs[0])]
    copied = iteration_folder(runs[0], 4)
    told = f"{copied} was saved into another folder: it was copied to this one, or two jobs wrote here"
    capsys.readouterr()
    pretrain(parse_config([*argv, "--ckpt-step", "2"]).config)
    assert "was saved into another folder" not in capsys.readouterr().out
    pretrain(parse_config([*argv, "--ckpt-step", "4"]).config)
    assert told in capsys.readouterr().out
    assert check(iteration_folder(runs[0], 2)).warnings == ()
    (warning,) = check(iteration_folder(runs[0], 4)).warnings
    assert told in warning


def meanwhile(monkeypatch: pytest.MonkeyPatch, iteration: int, happens) -> None:
    """Call a function on one rank during a certain step."""
    whole = Engine.attempt

    def step(self, batches, progress, *rest):
        if progress.iteration == iteration and self.context.rank == 0:
            happens()
        return whole(self, batches, progress, *rest)

    monkeypatch.setattr(Engine, "attempt", step)


@pytest.mark.parametrize("extra", ["", "--async-save"])
def test_a_run_whose_folder_another_job_took_ends(tmp_path, monkeypatch, extra):
    directory, world = tmp_path / "run", ThreadWorld(2, timeout=60)
    others: list[Saver] = []

    def taken() -> None:
        anew(directory)
        others.append(opened(directory))

    meanwhile(monkeypatch, 2, taken)
    argv = [*f"{SMALL} {extra}".split(), "--save", str(directory)]
    config = parse_config(argv, world_size=2).config

    def rank(number: int) -> int:
        with pytest.raises(LostFolderError, match=ANEW) as caught:
            pretrain_on(config, thread_context(world, ProcessGrid(dp=2), number))
        return caught.value.exit_code

    assert world.run(rank) == [1, 1]
    others[0].close()
    assert os.listdir(directory) == [LOCK]


def test_a_run_whose_folder_was_deleted_goes_on_and_saves_once_it_is_there(tmp_path, monkeypatch, capsys):
    directory = tmp_path / "run"
    meanwhile(monkeypatch, 3, lambda: shutil.rmtree(directory))
    meanwhile(monkeypatch, 5, directory.mkdir)
    state = pretrain(parse_config([*SMALL.split(), "--save", str(directory)]).config)
    assert state.iteration == 8
    assert capsys.readouterr().err.count("goes on without saving") == 1
    assert saved_iterations(directory) == [6, 8]
