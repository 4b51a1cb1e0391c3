"""A training whose state sleeps elsewhere: what it saves, what it says, and how it ends when a disk fails."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from megazero.checkpoint.folder import iteration_folder
from megazero.checkpoint.reader import CheckpointReader
from megazero.checkpoint.staging import Staging
from megazero.config.resolve import parse_config
from megazero.errors import MegazeroError, OffloadError
from megazero.mpu.context import solo_context, thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain_on
from megazero.zero.store import disk

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 61 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --eval-iters 0 --clip-grad 0.5 --save-interval 2 "
    "--zero-reduce-bucket-size 4000"
)


def run(folder: Path, iterations: int, flags: str = "", load: Path | None = None) -> None:
    words = f"{SMALL} --train-iters {iterations} --lr-decay-iters 9 --save {folder} {flags}".split()
    words += ["--load", str(load)] if load else []
    pretrain_on(parse_config(words, world_size=1).config, solo_context())


def nvme(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return f"--offload-optimizer nvme --offload-path {folder}"


def tensors(folder: Path, iteration: int) -> dict:
    reader = CheckpointReader(iteration_folder(folder, iteration))
    return {key: reader.tensor(key) for key in reader.shapes}


def assert_same(folder: Path, other: Path, iteration: int) -> None:
    found, wanted = tensors(folder, iteration), tensors(other, iteration)
    assert found.keys() == wanted.keys()
    assert [str(key) for key in wanted if not found[key].equal(wanted[key])] == []


def test_runs_go_on_from_one_store_to_another(tmp_path):
    """Six steps on the device; two on disk, two on the host and two on the device: the same checkpoint."""
    run(tmp_path / "whole", 6)
    run(tmp_path / "a", 2, nvme(tmp_path / "disk"))
    run(tmp_path / "b", 4, "--offload-optimizer cpu --offload-fraction 0.5", tmp_path / "a")
    run(tmp_path / "c", 6, load=tmp_path / "b")
    assert_same(tmp_path / "a", tmp_path / "whole", 2)
    assert_same(tmp_path / "c", tmp_path / "whole", 6)
    run(tmp_path / "d", 6, nvme(tmp_path / "disk") + " --async-save", tmp_path / "a")
    assert_same(tmp_path / "d", tmp_path / "whole", 6)
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize("store", ["nvme", "cpu"])
def test_a_save_in_the_background_takes_no_memory_for_what_is_offloaded(tmp_path, monkeypatch, store):
    """Copies are made of what is not offloaded, which here is the state of generators."""
    copied, real = [], Staging.take

    def take(self, parts):
        copies, fill = real(self, parts)
        copied.append(sum(part.tensor.nbytes for part in copies))
        return copies, fill

    monkeypatch.setattr(Staging, "take", take)
    elsewhere = nvme(tmp_path / "disk") if store == "nvme" else "--offload-optimizer cpu"
    for folder, flags in (("background", f"{elsewhere} --async-save"), ("copied", "--async-save")):
        run(tmp_path / folder, 6, flags)
    assert_same(tmp_path / "background", tmp_path / "copied", 6)
    assert_same(tmp_path / "background", tmp_path / "copied", 4)
    streamed, whole = copied[:3], copied[3:]
    reader = CheckpointReader(iteration_folder(tmp_path / "copied", 6))
    state = 4 * sum(math.prod(shape) for key, shape in reader.shapes.items() if key.kind != "rng")
    assert len(whole) == 3
    assert [large - small for small, large in zip(streamed, whole, strict=True)] == [state] * 3


def test_what_is_moved_is_told(tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    flags = f"{nvme(tmp_path / 'disk')} --offload-gradients cpu --metrics-jsonl {path} --log-interval 2"
    run(tmp_path / "run", 4, flags)
    reader = CheckpointReader(iteration_folder(tmp_path / "run", 4))
    elements = sum(map(math.prod, reader.shapes.values()))
    out = capsys.readouterr().out
    assert "MiB of its state in nvme" in out
    assert "MiB of its state in cpu" in out
    assert "MB/s read" in out
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    for step in steps[1:]:
        moved = step["offload"]
        assert moved["read"] == moved["written"]  # masters and moments, there and back
        assert 4 * elements <= moved["read"] <= 4 * elements + 3 * 4096 * 20
        assert moved["waited"] >= 0
    normed = tmp_path / "normed.jsonl"
    run(tmp_path / "third", 4, f"{flags.replace(str(path), str(normed))} --log-params-norm")
    for step, other in zip(steps, map(json.loads, normed.read_text().splitlines()), strict=True):
        assert other["offload"]["read"] > step["offload"]["read"]  # the norm reads the masters once more
    plain = tmp_path / "plain.jsonl"
    run(tmp_path / "other", 1, f"--metrics-jsonl {plain}")
    assert "offload" not in json.loads(plain.read_text())


def test_a_disk_that_fails_ends_the_run_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    real, count = os.pwritev, []

    def failing(*arguments):
        count.append(1)
        if len(count) > limit:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    monkeypatch.setattr(disk.os, "pwritev", failing)
    limit = 10**9
    run(tmp_path / "a", 3, nvme(tmp_path / "disk"))
    limit = len(count)
    count.clear()
    with pytest.raises(OffloadError, match=r"disk`, but: Input/output error"):
        run(tmp_path / "b", 9, nvme(tmp_path / "disk"))
    assert_same(tmp_path / "b", tmp_path / "a", 2)


def test_all_ranks_end_when_one_disk_fails(tmp_path, monkeypatch):
    (tmp_path / "0").mkdir()
    world = ThreadWorld(2, timeout=5)  # which the sound rank waits for the other

    def rank(number: int) -> str:
        words = f"{SMALL} --train-iters 2 --offload-optimizer nvme --offload-path {tmp_path / str(number)}"
        config = parse_config(words.split(), world_size=2).config
        with pytest.raises(MegazeroError) as caught:
            pretrain_on(config, thread_context(world, ProcessGrid(dp=2), number))
        return str(caught.value)

    messages = world.run(rank)
    assert "the file of offloaded state must be made in" in messages[1]
    assert messages[0]
