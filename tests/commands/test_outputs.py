"""What a command writes at its end is looked at before it begins."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megazero.commands import outputs
from megazero.commands.outputs import add_picture_flags, output_file, output_folder, output_picture
from megazero.commands.plan.job import plan_job
from megazero.pictures.style import DARK, LIGHT


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    refusals = (
        (output_file, ".", "must be a file, but . is a folder"),
        (output_file, "absent/file", "must lie in a folder, but `absent` is none"),
        (output_picture, "a.gif", "must end in one of .png, .svg, .pdf, but is a.gif"),
        (output_folder, "file", "must be a folder, but file is none"),
        (output_folder, "file/below", "must be a folder, but .*file is none"),
    )
    for kind, text, said in refusals:
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            kind(text)
    for kind, text in ((output_file, "file"), (output_file, "new"), (output_folder, "new/below")):
        assert kind(text) == Path(text)
    monkeypatch.setattr(outputs.os, "access", lambda path, mode: False)
    for kind in (output_file, output_folder):
        with pytest.raises(argparse.ArgumentTypeError, match=f"but {tmp_path} may not be written"):
            kind("new")


def test_a_plan_is_not_made_for_an_output_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It took 25 seconds until this was refused; here the flags of the training are not even read."""
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        plan_job(["--nproc", "2", "--output", str(tmp_path / "file")], ["--nonsense"])
    assert "must be a folder" in capsys.readouterr().err


def test_a_picture_has_a_file_and_a_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_picture_flags(parser)
    assert vars(parser.parse_args([])) == {"output": None, "theme": LIGHT}
    flags = parser.parse_args(["--output", str(tmp_path / "a.svg"), "--theme", "dark"])
    assert vars(flags) == {"output": tmp_path / "a.svg", "theme": DARK}
    with pytest.raises(SystemExit):
        parser.parse_args(["--theme", "blue"])
    assert "argument --theme: must be light or dark, but is blue" in capsys.readouterr().err
