"""`megazero tune`: candidates, rules, order, resumption, files, exit status."""

from __future__ import annotations

import json

import pytest

from megazero.commands.tune import main
from megazero.config.resolve import parse_config
from megazero.plan.device import Device
from megazero.plan.tuning import Layout, Planned, Search, best

GPT = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 1000 --mock-data "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 10 --bf16 "
    "--tensor-model-parallel-size 4"
)


def search(flags: str = "", ranks: int = 4, device: str = "a100-80g") -> Search:
    given = parse_config(f"{GPT} {flags}".split(), world_size=ranks).config
    return Search(given, ranks, Device.load(device), 8)


def test_candidates_use_all_ranks_and_whole_micro_batches():
    layouts = list(search().candidates())
    assert {(x.tensor, x.pipeline) for x in layouts} == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert len(layouts) == len(set(layouts))
    assert all(8 % (4 // (x.tensor * x.pipeline) * x.micro_batch) == 0 for x in layouts)


def test_rules_judge_candidates():
    assert not search().refused(Layout(2, 2, 1, 1, 3, "none", 1))
    assert search().refused(Layout(4, 1, 2, 1, 1, "none", 1))  # chunks need stages


def test_a_layout_replaces_the_given_one():
    config = search().config(Layout(2, 2, 2, 1, 1, "full", 2))
    parallel = config.parallel
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (2, 2)
    assert (parallel.num_layers_per_virtual_pipeline_stage, parallel.sequence_parallel) == (1, True)
    assert (config.recompute.granularity, config.batch.micro_batch_size, config.zero.stage) == ("full", 2, 1)
    assert config.batch.global_batch_size == 8


def test_bounds_are_below_plans():
    small = search()
    for bound, layout in small.ordered()[::150]:
        assert bound <= Planned.of(small, layout).seconds


def test_the_quickest_that_fit_are_best_or_those_that_lack_least():
    def planned(seconds: float, size: int, fits: bool) -> Planned:
        return Planned(Layout(1, 1, 1, 1, 1, "none", 1), size, fits, seconds, 0, 0, 0)

    quick, slow, large, larger = (
        planned(*x) for x in ((1, 5, True), (2, 4, True), (0.5, 9, False), (0.4, 10, False))
    )
    assert best([larger, slow, large, quick], 10) == [quick, slow]
    assert best([larger, large], 10) == [large, larger]


def test_a_search_goes_on_from_its_log_and_writes_what_it_finds(tmp_path, capsys):
    words = [
        "--gpus",
        "4",
        "--device",
        "a100-80g",
        "--plans",
        "6",
        "--output",
        str(tmp_path),
        "--",
        *GPT.split(),
    ]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert "the given layout takes" in first
    log = tmp_path / "plans.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    log.write_text("".join(lines[:4]) + lines[4][:20])  # it was stopped while it wrote
    assert main(words) == 0
    assert capsys.readouterr().out == first
    best_first = json.loads(min(lines, key=lambda line: json.loads(line)["seconds"]))
    given = parse_config(["--config", str(tmp_path / "01.yaml")], world_size=4).config
    assert given.parallel.tensor_model_parallel_size == best_first["layout"]["tensor"]


def test_where_nothing_fits_the_status_and_a_line_say_so(capsys):
    flags = GPT.replace(
        "--num-layers 4 --hidden-size 256", "--num-layers 2 --hidden-size 32768 --ffn-hidden-size 500000"
    )
    assert (
        main(
            [
                "--gpus",
                "4",
                "--device",
                "v100-32g",
                "--plans",
                "2",
                "--",
                *flags.replace("--bf16", "--fp16").split(),
            ]
        )
        == 2
    )
    assert "`--gpus` must be a number on which some layout is possible" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (["--gpus", "4"], "`CONFIG` must be a YAML file of a training"),
        (["--gpus", "4", "--device", "abacus", "--", *GPT.split()], "`--device` must be one of"),
    ],
)
def test_bad_input_is_refused(own, said, capsys):
    assert main(own) == 2
    assert said in capsys.readouterr().err
