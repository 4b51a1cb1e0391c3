"""The GPU suite: its dry run, and that its results come back whatever ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from tests.source_tree import ROOT

SCRIPT = ROOT / "scripts/gpu_suite.sh"
CALLS = ("correct", "steps", "kernels")


def environment(folder: Path, **more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": sys.prefix, "OUT": str(folder / "out"), **more}


def with_stand_in(folder: Path, script: str) -> dict[str, str]:
    """An environment whose `python` is a shell script that is told `$*` and notes it in `calls`."""
    (folder / "bin").mkdir()
    for name in ("python", "python3"):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/bash\necho "$*" >>{folder}/calls\n{script}\n')
        program.chmod(0o755)
    return environment(folder, PATH=f"{folder}/bin{os.pathsep}{os.environ['PATH']}")


def suite(*arguments: str, env: dict[str, str], seconds: float = 240) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=env, capture_output=True, text=True, timeout=seconds
    )


def unpacked(folder: Path, call: str) -> dict[str, str]:
    """The texts in a call's archive, by name."""
    with tarfile.open(folder / "out" / f"gpu_{call}.tar.gz") as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        names = {member.name.removeprefix(f"gpu_{call}/"): archive.extractfile(member) for member in files}
        return {name: file.read().decode(errors="replace") for name, file in names.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "lines", "others"),
    [
        ("correct", {"agrees.jsonl": 3}, set()),
        ("steps", {"device_step.jsonl": 1}, {"traces/step_124M_plain.json.gz"}),
        ("kernels", {"kernels.jsonl": 6}, set()),
    ],
)
def test_a_brief_dry_run_ends_by_itself_with_one_archive(tmp_path, call, lines, others):
    run = suite(call, "--brief", env=environment(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"gpu_{call}.tar.gz"]
    files = unpacked(tmp_path, call)
    assert files.keys() == {"log.txt", *lines, *others}
    assert f"{call}: all passed" in files["log.txt"]
    for name, count in lines.items():
        read = [json.loads(line) for line in files[name].splitlines()]
        assert len(read) == count, read
        assert not any("failed" in line or "error" in line for line in read), read


def test_all_calls_run_in_turn_and_go_on_after_failures(tmp_path):
    env = with_stand_in(tmp_path, 'echo "this one fails" >&2; exit 3')
    run = suite("--dry-run", env=env)
    assert run.returncode == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "gpu_correct.tar.gz",
        "gpu_kernels.tar.gz",
        "gpu_steps.tar.gz",
    ]
    log = unpacked(tmp_path, "steps")["log.txt"]
    assert log.count("this one fails") == log.count("failed: ") == 6
    assert "failed: compiled steps" in log


def test_a_call_that_is_killed_leaves_its_archive(tmp_path):
    """A session that ended a call once got nothing back of it."""
    env = with_stand_in(tmp_path, "echo working; sleep 60")
    process = subprocess.Popen(["bash", str(SCRIPT), "kernels", "--dry-run"], env=env, stdout=subprocess.PIPE)
    while b"working" not in process.stdout.readline():
        pass
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 20, "the check is not waited for"
    log = unpacked(tmp_path, "kernels")["log.txt"]
    assert "working" in log
    assert "failed: stopped by SIGTERM" in log
    process.stdout.close()


def test_what_is_done_is_there_even_after_a_signal_that_cannot_be_caught(tmp_path):
    env = with_stand_in(
        # The log is written by a process of its own, which a busy machine may start late.
        tmp_path,
        '[[ $* == *device_parts* ]] && { echo second; sleep 60; }; echo "the first"; sleep 0.5',
    )
    process = subprocess.Popen(
        ["bash", str(SCRIPT), "kernels", "--dry-run"],
        env=env,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    while b"second" not in process.stdout.readline():
        pass
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    assert "the first" in unpacked(tmp_path, "kernels")["log.txt"]


def test_a_check_that_hangs_is_ended_and_the_rest_has_no_time(tmp_path):
    env = with_stand_in(tmp_path, "sleep 60") | {"GPU_SUITE_SECONDS": "2"}
    began = time.monotonic()
    run = suite("kernels", "--dry-run", env=env)
    assert run.returncode == 1
    assert time.monotonic() - began < 30
    log = unpacked(tmp_path, "kernels")["log.txt"]
    assert "it did not end within 2 s" in log
    assert "failed: kernels' rates\nfailed: 8-bit floats beside bf16: no time was left" in log


@pytest.mark.parametrize("call", CALLS)
def test_the_limits_of_a_call_add_up_to_less_than_eight_minutes(call):
    text = SCRIPT.read_text(encoding="utf-8")
    setup = [90, 45]
    assert [int(n) for n in re.findall(r"^    check .* (\d+) (?:env|python -c) ", text, re.M)][:2] == setup
    body = re.search(rf"^{call}\(\) {{\n(.*?)^}}", text, re.M | re.S).group(1)
    limits = re.findall(r'check (?:"[^"]*"|\w+) (\d+|rest)', body)
    assert len(limits) == body.count("check ")
    numbers = [int(limit) for limit in limits if limit != "rest"]
    # What is left over is for the check that takes the rest, and for packing.
    assert sum(setup + numbers) <= 475 - 15 * ("rest" in limits)
    assert limits.index("rest") == len(limits) - 1 if "rest" in limits else True


def test_it_names_the_files_of_the_tests_that_need_a_gpu(tmp_path):
    """To collect all 400 files for nine tests took longer than the tests."""
    env = with_stand_in(tmp_path, "exit 0") | {"SETUP_SKIP": "1"}
    suite("correct", env=env, seconds=60)
    calls = (tmp_path / "calls").read_text().splitlines()
    (marked,) = [call for call in calls if call.startswith("-m pytest -m gpu ")]
    expected = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if "@pytest.mark.gpu" in path.read_text() or "marks=pytest.mark.gpu" in path.read_text()
    ]
    assert len(expected) >= 7
    assert set(expected) <= set(marked.split()[4:])
    assert "print(cuda_kernels().path)" in calls
    assert len(marked.split()) < len(expected) + 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="would be the suite itself")
def test_a_machine_without_a_gpu_is_refused(tmp_path):
    """The program that looks for one was once read from an input that a job in the background lacks."""
    run = suite("kernels", env=environment(tmp_path, SETUP_SKIP="1"))
    assert run.returncode == 2
    assert (
        "error: the GPU suite must have a CUDA device, but torch sees none; --dry-run needs none."
        in run.stdout
    )
    assert "kernels' rates" not in run.stdout


def test_wheels_are_fetched_for_the_python_of_the_machine(tmp_path):
    env = with_stand_in(tmp_path, "exit 0")
    assert suite("wheels", "pydantic", "orjson", env=env).returncode == 0
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.startswith("-m pip download --only-binary=:all: --python-version 3.12 ")
    assert call.endswith(" --constraint constraints.txt --dest .wheels pydantic orjson")


@pytest.mark.parametrize("word", ["--what", "step"])
def test_a_wrong_word_is_refused(tmp_path, word):
    run = suite(word, env=environment(tmp_path))
    assert (run.returncode, run.stdout) == (2, "")
    assert f"but one is `{word}`." in run.stderr
    assert not (tmp_path / "out").exists()
