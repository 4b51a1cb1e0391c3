"""A checkpoint is whole or invisible, and refuses what does not fit it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from megazero.checkpoint import (
    SliceReader,
    Snapshot,
    iteration_folder,
    latest_iteration,
    read_facts,
    save_checkpoint,
    simple,
)
from megazero.errors import CheckpointError
from megazero.mpu import ProcessGrid, ThreadWorld, solo_context, thread_context

TENSORS = {"a/weight": torch.arange(6.0).view(2, 3), "b/weight": torch.tensor([7.0])}


@pytest.fixture
def saved(tmp_path):
    save_checkpoint(tmp_path, 4, Snapshot(TENSORS, {"note": "x"}), solo_context())
    return tmp_path


def read_tensors(folder, into, context):
    """Read a slice into the tensors of `into`."""
    with SliceReader(folder, {key: tuple(t.shape) for key, t in into.items()}, context) as tensors:
        for key, tensor in into.items():
            tensor.copy_(tensors[key])


def empty() -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(value) for key, value in TENSORS.items()}


def test_round_trip(saved):
    assert latest_iteration(saved) == 4
    assert read_facts(iteration_folder(saved, 4))["note"] == "x"
    into = empty()
    read_tensors(iteration_folder(saved, 4), into, solo_context())
    assert all(torch.equal(into[key], TENSORS[key]) for key in TENSORS)
    assert sorted(p.name for p in iteration_folder(saved, 4).iterdir()) == [
        "meta.json",
        "model_tp00_pp00.safetensors",
    ]


def test_each_slice_is_written_once_and_replicas_read_it(tmp_path):
    world, grid = ThreadWorld(4), ProcessGrid(dp=2, tp=2)

    def work(rank):
        context = thread_context(world, grid, rank)
        mine = {"w/weight": torch.full((2,), float(context.tp.rank))}
        save_checkpoint(tmp_path, 1, Snapshot(mine, {}), context)
        into = {"w/weight": torch.full((2,), -1.0)}
        read_tensors(iteration_folder(tmp_path, 1), into, context)
        return into["w/weight"].tolist()

    assert world.run(work) == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    with pytest.raises(CheckpointError, match="'tensor_model_parallel_size': 2.*use the same sizes"):
        read_tensors(iteration_folder(tmp_path, 1), empty(), solo_context())


def test_every_misfit_is_named_and_nothing_changes(saved):
    into = {"a/weight": torch.zeros(3, 2), "c/weight": torch.zeros(1), "b/weight": torch.zeros(1)}
    with pytest.raises(CheckpointError) as error:
        read_tensors(iteration_folder(saved, 4), into, solo_context())
    assert "a/weight has shape (2, 3), not (3, 2)" in str(error.value)
    assert "c/weight is missing" in str(error.value)
    assert into["b/weight"].item() == 0.0


def test_a_failure_on_one_rank_is_an_error_on_all_and_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    world, grid = ThreadWorld(2), ProcessGrid(tp=2)
    real = simple.save_file

    def save(value, failing=None):
        def work(rank):
            context = thread_context(world, grid, rank)
            monkeypatch.setattr(
                simple,
                "save_file",
                lambda tensors, path: (
                    (_ for _ in ()).throw(OSError(28, "No space left on device"))
                    if failing is not None and f"tp{failing:02d}" in path.name
                    else real(tensors, path)
                ),
            )
            mine = {"w/weight": torch.full((2,), value)}
            try:
                save_checkpoint(tmp_path, int(value), Snapshot(mine, {}), context)
            except CheckpointError as error:
                return str(error)
            return None

        return world.run(work)

    assert save(1.0) == [None, None]
    for message in save(2.0, failing=1):
        assert "rank 1 could not write" in message
        assert "No space left on device" in message
    assert latest_iteration(tmp_path) == 1
    assert not iteration_folder(tmp_path, 2).exists()


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 99}'])
def test_damaged_facts_are_refused(saved, damage):
    (iteration_folder(saved, 4) / "meta.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        read_facts(iteration_folder(saved, 4))


def test_truncated_and_missing_tensors_are_refused(saved):
    path = iteration_folder(saved, 4) / "model_tp00_pp00.safetensors"
    whole = path.read_bytes()
    for size in (0, 7, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="safetensors"):
            read_tensors(iteration_folder(saved, 4), empty(), solo_context())
    path.unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        read_tensors(iteration_folder(saved, 4), empty(), solo_context())


def test_latest_must_be_a_number(saved):
    (saved / simple.LATEST).write_text("release\n")
    with pytest.raises(CheckpointError, match="'release'"):
        latest_iteration(saved)
    (saved / simple.LATEST).unlink()
    assert latest_iteration(saved) is None


def test_saving_again_replaces(saved):
    shutil.copytree(iteration_folder(saved, 4), saved / "iter_0000004.partial")  # left by a crash
    save_checkpoint(saved, 4, Snapshot({"n/weight": torch.ones(1)}, {}), solo_context())
    into = {"n/weight": torch.zeros(1)}
    read_tensors(iteration_folder(saved, 4), into, solo_context())
    assert into["n/weight"].item() == 1.0
    assert not (saved / "iter_0000004.partial").exists()
    assert json.loads((iteration_folder(saved, 4) / "meta.json").read_text())["iteration"] == 4
