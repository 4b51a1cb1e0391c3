"""`megazero moe-report`: loads from metrics and checkpoints, the table, the picture, and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.part import Key
from megazero.checkpoint.tensor_file import Later
from megazero.checkpoint.writer import write_checkpoint
from megazero.commands.moe_report import main
from megazero.commands.moe_report.balance import bars, verdict
from megazero.commands.moe_report.loads import LayerLoad, LoadRecord, read_loads, summed
from megazero.commands.moe_report.picture import figure_of, idlest_layer
from megazero.pictures.style import DARK, LIGHT, styled
from megazero.plan.words import runs
from tests.tables import over_table

EVEN, TILTED = (5.0, 5.0, 5.0, 5.0), (14.0, 0.4, 4.6, 1.0)


def metrics(path: Path, *steps: dict[int, tuple[float, ...]] | None) -> Path:
    """A metrics file with a step per argument: layer -> tokens, or None for a step without loads."""
    lines = []
    for number, loads in enumerate(steps, start=1):
        record = {"iteration": 10 * number, "lm_loss": 3.0}
        if loads is not None:
            record["tokens_per_expert"] = [{"layer": k, "tokens": list(v)} for k, v in loads.items()]
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def checkpoint(folder: Path, **tensors: torch.Tensor) -> Path:
    laters = [
        (Key(name.replace("__", ".")), Later(t.dtype, tuple(t.shape), lambda t=t: t))
        for name, t in tensors.items()
    ]
    write_checkpoint(folder, 7, laters, {})
    return folder


def test_the_table_names_the_dead_by_layer_and_number(tmp_path, capsys):
    path = metrics(tmp_path / "m.jsonl", {1: EVEN, 3: EVEN}, None, {3: TILTED, 1: EVEN})
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "iteration 30; a half bar is an even share, · is dead",
        "layer  load of each expert  experts   busiest    idlest  dead",
        "1      ▅▅▅▅                       4  0 (1.00)  0 (1.00)     0",
        "3      █·▄▂                       4  0 (2.80)  1 (0.08)     1",
        "1 of the 8 experts get less than 0.1 of an even share:",
        "  layers.3.mlp.experts 1",
    ]


def test_several_records_are_added_up_and_the_threshold_moves(tmp_path, capsys):
    path = metrics(tmp_path / "m.jsonl", {0: (9.0, 1.0)}, {0: (1.0, 9.0)}, {0: (0.0, 10.0)})
    assert main([str(path), "--last", "2", "--threshold", "0.2"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "2 records, iterations 20 to 30; a half bar is an even share, · is dead"
    )
    assert main([str(path), "--last", "99", "--threshold", "0.2"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[2].split() == ["0", "▃▆", "2", "1", "(1.33)", "0", "(0.67)", "0"]
    assert told[-1] == "none of the 2 experts gets less than 0.2 of an even share"


def test_a_checkpoint_has_one_record(tmp_path):
    """Layers may differ in their number of experts; other tensors are not looked at."""
    run = checkpoint(
        tmp_path / "run",
        layers__11__mlp__router__load=torch.tensor([1.0, 2.0, 3.0, 2.0]),
        layers__2__mlp__router__load=torch.tensor([3.0, 1.0]),
        layers__2__mlp__router__weight=torch.ones(2, 3),
    )
    expected = (LoadRecord(7, (LayerLoad(2, (3.0, 1.0)), LayerLoad(11, (1.0, 2.0, 3.0, 2.0)))),)
    assert read_loads(run) == expected
    assert read_loads(run / "iter_0000007") == expected


def test_shares_have_a_mean_of_one():
    assert LayerLoad(0, TILTED).shares == pytest.approx((2.8, 0.08, 0.92, 0.2))
    assert LayerLoad(0, (6.0, 0.0, 0.0)).shares == (3.0, 0.0, 0.0)
    assert bars(LayerLoad(0, (0.0, 1.0, 2.0, 4.0, 3.0)), 0.0) == "▁▃▅█▆"
    assert summed(
        [LoadRecord(1, (LayerLoad(4, (1.0, 2.0)),)), LoadRecord(2, (LayerLoad(4, (3.0, 5.0)),))]
    ) == (LoadRecord(2, (LayerLoad(4, (4.0, 7.0)),)))


def test_dead_experts_are_listed_by_layer():
    crowd = LayerLoad(9, (*(0.0,) * 3, 5.0, 0.0, 5.0, 5.0, 0.0, 0.0))
    assert verdict(LoadRecord(1, (LayerLoad(2, (0.0, 9.0)), LayerLoad(4, EVEN), crowd)), 0.1) == (
        "7 of the 15 experts get less than 0.1 of an even share:\n"
        "  layers.2.mlp.experts 0\n"
        "  layers.9.mlp.experts 0-2, 4, 7-8"
    )
    assert runs([]) == ""
    assert runs([3]) == "3"


def test_the_picture_has_layers_and_a_layer_over_time():
    pytest.importorskip("matplotlib")
    from tests.pictures.checks import complaints

    records = [LoadRecord(10, (LayerLoad(1, (1.0, 1.0)), LayerLoad(3, EVEN)))]
    later = LoadRecord(20, (LayerLoad(1, (1.0, 7.0)), LayerLoad(3, (*TILTED[:3], 0.0))))
    assert idlest_layer(later) == 3
    with styled(DARK):
        figure = figure_of([*records, later], later, 3, 0.1, "mine", DARK)
        assert complaints(figure, DARK) == []
    layers, history, _ = figure.axes
    grid, crosses = layers.collections
    expected = [-2.0, math.log2(7 / 4), math.nan, math.nan]
    assert grid.get_array()[0].filled(math.nan).tolist() == pytest.approx(expected, nan_ok=True)
    assert [tick.get_text() for tick in layers.get_yticklabels()] == ["1", "3"]
    assert sorted(map(tuple, crosses.get_offsets())) == [(1, 1), (3, 1)]
    ticks = zip(layers.get_xticks(), layers.get_xticklabels(), strict=True)
    assert [label.get_text() for at, label in ticks if 0 <= at <= 3] == ["0", "1", "2", "3"]
    assert figure.get_suptitle() == "Load of experts in run mine"
    assert figure.axes[2].get_ylabel() == "share of tokens (even = 1)"
    (over_time,) = history.collections
    assert over_time.get_array()[:, 0].tolist() == [0.0] * 4
    assert over_time.get_array()[3, 1] == -3  # no token at all: the end of the colours
    assert history.get_title(loc="left") == "layer 3 over time"
    with styled():
        assert (
            len(figure_of(records, records[0], 1, 0.1, "mine", LIGHT).axes) == 2
        )  # one panel and its colors


def test_the_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = metrics(tmp_path / "m.jsonl", {1: EVEN, 3: EVEN}, {1: EVEN, 3: TILTED})
    assert main([str(path), "--output", str(tmp_path / "a.png"), "--layer", "1"]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@over_table(
    ("text", "message"),
    [
        ("", "must have a step with `tokens_per_expert`, but has none"),
        ('{"iteration": 1}\n', "take the metrics of a model with experts"),
        ('{"iteration": 1}\nnonsense\n', "line 2 of"),
        ("[1]\n", "line 1 of"),
        ('{"tokens_per_expert": [{"layer": 0, "tokens": [1]}]}\n', "is not an object with an `iteration`"),
        ('{"iteration": 1, "tokens_per_expert": [{"layer": 0}]}\n', "line 1 of"),
        ('{"iteration": 1, "tokens_per_expert": 3}\n', "line 1 of"),
        ('{"iteration": 1, "tokens_per_expert": [{"layer": 0, "tokens": []}]}\n', "line 1 of"),
        ('{"iteration": 1, "tokens_per_expert": [{"layer": 0, "tokens": [0, 0]}]}\n', "but has none"),
        ('{"iteration": 1, "tokens_per_expert": [{"layer": 0, "tokens": [1, -1]}]}\n', "line 1 of"),
        (
            '{"iteration": 1, "tokens_per_expert": [{"layer": 0, "tokens": [1, 1]}]}\n'
            '{"iteration": 2, "tokens_per_expert": [{"layer": 0, "tokens": [1]}]}\n',
            "must be of the same layers in every step",
        ),
    ],
)
def test_a_file_of_something_else_is_one_sentence(tmp_path, capsys, text, message):
    (tmp_path / "m.jsonl").write_text(text, encoding="utf-8")
    assert main([str(tmp_path / "m.jsonl")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert message in told
    assert told.count("\n") == 1


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = metrics(tmp_path / "m.jsonl", {0: (1.0, 1.0)})
    path.write_text(path.read_text() + '{"iteration": 20, "tok')
    assert len(read_loads(path)) == 1


def test_other_bad_input(tmp_path, capsys):
    path = metrics(tmp_path / "m.jsonl", {1: EVEN})
    (tmp_path / "empty").mkdir()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    dense = checkpoint(tmp_path / "dense", layers__0__mlp__up__weight=torch.ones(2))
    fresh = checkpoint(tmp_path / "fresh", layers__0__mlp__router__load=torch.zeros(2))
    cases = {
        (str(tmp_path / "none"),): (1, f"but {tmp_path}/none: No such file or directory; check the path"),
        (str(tmp_path / "bytes"),): (1, "is not text; check the path"),
        (str(tmp_path / "empty"),): (1, "must hold a checkpoint, but has none; check the path"),
        (str(dense),): (1, "take a checkpoint of a model with experts"),
        (str(fresh),): (1, "layer 0 has not; take a checkpoint of a later step"),
        (str(path), "--layer", "2"): (2, "`--layer` must be one with experts (1), but is 2; correct it"),
        (str(path), "--last", "0"): (2, "`--last` must be at least 1, but is 0; raise it"),
        (str(path), "--threshold", "2"): (2, "`--threshold` must be from 0 to 1, but is 2; correct it"),
    }
    for flags, (status, message) in cases.items():
        assert main(flags) == status, flags
        told = capsys.readouterr().err
        assert told.endswith(f"{message}\n"), flags
        assert told.count("\n") == 1, flags
