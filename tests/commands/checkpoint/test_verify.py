"""`megazero checkpoint verify`: every kind of damage is named, and has a status."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.box import Box
from megazero.checkpoint.part import Key, Part
from megazero.checkpoint.saver import Saver
from megazero.commands.checkpoint import main
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from tests.checkpoint.forged import edit_manifest
from tests.commands.checkpoint.samples import describe_anew, flip, save

MODEL = "model-00001-of-00001.safetensors"


def test_a_whole_run(run, capsys):
    assert main(["verify", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["whole", "whole", "checked"]
    assert lines[-1].endswith("MB/s): 0 of 2 damaged")


def test_each_damaged_file_is_named_and_no_other(run, capsys):
    flip(run / "iter_0000004" / MODEL, 40_000)
    flip(run / "iter_0000004" / "state.json", 0)
    assert main(["verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert f"whole    {run / 'iter_0000002'}" in out
    assert f"damaged  {run / 'iter_0000004'}" in out
    size = (run / "iter_0000004" / MODEL).stat().st_size
    assert f"  {MODEL}: block 0 is not as written (bytes 0 to {size:,})\n" in out
    assert "  state.json: block 0 is not as written" in out
    assert out.count("not as written") == 2
    assert out.endswith("1 of 2 damaged\n")


def test_blocks_of_a_large_file(tmp_path, capsys):
    """13 blocks and a bit: damage in 0, 2, 3 and the last, over a border of what is read at once."""
    folder = save(tmp_path, tensors={Key("w"): torch.zeros(13 << 20)})
    block = 4 << 20
    flip(folder / MODEL, 5, 2 * block, 3 * block + 7, 13 * block + 1)
    assert main(["verify", str(folder)]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if MODEL in line]
    size = (folder / MODEL).stat().st_size
    assert lines == [
        f"{MODEL}: block 0 is not as written (bytes 0 to 4,194,304)",
        f"{MODEL}: blocks 2 to 3 are not as written (bytes 8,388,608 to 16,777,216)",
        f"{MODEL}: block 13 is not as written (bytes 54,525,952 to {size:,})",
    ]


@pytest.mark.parametrize("name", [MODEL, "index.json", "state.json", "manifest.json"])
@pytest.mark.parametrize("flags", [[], ["--size-only"]])
def test_missing_and_cut_files(run, capsys, name, flags):
    path = run / "iter_0000004" / name
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["verify", str(run), *flags]) == 1
    assert name in capsys.readouterr().out
    path.unlink()
    assert main(["verify", str(run), *flags]) == 1
    out = capsys.readouterr().out
    assert name in out
    assert "1 of 2 damaged" in out


def test_sizes_alone_do_not_see_a_changed_byte(run):
    flip(run / "iter_0000004" / MODEL, 40_000)
    assert main(["verify", str(run), "--size-only"]) == 0
    assert main(["verify", str(run)]) == 1


def test_files_of_another_checkpoint_do_not_fit(run, capsys):
    """Each of them is as it was written, somewhere else."""
    shutil.rmtree(run / "iter_0000002")
    (run / "iter_0000004").rename(run / "iter_0000002")
    assert main(["verify", str(run / "iter_0000002")]) == 1
    assert "rename it back" in capsys.readouterr().out


def test_an_index_that_does_not_fit_the_files(tmp_path, capsys):
    folder = save(tmp_path)
    describe_anew(folder, lambda index: index["tensors"][0].update(name="another"))
    assert main(["verify", str(folder)]) == 1
    assert "of `another` as the index says, but does not" in capsys.readouterr().out


def test_what_does_not_belong_is_a_warning(run, capsys):
    (run / "iter_0000002" / "notes.txt").write_text("mine")
    (run / ".iter_0000009.partial").mkdir()
    assert main(["verify", str(run)]) == 0
    out = capsys.readouterr().out
    assert "  warning: notes.txt is not part of the checkpoint\n" in out
    assert "warning  " + str(run / ".iter_0000009.partial") in out


def test_latest_that_names_nothing_is_damage(run, capsys):
    (run / "latest_checkpointed_iteration.txt").write_text("6\n")
    assert main(["verify", str(run)]) == 1
    assert "names iter_0000006, which is missing" in capsys.readouterr().out
    (run / "latest_checkpointed_iteration.txt").write_text("six\n")
    assert main(["verify", str(run)]) == 1
    (run / "latest_checkpointed_iteration.txt").unlink()
    assert main(["verify", str(run)]) == 0, "a save killed before its first file of this name"


def test_a_checkpoint_that_was_set_aside_is_checked_too(run, capsys):
    (run / "iter_0000004").rename(run / ".iter_0000004.replaced")
    assert main(["verify", str(run)]) == 0
    assert "0 of 2 damaged" in capsys.readouterr().out
    flip(run / ".iter_0000004.replaced" / MODEL, 40_000)
    assert main(["verify", str(run)]) == 1


def save_by_parts(directory: Path, ranks: int) -> Path:
    """A checkpoint that several ranks wrote."""
    world = ThreadWorld(ranks)

    def work(rank: int) -> None:
        saver = Saver(directory, thread_context(world, ProcessGrid(dp=ranks), rank))
        saver.save(
            3, [Part(Key("w"), (ranks, 4), Box((rank, 0), (1, 4)), torch.full((1, 4), float(rank)))], {}
        )
        saver.close()

    world.run(work)
    return directory / "iter_0000003"


def test_all_damaged_parts_and_files_are_named(tmp_path, capsys):
    folder = save_by_parts(tmp_path, 4)
    assert main(["verify", str(folder)]) == 0
    assert "in 10 files" in capsys.readouterr().out
    (folder / "part-00002-of-00004.json").write_bytes(b"{}")
    (folder / "part-00003-of-00004.json").unlink()
    data = bytearray((folder / "model-00001-of-00004.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model-00001-of-00004.safetensors").write_bytes(data)
    assert main(["verify", str(folder)]) == 1
    said = capsys.readouterr().out
    for name in ("part-00002-of-00004.json", "part-00003-of-00004.json", "model-00001-of-00004.safetensors"):
        assert name in said


def test_a_manifest_of_a_million_parts_is_soon_done_with(tmp_path, capsys):
    folder = save_by_parts(tmp_path, 2)
    edit_manifest(folder, lambda manifest: manifest.update(parts=1 << 20))
    assert main(["verify", str(folder)]) == 1
    assert "no further parts than part-00100-of-1048576.json were looked at" in capsys.readouterr().out
