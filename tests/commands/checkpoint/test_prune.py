"""`megazero checkpoint prune`: what goes, and what never does."""

from __future__ import annotations

import os

import pytest

from megazero.checkpoint.folder import saved_iterations
from megazero.checkpoint.lock import WriterLock
from megazero.commands.checkpoint import main
from tests.commands.checkpoint.samples import save


def visible(folder) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ".lock" and not name.startswith("latest"))


@pytest.fixture
def many(tmp_path):
    for iteration in (10, 20, 30, 40, 50):
        save(tmp_path, iteration)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("--keep-last 2", [40, 50]),
        ("--keep-last 1 --keep-every 20", [20, 40, 50]),
        ("--keep-last 9", [10, 20, 30, 40, 50]),
    ],
)
def test_what_stays(many, capsys, flags, kept):
    assert main(["prune", str(many), *flags.split(), "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert saved_iterations(many) == [10, 20, 30, 40, 50]
    assert main(["prune", str(many), *flags.split()]) == 0
    out = capsys.readouterr().out
    assert saved_iterations(many) == kept
    gone = [line.split()[1] for line in out.splitlines()[:-1]]
    assert gone == [str(many / f"iter_{i:07d}") for i in (10, 20, 30, 40, 50) if i not in kept]
    assert planned.replace("remove  ", "removed ").replace("would free", "freed") == out
    assert main(["verify", str(many)]) == 0


def test_latest_and_the_newest_whole_one_stay(many):
    """A rolled-back run: its file names 20; and the two newest are cut."""
    (many / "latest_checkpointed_iteration.txt").write_text("20\n")
    for name in ("iter_0000040", "iter_0000050"):
        (many / name / "state.json").unlink()
    assert main(["prune", str(many), "--keep-last", "1"]) == 0
    assert saved_iterations(many) == [20, 30, 50]


def test_nothing_goes_where_nothing_is_whole(many, capsys):
    for folder in many.glob("iter_*"):
        (folder / "manifest.json").unlink()
    assert main(["prune", str(many), "--keep-last", "1"]) == 1
    assert "must hold a whole checkpoint before others are removed" in capsys.readouterr().err
    assert saved_iterations(many) == [10, 20, 30, 40, 50]


def test_a_file_of_the_latest_that_cannot_be_read_stops_it(many):
    (many / "latest_checkpointed_iteration.txt").write_text("soon\n")
    assert main(["prune", str(many), "--keep-last", "1"]) == 1
    assert saved_iterations(many) == [10, 20, 30, 40, 50]


def test_leftovers_of_killed_saves_go_and_what_was_set_aside_comes_back(many, capsys):
    partial = many / ".iter_0000060.partial"
    partial.mkdir()
    (partial / "model-00001-of-00001.safetensors").write_bytes(b"x" * 1234)
    (many / ".latest_checkpointed_iteration.txt.0123456789abcdef").write_text("60\n")
    (many / "iter_0000050").rename(many / ".iter_0000050.replaced")
    assert main(["prune", str(many), "--keep-last", "9", "--dry-run"]) == 0
    dry = capsys.readouterr().out.splitlines()
    assert partial.exists()
    assert main(["prune", str(many), "--keep-last", "9"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"restored  {many / 'iter_0000050'}",
        f"removed   {partial}  1.2 kB",
        f"removed   {many / '.latest_checkpointed_iteration.txt.0123456789abcdef'}  3 B",
        "freed 1.2 kB",
    ]
    assert [line.split()[0] for line in dry] == ["restore", "remove", "remove", "would"]
    assert visible(many) == [f"iter_{i:07d}" for i in (10, 20, 30, 40, 50)]


def test_not_while_a_job_saves_there(many, capsys):
    lock = WriterLock(many)
    try:
        assert main(["prune", str(many), "--keep-last", "1"]) == 1
    finally:
        lock.release()
    assert f"process {os.getpid()}" in capsys.readouterr().err
    assert saved_iterations(many) == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("flags", [["--keep-last", "0"], ["--keep-last", "1", "--keep-every", "0"]])
def test_numbers_that_make_no_sense(many, flags):
    assert main(["prune", str(many), *flags]) == 2


def test_a_folder_without_checkpoints_is_not_touched(tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("mine")
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 1
    assert "has none" in capsys.readouterr().err
    assert (tmp_path / "precious.txt").exists()


def test_one_checkpoint_is_no_run(many, capsys):
    assert main(["prune", str(many / "iter_0000010"), "--keep-last", "1"]) == 1
    assert "name its parent" in capsys.readouterr().err
