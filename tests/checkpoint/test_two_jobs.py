"""One job at a time writes into a folder; the system frees it when that job ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.box import Box
from megazero.checkpoint.folder import iteration_folder, latest_iteration
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.saver import Saver
from megazero.checkpoint.tensor_file import Later
from megazero.checkpoint.writer import write_checkpoint
from megazero.config.resolve import parse_config
from megazero.errors import CheckpointError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.launch import Launch
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import os, sys, time
from megazero.checkpoint.lock import WriterLock
from pathlib import Path
lock = WriterLock(Path(sys.argv[1]))
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def save(saver: Saver, iteration: int) -> None:
    part = Part(Key("a"), (3,), Box.whole((3,)), torch.full((3,), float(iteration)))
    saver.save(iteration, [part], {})


def test_the_second_job_is_refused_and_the_first_goes_on(tmp_path):
    first = Saver(tmp_path, solo_context())
    save(first, 10)
    who = f"process {os.getpid()} on {re.escape(socket.gethostname())}"
    with pytest.raises(CheckpointError, match=rf"one job at a time, but {who} does; end that job or"):
        Saver(tmp_path, solo_context())
    save(first, 20)
    assert latest_iteration(tmp_path) == 20
    first.close()
    second = Saver(tmp_path, solo_context())
    save(second, 30)
    second.close()
    assert latest_iteration(tmp_path) == 30


def test_the_second_job_leaves_alone_what_the_first_is_writing(tmp_path):
    first = Saver(tmp_path, solo_context(), in_flight=1)
    save(first, 10)
    for _ in range(3):
        with pytest.raises(CheckpointError, match="one job at a time"):
            Saver(tmp_path, solo_context())
        tensors = [(Key("a"), Later(torch.float32, (3,), lambda: torch.zeros(3)))]
        with pytest.raises(CheckpointError, match="one job at a time"):
            write_checkpoint(tmp_path, 10, tensors, {})
    assert first.settle() == 10
    first.close()
    assert iteration_folder(tmp_path, 10).is_dir()


def test_every_rank_of_the_second_job_is_refused(tmp_path):
    first = Saver(tmp_path, solo_context())
    world, grid = ThreadWorld(2), ProcessGrid.factor(2)

    def work(rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            Saver(tmp_path, thread_context(world, grid, rank))
        return str(caught.value)

    told = world.run(work)
    assert told[0] == told[1]
    assert "one job at a time" in told[0]
    first.close()


def test_training_is_refused_before_it_begins(tmp_path):
    first = Saver(tmp_path / "run", solo_context())
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data "
        "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 9 --eval-iters 0"
    )
    metrics = tmp_path / "m.jsonl"
    argv = [*flags.split(), "--save", str(tmp_path / "run"), "--metrics-jsonl", str(metrics)]
    with pytest.raises(CheckpointError, match="one job at a time"):
        pretrain(parse_config(argv, world_size=1).config, Launch())
    assert metrics.read_text() == ""
    first.close()


def test_a_killed_job_frees_the_folder(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        pid = int(holder.stdout.readline())
        assert pid == holder.pid
        with pytest.raises(CheckpointError, match=f"process {pid} on"):
            Saver(tmp_path, solo_context())
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        saver = Saver(tmp_path, solo_context())
        save(saver, 10)
        saver.close()
    assert latest_iteration(tmp_path) == 10


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="has no locks: nothing keeps another job from writing there"):
        saver = Saver(tmp_path, solo_context())
    save(saver, 10)
    saver.close()
    assert latest_iteration(tmp_path) == 10
