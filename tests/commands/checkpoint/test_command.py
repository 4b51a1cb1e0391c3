"""`megazero checkpoint`: dispatch, help, pipes and terminals."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from megazero import cli
from megazero.commands.checkpoint import main
from tests.commands.checkpoint.samples import save
from tests.tables import over_table

VERBS = ("inspect", "verify", "diff", "convert", "prune")


def test_help_names_every_verb(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["checkpoint", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(f"    {verb} " in out for verb in (*VERBS, "to-hf", "from-hf"))
    assert "    import-megatron" in out  # Python 3.13 puts its help on the same line, others on the next


@over_table("verb", VERBS)
def test_every_verb_has_its_own_help(capsys, verb):
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: megazero checkpoint {verb}")


@over_table("argv", [[], ["inspct"], ["inspect"], ["verify", "x", "--fast"]])
def test_a_wrong_command_line_has_status_2(capsys, argv):
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert "usage: megazero checkpoint" in capsys.readouterr().err


@over_table(
    ("verb", "module", "function"),
    [
        ("to-hf", "hf", "main_to_hf"),
        ("from-hf", "hf", "main_from_hf"),
        ("import-megatron", "megatron", "main_import_megatron"),
    ],
)
def test_formats_of_others_have_their_own_commands(monkeypatch, verb, module, function):
    seen = []
    other = SimpleNamespace(**{function: lambda argv: seen.append(list(argv)) or 7})
    monkeypatch.setitem(sys.modules, f"megazero.commands.checkpoint.{module}", other)
    assert main([verb, "a", "--flag"]) == 7
    assert seen == [["a", "--flag"]]


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_path_without_a_checkpoint(tmp_path, capsys, verb):
    assert main([verb, str(tmp_path / "no")]) == 1
    assert capsys.readouterr().err == (
        f"error: `{tmp_path / 'no'}` must be the folder of a run or of a checkpoint, but is missing; "
        "check the path\n"
    )
    assert main([verb, str(tmp_path)]) == 1
    assert "must hold a checkpoint, but has none" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error(tmp_path, capsys, monkeypatch):
    save(tmp_path)
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err == ""


def test_a_narrow_terminal_folds_names_and_keeps_numbers(tmp_path, capsys, monkeypatch):
    save(tmp_path, 1, ranks=2)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["inspect", str(tmp_path), "--tensors", "layers.*"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[1m" in out, "headings are bold on a terminal"
    assert "elements" in out
    assert "layers.0.mlp.up.weight" not in out
