"""`megazero lm-eval`: the harness's command on a folder, with its caches and files, on one or two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proofs.harness_equal import tasks_in, write_models
from tests.forks import run, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.gloo]
TASKS = "local_goals,local_sums"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two models and the tasks."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    tasks_in(folder / "tasks")
    return folder


def line(
    folder: Path, *more: object, model: str = "dense", tasks: str = "local_goals,local_sums"
) -> list[object]:
    flags = ["--model_args", f"load={folder / model}", "--tasks", tasks, "--include_path", folder / "tasks"]
    return ["-m", "megazero.cli", "lm-eval", *flags, *more]


def scores(output: Path) -> dict:
    (path,) = output.rglob("results_*.json")
    return json.loads(path.read_text())["results"]


def test_the_first_rank_alone_prints_and_writes_and_caches_are_of_a_checkpoint(folder, tmp_path):
    flags = ["--use_cache", tmp_path / "cache"]
    one = run(*line(folder, "--output_path", tmp_path / "one", *flags), environment=OFFLINE)
    assert one.returncode == 0, one.stderr
    assert "|local_goals|" in one.stdout
    caches = sorted(path.name for path in tmp_path.glob("cache*"))
    command = line(folder, "--output_path", tmp_path / "two")
    first, second = run_ranks(command, command, environment=OFFLINE)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert (second.stdout, "|local_goals|" in first.stdout) == ("", True)
    assert scores(tmp_path / "one") == scores(tmp_path / "two")
    run(*line(folder, *flags, model="experts", tasks="local_goals"), environment=OFFLINE)
    assert len(caches) == 1
    assert len(list(tmp_path.glob("cache*"))) == 2


def test_bad_lines_end_in_one_sentence(folder):
    for bad, sentence in (
        (line(folder, tasks="local_gaols"), "local_gaols"),
        (line(folder, model="nowhere"), "`load` must hold a checkpoint"),
        (line(folder, "--apply_chat_template"), "must have a chat template"),
    ):
        done = run(*bad, environment=OFFLINE)
        assert done.returncode != 0
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
