"""`megazero plan schedule`: what is printed, what is written, and how bad input ends."""

from __future__ import annotations

import json

import pytest

from megazero.plan.command import main


def plan(*flags: str) -> int:
    return main(["schedule", *flags])


def test_prints_grid_makespan_bubble_and_memory(capsys):
    assert plan("--kind", "1f1b", "--stages", "2", "--microbatches", "3") == 0
    assert capsys.readouterr().out.splitlines() == [
        "stage 0 | F0 F1 .  .  B0 -  F2 B1 -  .  B2 -",
        "stage 1 | .  F0 B0 -  F1 B1 -  F2 B2 -  .  .",
        "",
        "makespan          12",
        "bubble            25.0% of all stages' time",
        "peak activations  2, 1 micro-batches, stage by stage",
    ]


def test_every_cost_counts(capsys):
    flags = ("--stages", "1", "--microbatches", "1", "--forward", "2", "--input", "3", "--weight", "5")
    assert plan("--kind", "zb-h1", *flags) == 0
    assert "makespan          10\n" in capsys.readouterr().out
    assert plan("--kind", "1f1b", "--stages", "2", "--microbatches", "1", "--backward", "7") == 0
    assert "makespan          16\n" in capsys.readouterr().out
    assert plan("--kind", "1f1b", "--stages", "2", "--microbatches", "1", "--transfer", "0.5") == 0
    assert "makespan          7\n" in capsys.readouterr().out


@pytest.mark.parametrize(("virtual", "makespan"), [(1, 15), (2, 13.5), (3, 13)])
def test_virtual_is_the_number_of_chunks_per_stage(capsys, virtual, makespan):
    sizes = ("--stages", "2", "--microbatches", "4", "--virtual", str(virtual))
    assert plan("--kind", "interleaved", *sizes) == 0
    out = capsys.readouterr().out
    assert f"makespan          {makespan}\n" in out
    assert ("chunks of micro-batches" in out) == (virtual > 1)


def test_writes_picture_and_trace(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "a.png", tmp_path / "a.json"
    sizes = ("--stages", "2", "--microbatches", "2")
    assert plan("--kind", "gpipe", *sizes, "--output", str(picture), "--trace", str(trace)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kind", "1f1c"), "The schedule must be one of gpipe, 1f1b,"),
        (("--kind", "zb-v", "--virtual", "3"), "must be 2 for a placement in a V"),
        (("--kind", "interleaved", "--microbatches", "5"), "multiple of the pipeline stages (2)"),
        (("--kind", "1f1b", "--stages", "0"), "pipeline stages must be at least 1, but is 0"),
        (("--kind", "1f1b", "--weight", "0"), "`--weight` must be a finite number above 0, but is 0"),
        (("--kind", "1f1b", "--forward", "inf"), "`--forward` must be a finite number above 0, but is inf"),
        (("--kind", "1f1b", "--transfer", "nan"), "`--transfer` must be a finite number of at least 0"),
        (("--kind", "1f1b", "--output", "a.gif"), "must end in one of .png, .svg, .pdf"),
        (("--kind", "1f1b", "--trace", "no/such/folder/a.json"), "must be writable files"),
    ],
)
def test_bad_input_exits_with_2_and_the_reason(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    assert plan("--stages", "2", "--microbatches", "4", *flags) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err


def test_every_bad_cost_is_named_at_once(capsys):
    sizes = ("--stages", "2", "--microbatches", "4")
    assert plan("--kind", "1f1b", *sizes, "--input", "-1", "--transfer", "-1") == 2
    err = capsys.readouterr().err
    assert "`--input`" in err
    assert "`--transfer`" in err


@pytest.mark.parametrize("argv", [[], ["schedule"], ["bubble"], ["schedule", "--stages", "x"]])
def test_flags_that_argparse_refuses_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
