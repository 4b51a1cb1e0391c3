"""The batch script that makes a dataset by many jobs, with stand-ins for SLURM and for Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.source_tree import ROOT

SCRIPT = "scripts/slurm/preprocess.sbatch"
FLAGS = ["--input", "a b.jsonl", "--output-prefix", "p"]


@pytest.fixture
def batch(tmp_path):
    """Runs the script; returns what the stand-ins were called with, and the finished run."""
    said = tmp_path / "said"
    for name, last in (("sbatch", "echo '71;east'"), ("python", ":")):
        path: Path = tmp_path / name
        path.write_text(f'#!/bin/sh\nprintf "%s|" {name} "$@" >> {said}; echo >> {said}\n{last}\n')
        path.chmod(0o755)

    def run(*flags: str, **variables: str) -> tuple[list[list[str]], subprocess.CompletedProcess]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environment = {**clean, "PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        done = subprocess.run(
            ["bash", SCRIPT, *flags], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        lines = said.read_text().splitlines() if said.exists() else []
        return [line.split("|")[:-1] for line in lines], done

    return run


def test_it_submits_an_array_and_a_merge_that_waits_for_it(batch):
    calls, done = batch(*FLAGS, JOBS="12")
    assert (done.returncode, done.stderr) == (0, "")
    assert calls == [
        ["sbatch", "--parsable", "--array=0-11", SCRIPT, *FLAGS],
        [
            *("sbatch", "--parsable", "--dependency=afterok:71", "--kill-on-invalid-dep=yes"),
            *(SCRIPT, "--merge", *FLAGS),
        ],
    ]
    assert done.stdout == "submitted 12 tasks as job 71, and job 71, which joins what they make\n"
    calls, done = batch(*FLAGS, JOBS="none")
    assert (len(calls), done.returncode) == (2, 2)
    assert "`JOBS` must be a positive integer, but is `none`." in done.stderr


def test_a_task_makes_its_share_with_a_worker_for_each_core(batch):
    job = {"SLURM_JOB_ID": "72", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_CPUS_PER_TASK": "4"}
    array = {"SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_STEP": "2", "SLURM_ARRAY_TASK_COUNT": "10"}
    start = ["python", "-m", "megazero.cli", "data", "preprocess"]
    calls, _ = batch(*FLAGS, **job, **array, SLURM_ARRAY_TASK_ID="11")
    assert calls == [[*start, *FLAGS, "--workers", "4", "--shard", "3/10"]]
    calls, done = batch(*FLAGS, **job, **array, SLURM_ARRAY_TASK_ID="25")
    assert (len(calls), done.returncode) == (1, 2)
    assert "`--array` must be a range" in done.stderr
    calls, _ = batch("--merge", *FLAGS, **job)
    assert calls[1] == [*start, "--merge", *FLAGS, "--workers", "4"]
    calls, done = batch(*FLAGS, **job)
    assert (len(calls), done.returncode) == (2, 2)
    assert "must be a task of an array or have --merge" in done.stderr
