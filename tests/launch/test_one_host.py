"""A launch on this machine alone: signals, lines, ends, and what is done around the ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from megazero.launch.processes import ProcessState, receivers
from tests.launch.cluster import Launch, is_alive, until
from tests.launch.programs import SHOW, WAIT


@pytest.fixture
def launch(tmp_path):
    """A function that begins a launch of some programs, and ends what is left."""
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "wait.py").write_text(WAIT)
    started = []

    def begin(*words: str, **variables: str) -> Launch:
        started.append(Launch(words, tmp_path, variables))
        return started[-1]

    yield begin
    for one in started:
        if one.poll() is None:
            one.kill()
            one.wait()


def test_ranks_that_ignore_sigterm_end_in_one_grace(launch, tmp_path):
    """DeepSpeed's launcher gives 30 s to each, one after the other."""
    (tmp_path / "stubborn.py").write_text(
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('pid', "
        "os.getpid(), flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.02)\n"
        "if os.environ['RANK'] == '0': sys.exit(3)\ntime.sleep(60)\n"
    )
    one = launch("--num-gpus", "8", "--grace", "0.5", "stubborn.py")
    pids = [int(line.split()[-1]) for line in one.await_lines(8, "pid")]
    began = time.monotonic()
    (tmp_path / "go").touch()
    assert one.status() == 3
    assert time.monotonic() - began < 6
    assert not any(map(is_alive, pids))


def test_lines_are_whole_and_the_last_before_death_is_there(launch, tmp_path):
    (tmp_path / "talk.py").write_text(
        "import os, sys, time\nrank = os.environ['RANK']\n"
        "for i in range(400): print(f'{rank} {i} ' + rank * 200)\n"
        "for i in range(50): sys.stderr.write(f'\\r{i}%')\n"
        "sys.stdout.flush(); sys.stdout.write('the end'); sys.stdout.flush()\n"
        "time.sleep(0.5 if rank == '2' else 3)\nos.kill(os.getpid(), 9)\n"
    )
    one = launch("--num-gpus", "3", "--grace", "0.3", "talk.py")
    assert one.status() == 137
    lines = one.lines()
    for rank in range(3):
        own = [line.partition(": ")[2] for line in lines if line.startswith(f"localhost[{rank}]: ")]
        assert own[:400] == [f"{rank} {i} " + str(rank) * 200 for i in range(400)]
        assert own[400:] == ["the end"]
    assert len(lines) == 1203
    assert re.findall(r"localhost\[2\]: (\d+)%\n", one.notices())[-1] == "49"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_a_trainer_behind_a_shell(launch, tmp_path, number):
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} wait.py --save\nexit $?\n")
    script.chmod(0o755)
    one = launch("--num-gpus", "2", "--no-python", "--no-local-rank", "./run.sh")
    one.await_lines(2, "pid")
    one.send_signal(number)
    assert one.status() == 0, one.notices()
    assert len(one.await_lines(2, f"got {number.name}")) == len(one.await_lines(2, "saved")) == 2


@pytest.mark.slow
def test_a_signal_reaches_a_trainer_behind_torchrun(launch):
    """torchrun itself would die of SIGUSR1."""
    one = launch("--num-gpus", "2", "--launcher", "torchrun", "wait.py", "--save", PET_NNODES="7")
    one.await_lines(2, "pid", 60)
    assert "PET_NNODES would change a launch by torchrun and are left out" in one.notices()
    one.send_signal(signal.SIGUSR1)
    assert one.status() == 0, one.notices()
    assert len(one.await_lines(2, "saved")) == 2


def test_who_gets_a_signal():
    usr1 = 1 << (signal.SIGUSR1 - 1)
    shell, run, train, worker = 10, 11, 12, 13
    table = {
        shell: ProcessState(1, "S", 0),
        run: ProcessState(shell, "S", 0),
        train: ProcessState(run, "S", usr1),
        worker: ProcessState(train, "S", usr1),
        99: ProcessState(1, "S", usr1),
    }
    assert receivers(shell, signal.SIGUSR1, table) == [train]
    assert receivers(train, signal.SIGUSR1, table) == [train]
    assert receivers(shell, signal.SIGTERM, table) == [shell]
    assert receivers(shell, signal.SIGTERM, {}) == [shell]


