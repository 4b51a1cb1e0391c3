"""`megazero plan schedule`: what is printed, what is written, and how bad input ends."""

from __future__ import annotations

import json

import pytest

from megazero.commands.memory_report import main as memory_report
from megazero.commands.plan import main
from tests.tables import over_table


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


@over_table(("virtual", "makespan"), [(1, 15), (2, 13.5), (3, 13)])
def test_virtual_is_the_number_of_chunks_per_stage(capsys, virtual, makespan):
    sizes = ("--stages", "2", "--microbatches", "4", "--virtual", str(virtual))
    assert plan("--kind", "interleaved", *sizes) == 0
    out = capsys.readouterr().out
    assert f"makespan          {makespan}\n" in out
    assert ("chunks of micro-batches" in out) == (virtual > 1)


def test_groups_of_micro_batches_are_as_large_as_asked_for(capsys):
    """With all in one group, no second chunk begins before the last micro-batch has passed the first."""
    sizes = ("--kind", "interleaved", "--stages", "2", "--microbatches", "4", "--virtual", "2")
    assert plan(*sizes, "--group", "4") == 0
    assert capsys.readouterr().out.startswith("stage 0 | F0.0 F0.1 F0.2 F0.3 F2.0 ")
    assert plan(*sizes) == 0
    assert capsys.readouterr().out.startswith("stage 0 | F0.0 F0.1 F2.0 F2.1 F0.2 ")
    assert plan(*sizes, "--group", "3") == 2
    assert "groups of 3" in capsys.readouterr().err
    assert plan("--kind", "1f1b", *sizes[2:6], "--group", "4") == 2
    assert "`--group` must be left out with `--kind 1f1b`" in capsys.readouterr().err


def test_writes_picture_and_trace(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "a.png", tmp_path / "a.json"
    sizes = ("--stages", "2", "--microbatches", "2")
    assert plan("--kind", "gpipe", *sizes, "--output", str(picture), "--trace", str(trace)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 8


@over_table(
    ("flags", "message"),
    [
        (("--kind", "1f1c"), "The schedule must be one of gpipe, 1f1b,"),
        (("--kind", "zb-v", "--virtual", "3"), "must be 2 for a placement in a V"),
        (("--kind", "interleaved", "--microbatches", "5"), "multiple of the pipeline stages (2)"),
        (("--kind", "1f1b", "--stages", "0"), "pipeline stages must be at least 1, but is 0"),
        (("--kind", "1f1b", "--weight", "0"), "`--weight` must be a finite number above 0, but is 0"),
        (("--kind", "1f1b", "--forward", "inf"), "`--forward` must be a finite number above 0, but is inf"),
        (("--kind", "1f1b", "--transfer", "nan"), "`--transfer` must be a finite number of at least 0"),
        (("--kind", "1f1b", "--microbatches", "1" + "0" * 14), "must be at most 1,000,000, but is 200,000,"),
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


def test_sizes_come_from_flags_or_from_a_training(capsys):
    assert plan() == 2
    err = capsys.readouterr().err
    sizes = ("kind", "stages", "microbatches")
    assert all(f"`--{name}` must be given without flags" in err for name in sizes)
    assert plan("--kind", "1f1b", "--virtual", "2", "--group", "2", "--", "--config", "x.yaml") == 2
    err = capsys.readouterr().err
    assert "`--nproc` must be given with flags of a training" in err
    assert all(f"`--{name}` must be left out with flags" in err for name in ("kind", "virtual", "group"))


TRAINING = """
--num-layers 4 --hidden-size 8 --num-attention-heads 1 --seq-length 4 --vocab-size 16 --lr 1 --mock-data
--make-vocab-size-divisible-by 1 --train-iters 1 --micro-batch-size 2 --pipeline-model-parallel-size 2
"""


def test_the_schedule_of_a_training_by_the_flops_of_its_chunks(capsys):
    """By hand, per token: 16 h^2 + 8 h^2 of products, 4 s h / 2 of attention in a layer; 2 v h in a head."""
    assert plan("--nproc", "4", "--", *TRAINING.split(), "--global-batch-size", "12") == 0
    chunks, _, grid = capsys.readouterr().out.partition("\n\n")
    layer, head = 24 * 64 + 2 * 4 * 8, 2 * 16 * 8
    mean = (4 * layer + head) / 2
    assert chunks.splitlines() == [
        f"chunk 0 on stage 0: embedding, layers 0 to 1; {2 * layer / mean:.2f} of a mean stage",
        f"chunk 1 on stage 1: layers 2 to 3, head; {(2 * layer + head) / mean:.2f} of a mean stage",
    ]
    assert "F2" in grid
    assert "F3" not in grid  # two replicas share 12 samples: three micro-batches of 2 each


def test_layers_with_experts_weigh_what_a_token_uses(capsys):
    """Four experts as wide as the MLP, of which two are used: the MLP's 16 h^2 count twice, and a router."""
    experts = ["--num-experts", "4", "--moe-layer-freq", "[0,0,1,1]", "--moe-router-topk", "2"]
    experts += ["--moe-router-load-balancing-type", "none", "--global-batch-size", "4"]
    assert plan("--nproc", "2", "--", *TRAINING.split(), *experts) == 0
    dense, expert = 24 * 64 + 2 * 4 * 8, (8 + 32) * 64 + 2 * 4 * 8 + 2 * 4 * 8
    mean = (2 * dense + 2 * expert + 2 * 16 * 8) / 2
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"chunk 0 on stage 0: embedding, layers 0 to 1; {2 * dense / mean:.2f} of a mean stage",
        f"chunk 1 on stage 1: layers 2 to 3, head; {(2 * expert + 2 * 16 * 8) / mean:.2f} of a mean stage",
    ]


def test_layers_dealt_out_by_measuring_are_not_known_here(capsys):
    flags = ("--pipeline-partition", "measured", "--global-batch-size", "4")
    assert plan("--nproc", "2", "--", *TRAINING.split(), *flags) == 2
    assert "`pipeline_partition` must not be measured here" in capsys.readouterr().err


@over_table("argv", [[], ["bubble"], ["schedule", "--stages", "x"]])
def test_flags_that_argparse_refuses_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_the_communicators_of_a_training(capsys):
    """Names that span the same ranks share one; weights have one beside that of gradients."""
    flags = [*TRAINING.split(), "--global-batch-size", "8", "--zero-stage", "1"]
    assert main(["communicators", "--nproc", "4", "--", *flags]) == 0
    rows = [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()]
    assert [row[:4] for row in rows] == [
        ["pp", "2", "ranks", "high"],
        ["data", "2", "ranks", "high"],
        ["world", "4", "ranks", "normal"],
        ["replica_gather", "2", "ranks", "high"],
    ]
    assert (
        rows[0][4] == "messages between pipeline stages; what a model agrees on; gradients of a tied weight"
    )
    assert main(["communicators", "--nproc", "4"]) == 2
    assert "flags of a training must follow after `--`" in capsys.readouterr().err


@over_table(
    "command",
    [
        lambda: main(["communicators", "--nproc", "0", "--", "--num-layers", "2"]),
        lambda: main(["schedule", "--nproc", "0", "--", "--num-layers", "2"]),
        lambda: memory_report(["--nproc", "0", "--", "--num-layers", "2"]),
    ],
)
def test_no_ranks_are_refused_by_the_name_of_the_flag(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    assert "argument --nproc: must be a positive integer, but is 0" in capsys.readouterr().err
