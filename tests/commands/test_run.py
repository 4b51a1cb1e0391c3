"""`megazero run`: a script that cannot be run, or that raises, is reported as Python reports it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megazero.commands.run import build_parser, command, main
from megazero.deepspeed import __main__ as rank

SCRIPTS = {
    "syntax.py": (b"def (\n", 1, '  File "syntax.py", line 1\n'),
    "nul.py": (b"a\0b", 1, ("SyntaxError: ", "ValueError: ")),  # the latter before Python 3.11.4
    "raises.py": (b"def f():\n    1 / 0\n\n\nf()\n", 1, "Traceback (most recent call last):\n  File "),
    "opens.py": (b"open('nowhere')", 1, "Traceback (most recent call last):\n  File "),
    "ends.py": (b"raise SystemExit(7)", 7, ""),
    "absent.py": (None, 2, "error: the script must be a file that can be read, but "),
    "folder": (None, 1, "error: the script must be one that can be run, but can't find '__main__'"),
    "-m no_such_module": (None, 1, "error: the script must be one that can be run, but No module named"),
}
"""Its words, its text, the status of `python` for it, and how its report begins."""


def test_no_frame_of_ours_is_in_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing script and a syntax error were reported with a traceback through runpy and megazero."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank, "install", lambda: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(
        sys, "excepthook", sys.__excepthook__
    )  # torch's names the rank once there were groups
    (tmp_path / "folder").mkdir()
    for words, (text, status, said) in SCRIPTS.items():
        if text is not None:
            (tmp_path / words).write_bytes(text)
        monkeypatch.setattr(sys, "argv", ["megazero.deepspeed", *words.split()])
        with pytest.raises(SystemExit) as ended:
            rank.main()
        report = capsys.readouterr().err
        assert (words, ended.value.code) == (words, status)
        assert report.startswith(said), report
        assert not [line for line in report.splitlines() if "runpy" in line or "megazero" in line]


def test_ranks_are_not_started_for_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--num_gpus", "2", "absent.py"]) == 2
    assert "the script must be a file, but there is no /" in capsys.readouterr().err


def test_a_script_without_a_number_of_ranks_needs_no_launcher() -> None:
    words = command(build_parser().parse_args(["absent.py", "--lr", "1"]))
    assert words == [sys.executable, "-m", "megazero.deepspeed", "absent.py", "--lr", "1"]
