"""`--eval-tasks`: the same numbers on every layout, beside a training that does not change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.config.resolve import parse_config
from megazero.errors import ConfigError
from megazero.mpu.context import thread_context
from megazero.mpu.launch import grid_of
from megazero.mpu.thread_group import ThreadWorld
from megazero.train.pretraining import pretrain_on
from tests.tables import over_table

TASKS = Path(__file__).parent / "tasks"
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --mock-data --vocab-size 257 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --eval-iters 0 --train-iters 4 "
    "--tokenizer-type ByteLevelTokenizer --device cpu --position-embedding-type rope "
    "--init-method-std 0.2 --save-interval 4 --log-interval 1"
)


EVERY = ("--eval-tasks-interval", "2", "--eval-tasks-limit", "4")


def trained(folder: Path, world_size: int = 1, *flags: str) -> tuple[list[dict], list[dict], dict]:
    """Steps, evaluations and the facts of the last checkpoint of a training."""
    more_flags = ["--save", str(folder), "--metrics-jsonl", str(folder / "metrics.jsonl")]
    config = parse_config([*FLAGS.split(), *more_flags, *flags], world_size=world_size).config
    world = ThreadWorld(world_size, timeout=400.0)
    if config.training.eval_tasks is None:
        more = None
    else:
        from megazero.harness.in_training import TaskEvaluations as more

    def work(rank: int) -> None:
        context = thread_context(world, grid_of(config.parallel, world_size), rank)
        pretrain_on(config, context, more=more)

    world.run(work)
    steps, evaluations = (
        [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for path in (folder / "metrics.jsonl", folder / "metrics.eval.jsonl")
    )
    return steps, evaluations, json.loads((folder / "iter_0000004/state.json").read_text())


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> Path:
    """A file with a list of tasks, seen from where their data lies."""
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(TASKS)
    path = tmp_path / "tasks.yaml"
    path.write_text(json.dumps({"tasks": ["local_endings", "local_rolling"], "include_path": str(TASKS)}))
    return path


@pytest.mark.slow
def test_numbers_are_the_same_on_every_layout_and_training_does_not_change(tasks, tmp_path):
    serial, evaluations, facts = trained(tmp_path / "one", 1, "--eval-tasks", str(tasks), *EVERY)
    assert [(row["iteration"], row["split"]) for row in evaluations] == [(2, "tasks"), (4, "tasks")]
    names = {"local_endings_acc", "local_endings_acc_norm", "local_rolling_byte_perplexity"}
    assert names < evaluations[0].keys()
    assert facts["eval_tasks"]["iteration"] == 4
    assert facts["eval_tasks"]["metrics"].items() <= evaluations[1].items()
    plain, none, _ = trained(tmp_path / "none")
    assert none == []
    assert [step["lm_loss"] for step in plain] == [step["lm_loss"] for step in serial]
    layouts = {
        "T2": (2, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        "P2": (2, "--pipeline-model-parallel-size", "2"),
        "D2-Z3": (2, "--zero-stage", "3"),
        "cp2-Z1": (2, "--context-parallel-size", "2", "--zero-stage", "1"),
    }
    for name, (ranks, *flags) in layouts.items():
        _, others, _ = trained(tmp_path / name, ranks, "--eval-tasks", str(tasks), *EVERY, *flags)
        for row, own in zip(others, evaluations, strict=True):
            for key in facts["eval_tasks"]["metrics"]:
                assert row[key] == pytest.approx(own[key], rel=1e-4), (name, key)


@pytest.mark.slow
def test_a_task_that_fails_is_named_and_the_others_go_on(tasks, tmp_path, capsys):
    broken = tmp_path / "more"
    broken.mkdir()
    text = (TASKS / "goals.yaml").read_text().replace("goals.jsonl", "missing.jsonl")
    (broken / "broken.yaml").write_text(text.replace("local_goals", "broken"))
    (broken / "endings.yaml").write_text((TASKS / "endings.yaml").read_text())
    tasks.write_text(json.dumps({"tasks": ["broken", "local_endings"], "include_path": "more"}))
    _, evaluations, _ = trained(tmp_path / "run", 2, "--eval-tasks", str(tasks), *EVERY)
    assert "warning: the task broken failed at iteration 2: " in capsys.readouterr().out
    assert {"local_endings_acc"} < evaluations[0].keys()


@over_table(
    ("content", "message"),
    [
        ("tasks: [local_endigns]", "it has no local_endigns"),
        ("{tasks: arc", "must be a YAML or JSON file"),
        ("3", "must hold a list of tasks"),
        ("{tasks: [a], path: b}", "must hold a list of tasks"),
    ],
)
@pytest.mark.slow
def test_a_wrong_file_ends_the_run_at_its_start_on_every_rank(content, message, tasks, tmp_path):
    tasks.write_text(content)
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path / "run", 2, "--eval-tasks", str(tasks), *EVERY)


def test_tasks_need_an_interval_and_a_gpt():
    flags = [*FLAGS.split(), "--eval-tasks", "tasks.yaml"]
    with pytest.raises(ConfigError, match="eval-tasks-interval"):
        parse_config(flags)