def test_the_second_ctrl_c_kills_at_once(launch, tmp_path):
    (tmp_path / "deaf.py").write_text(
        "import os, signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\nprint('pid', "
        "os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    one = launch("--num-gpus", "2", "--grace", "40", "deaf.py")
    pids = [int(line.split()[-1]) for line in one.await_lines(2, "pid")]
    for _ in range(2):
        one.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert one.status(10) == 130
    assert not any(map(is_alive, pids))


def test_a_launch_whose_reader_has_gone_ends(tmp_path):
    command = f"{sys.executable} -m megazero.cli launch --num-gpus 2 --grace 1 talk.py 2>err"
    command += " | head -n 1; exit ${PIPESTATUS[0]}"
    (tmp_path / "talk.py").write_text(
        "import time\nfor i in range(600): print(i, flush=True); time.sleep(0.1)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    began = time.monotonic()
    assert os.spawnve(os.P_WAIT, "/bin/bash", ["bash", "-c", f"cd {tmp_path}; {command}"], environment) == 141
    assert time.monotonic() - began < 15


def test_logs_cores_and_the_pid_file(launch, tmp_path):
    (tmp_path / "facts.py").write_text(
        "import os, sys, time\nprint(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], "
        "flush=True)\n"
        "print('to error', file=sys.stderr)\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    )
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    around = ["--bind-core-list", f"{cores[0]},{cores[1]}", "--enable-each-rank-log", "logs", "--save-pid"]
    one = launch("--num-gpus", "2", *around, "--no-prefix", "facts.py", TMPDIR=str(tmp_path))
    assert sorted(one.await_lines(2)) == [f"[{core}] 1" for core in cores[:2]]
    pid_file = tmp_path / f"{one.pid}.deepspeed"
    until(pid_file.exists, 5)
    assert b"megazero.launch.agent" in Path(f"/proc/{pid_file.read_text()}/cmdline").read_bytes()
    (tmp_path / "go").touch()
    assert one.status() == 0
    assert not pid_file.exists()
    logs = sorted((tmp_path / "logs").iterdir())
    assert [re.sub(r"^\d{14}", "TIME", path.name) for path in logs] == ["TIME_rank0.log", "TIME_rank1.log"]
    assert logs[0].read_text() == f"[{cores[0]}] 1\nto error\n"


def test_a_program_that_is_not_there_is_named(launch):
    one = launch("--num-gpus", "1", "--no-python", "nowhere")
    assert one.status() == 127
    assert "No such file or directory: 'nowhere'" in one.notices()
    one = launch("--num-gpus", "2", "-q", "missing.py")
    assert one.status() == 2
    assert "can't open file" in one.notices()
    assert "meet at" not in one.notices()


def test_modules_and_variables_of_the_environment_file(launch, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/show.py").write_text(SHOW)
    (tmp_path / ".deepspeed_env").write_text("# ours\n\nexport GIVEN='a \"b\" $HOME'\n")
    one = launch("--num-gpus", "1", "--module", "package.show", "x")
    assert one.status() == 0, one.notices()
    assert r'"given": "a \"b\" $HOME"' in one.lines()[0]


@pytest.mark.slow
def test_a_script_for_deepspeed_runs_as_by_its_own_launcher(launch, tmp_path):
    (tmp_path / "train.py").write_text(
        "import argparse, os\nimport deepspeed\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int)\nparser = deepspeed.add_config_arguments(parser)\n"
        "args = parser.parse_args()\n"
        "print(args.local_rank == int(os.environ['LOCAL_RANK']), args.deepspeed, args.deepspeed_config, "
        "deepspeed.__file__)\n"
    )
    words = [
        "--num_gpus",
        "1",
        "--import-deepspeed",
        "megazero",
        "train.py",
        "--deepspeed",
        "--deepspeed_config",
    ]
    one = launch(*words, "f.json")
    assert one.status() == 0, one.notices()
    assert "True True f.json" in one.lines()[0]
    assert "megazero" in one.lines()[0]
