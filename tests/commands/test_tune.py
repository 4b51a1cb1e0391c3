"""`megazero tune`: candidates, rules, order, resumption, files, exit status."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import islice

import pytest

from megazero.commands.tune import _results, _with_json, main
from megazero.config.resolve import parse_config
from megazero.errors import ConfigError
from megazero.plan.device import Device
from megazero.plan.kept import KeptPlans
from megazero.plan.layout import LayerSharding, Layout, PipelineSplit, Savings
from megazero.plan.measured import StepMeasurement
from megazero.plan.tuning import Planned, Search, best, explore

GPT = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 1000 --mock-data "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 10 --bf16 "
    "--tensor-model-parallel-size 4"
)


def search(flags: str = "", ranks: int = 4, device: str = "a100-80g") -> Search:
    given = parse_config(f"{GPT} {flags}".split(), world_size=ranks).config
    return Search(given, ranks, Device.load(device), 8)


def layout(tensor: int = 1, stages: int = 1, virtual: int = 1, zero: int = 1, **rest) -> Layout:
    savings = Savings(zero, rest.pop("recompute", "none"))
    sequence, micro_batch = rest.pop("sequence", tensor > 1), rest.pop("micro_batch", 1)
    return Layout(
        LayerSharding(tensor, sequence), PipelineSplit(stages, virtual, **rest), savings, micro_batch
    )


def test_candidates_use_all_ranks_and_whole_micro_batches():
    layouts = list(search().candidates())
    sizes = {(x.slices.tensor, x.stages.count) for x in layouts}
    assert sizes == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert len(layouts) == len(set(layouts))
    assert all(8 % (4 // (x.slices.tensor * x.stages.count) * x.micro_batch) == 0 for x in layouts)
    kinds = {(x.stages.count, x.stages.virtual, x.stages.schedule) for x in layouts}
    assert {(2, 1, "auto"), (2, 2, "auto"), (2, 1, "zb-h1"), (2, 2, "zb-v"), (4, 1, "zb-h1")} <= kinds


def test_on_a_gpu_rows_are_always_shared_and_on_a_cpu_both_ways_are_looked_at():
    def of_rows(device: str) -> set[bool]:
        return {x.slices.sequence for x in search(device=device).candidates() if x.slices.tensor > 1}

    assert of_rows("a100-80g") == {True}
    assert of_rows("cpu") == {False, True}


def test_ranks_share_long_sequences():
    long, both = search("--seq-length 16384"), search("--context-parallel-size 2", 8)
    assert {x.slices.context for x in search().candidates()} == {1}
    assert {x.slices.context for x in both.candidates()} == {1, 2}
    assert {x.slices.context for x in long.candidates()} == {1, 2, 4}
    assert all(4 % (x.slices.tensor * x.slices.context * x.stages.count) == 0 for x in long.candidates())
    small = search("--seq-length 16384 --hidden-size 64 --num-layers 2")
    shared = [(bound, x) for bound, x in small.ordered() if x.slices.context > 1 and not small.refused(x)]
    for bound, own in shared[::40]:
        assert bound <= Planned.of(small, own).seconds


def test_blocks_of_context_ranks_stay_where_their_number_does():
    flags = "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
    job = search(f"{flags} --tensor-model-parallel-size 1 --seq-length 16384")
    same, other = (
        job.config(Layout(LayerSharding(context=n), PipelineSplit(), Savings(), 1)).parallel for n in (4, 2)
    )
    assert (same.hierarchical_context_parallel_sizes, same.cp_comm_type) == ((2, 2), ("a2a+p2p",))
    assert (other.hierarchical_context_parallel_sizes, other.cp_comm_type) == (None, ("p2p",))
    assert str(Layout(LayerSharding(context=2), PipelineSplit(), Savings(), 1)) == "C2, ZeRO 1, b 1"


def test_rules_judge_candidates():
    assert not search().refused(layout(2, 2, zero=1))
    assert search().refused(layout(4, 1, 2))  # chunks need stages


def test_a_layout_replaces_the_given_one():
    config = search("--offload-optimizer cpu --zero-stage 1").config(layout(2, 2, 2, recompute="full"))
    parallel = config.parallel
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (2, 2)
    assert (parallel.num_layers_per_virtual_pipeline_stage, parallel.sequence_parallel) == (1, True)
    assert (config.recompute.granularity, config.batch.micro_batch_size, config.zero.stage) == ("full", 1, 1)
    assert (config.batch.global_batch_size, config.offload.optimizer) == (8, "none")


@pytest.mark.parametrize(
    "chosen",
    [
        layout(2, 2, 2),
        layout(1, 2, 1, schedule="zb-h1"),
        layout(1, 2, 2, schedule="zb-v", recompute="full"),
        layout(zero=3, micro_batch=2),
        Layout(LayerSharding(2, True), PipelineSplit(), Savings(2, "none", True), 2),
        Layout(LayerSharding(1, context=2), PipelineSplit(2), Savings(), 1),
    ],
    ids=str,
)
def test_a_layout_is_read_back_from_the_configuration_that_it_makes(chosen):
    assert Layout.of(search().config(chosen)) == chosen
    assert Layout.read(json.loads(json.dumps(chosen.document()))) == chosen
    assert chosen.distance(chosen) == 0


def test_the_distance_of_layouts_is_the_number_of_settings_that_differ():
    assert layout(2, 2).distance(layout(2, 4, micro_batch=2)) == 2


def test_bounds_are_below_plans():
    small = search()
    for bound, own in small.ordered()[::150]:
        assert bound <= Planned.of(small, own).seconds


def test_the_quickest_that_fit_are_best_or_those_that_lack_least():
    def planned(seconds: float, size: int, fits: bool) -> Planned:
        return Planned(layout(), size, fits, seconds, 0, 0, 0)

    quick, slow, large, larger = (
        planned(*x) for x in ((1, 5, True), (2, 4, True), (0.5, 9, False), (0.4, 10, False))
    )
    assert best([larger, slow, large, quick], 10) == [quick, slow]
    assert best([larger, large], 10) == [large, larger]


def test_layouts_like_a_given_one_change_little_and_fit():
    first, second = islice(search("--train-iters 9").like(Layout.of(search().base)), 2)
    assert (first.fits, second.fits) == (True, True)
    assert first.layout.distance(Layout.of(search().base)) == 1  # rows are shared, too
    assert first.layout.slices == LayerSharding(4, True)


def test_what_holds_more_than_a_layout_that_does_not_fit_is_not_planned(monkeypatch):
    job, planned = search(), []

    def of(_, own):
        planned.append(own)
        return Planned(own, 9, False, 1.0, 0, 0, 0)

    monkeypatch.setattr(Planned, "of", of)
    assert list(job.like(layout(2, 2))) == []
    assert len(planned) == 12
    assert not any(later.holds_more_than(own) for n, own in enumerate(planned) for later in planned[n:])


def test_more_samples_and_less_recomputation_hold_more():
    own = layout(2, 2, recompute="selective", micro_batch=2)
    more = (layout(2, 2, micro_batch=2), layout(2, 2, recompute="selective", micro_batch=4))
    less = (layout(2, 2, recompute="full", micro_batch=4), layout(2, 1), layout(2, 2), own)
    assert all(other.holds_more_than(own) for other in more)
    assert not any(other.holds_more_than(own) for other in less)


def test_whole_gradients_stay_on_the_device_beside_an_optimizer_on_the_host():
    """The bound left them out, and layouts that cannot fit were planned one after the other."""
    job = search()
    whole, sliced = (
        job._state(1000, Layout(LayerSharding(), PipelineSplit(), Savings(zero, "none", True), 1), 4)
        for zero in (1, 2)
    )
    assert (whole, sliced) == (2000 + 4000, 2000)


@pytest.mark.slow
def test_the_best_are_trained_and_compared(tmp_path, capsys):
    flags = GPT.replace("--bf16", "").replace("--tensor-model-parallel-size 4", "--device cpu")
    flags = flags.replace("256", "32").replace("4 --hidden", "2 --hidden")
    words = ["--gpus", "2", "--device", "cpu", "--plans", "3", "--measure", "2", "--", *flags.split()]
    assert main(words) == 0
    lines = capsys.readouterr().out.split("Trained on this machine, a step:")[1].splitlines()
    rows = [line for line in lines if re.match(r"\d  ", line)]
    assert len(rows) == 2
    assert all(re.search(r" m?s +[\d.]+ m?s +[\d.]+ m?s to [\d.]+ m?s +[+-][\d.]+%$", row) for row in rows)


def test_a_slow_round_does_not_move_the_figure_and_is_shown():
    assert StepMeasurement.of([1.0, 9.0, 1.25]) == StepMeasurement(1.25, 1.0, 9.0)


def test_more_ranks_than_the_machine_runs_are_not_measured(capsys):
    words = ["--gpus", "4", "--device", "a100-80g", "--plans", "1", "--measure", "1", "--", *GPT.split()]
    assert main(words) == 2
    assert "`--gpus` must be at most 0 with `--measure`" in capsys.readouterr().err


@pytest.mark.slow
def test_the_section_of_a_json_bounds_the_search(tmp_path, capsys):
    section = {
        "enabled": True,
        "mp_size": 2,
        "max_train_micro_batch_size_per_gpu": 2,
        "tuner_num_trials": 3,
        "results_dir": str(tmp_path / "results"),
        "tuner_type": "gridsearch",
    }
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": [1, 2, 4], "autotuning": section}))
    flags = GPT.replace("--micro-batch-size 1", f"--micro-batch-size 1 --deepspeed --deepspeed_config {path}")
    assert main(["--gpus", "4", "--device", "a100-80g", "--", *flags.split()]) == 0
    assert "without effect on a search on paper: autotuning.tuner_type" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "results/plans.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert {line["layout"]["slices"]["tensor"] for line in lines} == {2}
    assert {line["layout"]["micro_batch"] for line in lines} <= {1, 2}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"mp_size": 0}, "`autotuning.mp_size` must be a positive integer, but is 0"),
        ({"metric": "beauty"}, "`autotuning.metric` must be throughput, latency or FLOPS_per_gpu"),
        (
            {"min_train_micro_batch_size_per_gpu": 3},
            "`autotuning.min_train_micro_batch_size_per_gpu` and "
            "`autotuning.max_train_micro_batch_size_per_gpu` must leave a micro-batch, but "
            "none of 1, 2 is from 3 to 16; widen them",
        ),
    ],
)
def test_a_section_with_wrong_values_is_refused(section, said, tmp_path, capsys):
    path = tmp_path / "f.json"
    document = {"train_micro_batch_size_per_gpu": [1, 2], "autotuning": {"enabled": True, **section}}
    path.write_text(json.dumps(document))
    flags = f"{GPT} --deepspeed --deepspeed_config {path}"
    assert main(["--gpus", "4", "--", *flags.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, "2", True, ...])
def test_a_list_with_what_is_no_size_is_refused(size, tmp_path, capsys):
    path = tmp_path / "f.json"
    sizes, said = ([], "is empty") if size is ... else ([1, size], f"has {size!r}")
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": sizes, "autotuning": {"enabled": True}}))
    assert main(["--gpus", "4", "--", *f"{GPT} --deepspeed --deepspeed_config {path}".split()]) == 2
    said = f"`train_micro_batch_size_per_gpu` must be a list of positive integers, but {said}"
    assert said in capsys.readouterr().err


def test_a_path_gives_way_to_its_content_only_where_it_is_the_json():
    words = ["--deepspeed_config", "f", "--deepspeed_config=f", "--save=f/f", "fold", "--load"]
    assert [_with_json(word, "f", "e30=") for word in words] == [
        *("--deepspeed_config", "e30=", "--deepspeed_config=e30=", "--save=f/f", "fold", "--load")
    ]


def test_a_search_ends_after_plans_in_a_row_that_are_not_better(monkeypatch):
    results = [Planned(layout(), 1, fits, seconds, 0, 0, 0) for seconds, fits in TIMES]
    monkeypatch.setattr("megazero.commands.tune.explore", lambda *_: iter(results))
    assert len(_results(search(), 9, 2, None)) == 4


def test_a_search_goes_on_around_the_best():
    """On paper where each setting adds to the time, few of all layouts are planned until the best is."""
    job, planned = search(), []

    def plan(layouts):
        for own in layouts:
            planned.append(own)
            stages, savings = own.stages, own.savings
            costs = (
                4 / own.slices.tensor,
                4 / stages.count,
                1 / stages.virtual,
                savings.zero,
                own.micro_batch,
            )
            seconds = 1e3 * (sum(costs) + (stages.schedule == "zb-h1") + (savings.recompute == "full"))
            yield Planned(own, 1, True, seconds, 0, 0, 0)

    results = list(explore(job, plan, 10_000))
    allowed = [own for _, own in job.ordered() if not job.refused(own)]
    assert {(own.slices.tensor, own.stages.count) for own in planned[:6]} == {
        (x.slices.tensor, x.stages.count) for x in allowed
    }
    assert len(planned) == len(set(planned))
    quickest = best(results, 1)[0]
    assert quickest.seconds == min(r.seconds for r in plan(allowed))
    where = [r.layout for r in results].index(quickest.layout)
    assert where < len(allowed) / 3
    assert len(list(explore(job, plan, 9))) == 9


TIMES = ((3.0, True), (2.0, True), (1.0, False), (2.5, True), (1.0, True))


@pytest.mark.slow
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
    assert given.parallel.tensor_model_parallel_size == best_first["layout"]["slices"]["tensor"]


def test_plans_of_another_job_or_device_are_not_used_and_stay(tmp_path):
    path, job = tmp_path / "plans.jsonl", search()
    plan = Planned(layout(), 5, True, 2.0, 0.25, 0.5, 3.0)
    KeptPlans(path, job).add(plan)
    assert KeptPlans(path, job).known == {plan.layout: plan}
    for other in (
        search("--weight-decay 0.2"),
        search(ranks=8),
        search(device="h100"),
        replace(job, per_node=4),
    ):
        kept = KeptPlans(path, other)
        assert (kept.known, kept.others) == ({}, 1)
    kept.add(replace(plan, seconds=3.0))
    assert KeptPlans(path, job).known == {plan.layout: plan}
    assert KeptPlans(path, job, anew=True).known == {}
    assert path.read_text() == ""


@pytest.mark.parametrize("line", ["{}", "[]", '{"job": 1', '{"job": "x"', "7"])
def test_a_line_that_is_no_plan_is_named(line, tmp_path):
    path = tmp_path / "plans.jsonl"
    KeptPlans(path, search()).add(Planned(layout(), 5, True, 2.0, 0.25, 0.5, 3.0))
    path.write_text(path.read_text() + f"{line}\n")
    with pytest.raises(ConfigError, match="in each line, but line 2 is none; move the file away"):
        KeptPlans(path, search())


@pytest.mark.parametrize("text", ["mine", "mine\nand mine", '{"job": "a"}\nmine', '{"job": "a"}\n[1'])
def test_a_file_of_something_else_keeps_every_byte(text, tmp_path):
    """Its last line was cut off before it was looked at."""
    path = tmp_path / "plans.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="must have a plan of `megazero tune` in each line"):
        KeptPlans(path, search())
    assert path.read_text() == text


def test_what_is_no_file_of_plans_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be a file of plans that can be read and written, but"):
        KeptPlans(tmp_path, search())


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
