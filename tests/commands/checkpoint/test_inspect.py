"""`megazero checkpoint inspect`: literal tables of small checkpoints, and every field of a real one."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from megazero.checkpoint.part import Key
from megazero.commands.checkpoint import main
from megazero.commands.checkpoint.stats import Distance, Stats, distance, stats_of
from megazero.commands.show import one_line, size_text
from tests.commands.checkpoint.samples import describe_anew, save
from tests.tables import over_table


def test_the_list_of_a_run(tmp_path, capsys):
    save(tmp_path, 1, ranks=2)
    broken = save(tmp_path, 3, ranks=1)
    save(tmp_path, 20, ranks=2)
    (broken / "state.json").write_bytes(b"")
    (tmp_path / ".iter_0000030.partial").mkdir()
    (tmp_path / ".iter_0000030.partial" / "model-00001-of-00002.safetensors").write_bytes(b"12345")
    assert main(["inspect", str(tmp_path)]) == 1
    table, rest = capsys.readouterr().out.split("not whole")
    folders = sorted(tmp_path.glob("iter_*"))
    sizes = [size_text(sum(file.stat().st_size for file in folder.iterdir())) for folder in folders]
    axes = "2 ranks: tensor 2 x pipeline 1 x data 1, ZeRO stage 1"
    assert table.splitlines() == [
        f"checkpoint{'':13}saved{'':17}by{'':53}whole  {'size':>6}  samples  tokens",
        f"iter_0000001           2026-01-02T03:04:05Z  {axes}  yes    {sizes[0]}        8   1,024",
        f"iter_0000003           -{'':21}-{'':54}no     {sizes[1]}        -       -",
        f"iter_0000020 (latest)  2026-01-02T03:04:05Z  {axes}  yes    {sizes[2]}      160  20,480",
    ]
    assert "state.json has 0 bytes instead of" in rest
    assert rest.splitlines()[1:] == [
        "left over  .iter_0000030.partial, 5 B: of a save under way, or of one that was killed"
    ]


def test_a_checkpoint(tmp_path, capsys):
    folder = save(tmp_path, 3, ranks=2)
    assert main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    described = [
        path for path in folder.iterdir() if path.name != "manifest.json" and "part-" not in path.name
    ]
    size = sum(path.stat().st_size for path in described)
    assert lines == [
        f"checkpoint  {folder}",
        "kind        pretraining",
        "iteration   3",
        "progress    24 samples, 3,072 tokens, 0 skipped",
        "updates     3",
        "saved       2026-01-02T03:04:05Z",
        "by          megazero 0.1.0, git abc, torch 2.13.0",
        "layout      2 ranks: tensor 2 x pipeline 1 x data 1, ZeRO stage 1",
        "batch       -",
        "vocabulary  2",
        "precision   bf16, loss scale 1.0",
        f"contents    3 tensors, 6 pieces, 4 files, {size_text(size)}",
        "",
        "kind     dtype  tensors  pieces  elements  size",
        "weight   F32          2       4        22  88 B",
        "exp_avg  F32          1       2        12  48 B",
        "",
        "model        value",
        "num_layers   1",
        "hidden_size  3",
    ]


def test_tensors_by_pattern_and_with_numbers(tmp_path, capsys):
    save(tmp_path, 3, ranks=2)
    assert main(["inspect", str(tmp_path), "--tensors", "layers.*"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tensor                  kind     dtype  shape  pieces  files  elements",
        "layers.0.mlp.up.weight  weight   F32    4 x 3       2      2        12",
        "layers.0.mlp.up.weight  exp_avg  F32    4 x 3       2      2        12",
        "2 tensors",
    ]
    assert main(["inspect", str(tmp_path), "--tensors", "*/exp_avg", "--stats"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tensor                  kind     dtype  shape  pieces  files  elements  min  max  mean  rms  nan",
        "layers.0.mlp.up.weight  exp_avg  F32    4 x 3       2      2        12    1    1     1    1    0",
        "1 tensors",
    ]


def test_a_real_run(run, capsys):
    assert main(["inspect", str(run), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(c["iteration"], c["latest"], c["samples"], c["tokens"]) for c in listed["checkpoints"]] == [
        (2, False, 16, 256),
        (4, True, 32, 512),
    ]
    assert listed["checkpoints"][0]["layout"] == {
        **{"world_size": 1, "tensor": 1, "pipeline": 1, "context": 1, "data": 1, "zero_stage": 0},
    }
    assert main(["inspect", str(run / "iter_0000002"), "--json", "--stats"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["iteration"] == found["facts"]["state"]["iteration"] == 2
    assert {file["name"] for file in found["files"]} == set(os.listdir(run / "iter_0000002"))
    weights = [kind for kind in found["kinds"] if kind["kind"] == "weight"]
    assert [(w["elements"] * 4, w["tensors"]) for w in weights] == [(weights[0]["bytes"], 28)]
    assert len(found["tensors"]) == sum(kind["tensors"] for kind in found["kinds"])
    assert all(t["stats"]["nan"] == 0 and t["stats"]["rms"] >= 0 for t in found["tensors"])
    assert main(["inspect", str(run), "--files"]) == 0
    assert "model-00001-of-00001.safetensors" in capsys.readouterr().out


def test_latest_that_is_not_there_is_told(run, capsys):
    shutil.rmtree(run / "iter_0000004")
    assert main(["inspect", str(run)]) == 1
    assert "names iter_0000004, which is missing" in capsys.readouterr().out


def test_damage_is_an_error(run, capsys):
    (run / "iter_0000004" / "manifest.json").unlink()
    assert main(["inspect", str(run / "iter_0000004")]) == 1
    assert "manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("facts", [{}, {"config": 3, "state": [], "written_by": {"world_size": "two"}}])
def test_facts_of_another_hand_are_no_trouble(tmp_path, capsys, facts):
    folder = save(tmp_path, 1, facts=facts)
    assert main(["inspect", str(folder)]) == main(["inspect", str(tmp_path)]) == 0
    assert "layout      -" in capsys.readouterr().out


def test_a_name_cannot_command_the_terminal(tmp_path, capsys):
    save(tmp_path, 1, tensors={Key("\x1b[2J\n[red]"): torch.zeros(1)})
    assert main(["inspect", str(tmp_path), "--tensors"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(r"\x1b[2J\n[red]  weight")


def test_a_tensor_larger_than_its_files_is_not_given_memory(tmp_path, capsys):
    def enlarge(index):
        index["tensors"][0]["shape"][0] = index["tensors"][0]["pieces"][0]["shape"][0] = 1 << 40

    describe_anew(save(tmp_path), enlarge)
    assert main(["inspect", str(tmp_path), "--stats"]) == 1
    assert "is larger than its file" in capsys.readouterr().err


def test_numbers_of_a_tensor():
    values = torch.tensor([3.0, float("nan"), -4.0, 0.0])
    assert stats_of(values) == Stats(-4.0, 3.0, -1 / 3, (25 / 3) ** 0.5, 1)
    assert stats_of(torch.tensor([200, 100], dtype=torch.uint8)).mean == 150
    assert stats_of(torch.tensor([2**60], dtype=torch.int64)).max == 2**60
    assert stats_of(torch.tensor([float("inf"), 1.0])).max == float("inf")
    assert str(stats_of(torch.empty(0, 3)).mean) == "nan"


@over_table(
    ("a", "b", "expected", "relative"),
    [
        ([1.0, 2.0], [1.0, 2.0], Distance(True, 0.0, 0.0), 0.0),
        ([1.0, 2.0], [1.0, 4.0], Distance(False, 2.0, 4.0), 0.5),
        ([0.0], [-0.0], Distance(False, 0.0, 0.0), 0.0),
        ([0.0], [float("inf")], Distance(False, float("inf"), 0.0), float("inf")),
        ([float("nan"), 2.0], [float("nan"), 1.0], Distance(False, 1.0, 2.0), 0.5),
        ([float("nan")], [1.0], Distance(False, float("inf"), 1.0), float("inf")),
        ([float("inf")], [1.0], Distance(False, float("inf"), 1.0), float("inf")),
        ([float("inf"), 1.0], [float("inf"), 2.0], Distance(False, 1.0, 2.0), 0.5),
    ],
)
def test_how_far_apart(a, b, expected, relative):
    found = distance(torch.tensor(a), torch.tensor(b))
    assert found == expected
    assert found.relative == relative


def test_the_same_numbers_of_another_dtype_are_not_the_same_bits():
    assert distance(torch.ones(3), torch.ones(3, dtype=torch.bfloat16)) == Distance(False, 0.0, 1.0)


@over_table(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (5 * 10**9, "5.0 GB"),
        (10**18, "1000 PB"),
    ],
)
def test_sizes(count, text):
    assert size_text(count) == text


def test_printable_keeps_letters():
    assert one_line("größe \ud800\t") == r"größe \ud800\t"
