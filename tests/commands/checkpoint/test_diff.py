"""`megazero checkpoint diff`: same and different, over layouts, with a status that scripts can use."""

from __future__ import annotations

import torch

from megazero.checkpoint.part import Key
from megazero.commands.checkpoint import main
from tests.commands.checkpoint.samples import EMBEDDING, TENSORS, UP, facts_of, flip, save
from tests.tables import over_table

RANDOM = Key("torch", "rng")


def test_the_same_state_of_two_layouts_is_equal(tmp_path, capsys):
    rows = torch.arange(8, dtype=torch.uint8).view(2, 4)
    save(tmp_path / "a", ranks=1, tensors=TENSORS | {RANDOM: rows[:1]})
    save(tmp_path / "b", ranks=2, tensors=TENSORS | {RANDOM: rows})
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"A  {tmp_path / 'a' / 'iter_0000001'}",
        f"B  {tmp_path / 'b' / 'iter_0000001'}",
        "",
        "setting                              A  B",
        "parallel.tensor_model_parallel_size  1  2",
        "",
        "3 of 3 tensors that both have are equal bit for bit",
        "equal bit for bit, settings apart",
    ]


def test_tensors_counters_and_settings_that_differ(tmp_path, capsys):
    changed = dict(TENSORS)
    changed[UP] = TENSORS[UP] + torch.eye(4, 3) * 0.25
    changed[EMBEDDING] = TENSORS[EMBEDDING].clone()
    changed[EMBEDDING][1, 4] = 0.5
    facts = facts_of(1, 1) | {"updates": 7}
    save(tmp_path / "a")
    save(tmp_path / "b", tensors=changed, facts=facts)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "",
        "counter  A  B",
        "updates  1  7",
        "",
        "tensor                  kind    dtype    difference  relative",
        "embedding.weight        weight  float32           1         2",
        "layers.0.mlp.up.weight  weight  float32        0.25    0.0227",
        "1 of 3 tensors that both have are equal bit for bit",
        "different",
    ]
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--top", "1"]) == 1
    assert "and 1 more that differ, by less" in capsys.readouterr().out


@over_table(("tolerance", "status"), [(None, 1), ("0.1", 0), ("0.01", 1)])
def test_tolerance(tmp_path, tolerance, status):
    save(tmp_path / "a")
    save(tmp_path / "b", tensors=TENSORS | {UP: TENSORS[UP] + 0.25})
    flags = [] if tolerance is None else ["--tolerance", tolerance]
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), *flags]) == status


@over_table(
    ("tensors", "words"),
    [
        ({UP: TENSORS[UP], EMBEDDING: TENSORS[EMBEDDING]}, f"{UP}/exp_avg is only in A"),
        (TENSORS | {Key("more"): torch.zeros(1)}, "more is only in B"),
        (TENSORS | {UP: TENSORS[UP].view(2, 6)}, f"{UP} has shape [4, 3] in A and [2, 6] in B"),
        (TENSORS | {EMBEDDING: TENSORS[EMBEDDING].bfloat16()}, "float32 and bfloat16"),
    ],
)
def test_what_cannot_be_equal(tmp_path, capsys, tensors, words):
    save(tmp_path / "a")
    save(tmp_path / "b", tensors=tensors)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert words in capsys.readouterr().out


@over_table("fact", [{"updates": 7}, {"stream_seed": 7}, {"scaler": {"scale": 2.0}}])
def test_a_counter_alone_is_a_difference(tmp_path, fact):
    save(tmp_path / "a")
    save(tmp_path / "b", facts=facts_of(1, 1) | fact)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1


def test_random_state_of_as_many_ranks_counts(tmp_path):
    save(tmp_path / "a", tensors={RANDOM: torch.zeros(1, 4, dtype=torch.uint8)})
    save(tmp_path / "b", tensors={RANDOM: torch.ones(1, 4, dtype=torch.uint8)})
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1


def test_a_real_run(run, capsys):
    assert main(["diff", str(run / "iter_0000004"), str(run)]) == 0
    assert capsys.readouterr().out.endswith("equal bit for bit\n")
    assert main(["diff", str(run / "iter_0000002"), str(run)]) == 1
    out = capsys.readouterr().out
    assert "state.consumed_samples  16   32" in out


def test_trouble_is_not_a_difference(run, capsys):
    assert main(["diff", str(run), str(run / "nowhere")]) == 2
    assert "is missing" in capsys.readouterr().err
    flip(run / "iter_0000004" / "model-00001-of-00001.safetensors", 40_000)
    assert main(["diff", str(run), str(run)]) == 2
    assert "has hash" in capsys.readouterr().err
    assert main(["diff", str(run), str(run), "--tolerance", "nan"]) == 2
