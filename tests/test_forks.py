"""What a forked command line says and does is what a fresh interpreter's would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.forks import ROOT, Command, run, run_ranks

PROGRAM = """
import atexit, os, sys
atexit.register(print, "at its end")
print(sys.argv, os.getcwd(), os.environ.get("COLOUR"), __name__)
print("to the side", file=sys.stderr)
if "raise" in sys.argv:
    raise ValueError("of the program")
sys.exit(3)
"""


@pytest.mark.parametrize("flag", ["exit", "raise"])
@pytest.mark.parametrize("way", ["script", "module", "code"])
def test_it_is_what_an_interpreter_does(tmp_path, way, flag):
    (tmp_path / "forked_program.py").write_text(PROGRAM)
    words = {
        "script": [str(tmp_path / "forked_program.py")],
        "module": ["-m", "forked_program"],
        "code": ["-c", PROGRAM],
    }[way]
    environment = {"COLOUR": "blue", "PYTHONPATH": f"{tmp_path}"}
    fresh = subprocess.run(
        [sys.executable, *words, flag],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    forked = run(*words, flag, environment=environment)
    assert forked.returncode == fresh.returncode == (1 if flag == "raise" else 3)
    assert forked.stdout == fresh.stdout
    assert forked.stderr.splitlines()[0] == fresh.stderr.splitlines()[0] == "to the side"
    assert forked.stderr.splitlines()[-1] == fresh.stderr.splitlines()[-1]


def test_ranks_know_their_places():
    code = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')))"
    assert [rank.stdout for rank in run_ranks(["-c", code], ["-c", code])] == [
        "0 0 2 127.0.0.1\n",
        "1 1 2 127.0.0.1\n",
    ]


def test_a_signal_and_the_end_of_patience_kill_it():
    sleeper = Command(["-c", "import time; print('begun', flush=True); time.sleep(100)"])
    assert not sleeper.ended
    os.kill(sleeper.pid, signal.SIGTERM)
    assert sleeper.result().returncode == -signal.SIGTERM
    began = time.monotonic()
    assert Command(["-c", "import time; time.sleep(100)"]).result(0.1).returncode == -signal.SIGKILL
    assert time.monotonic() - began < 60
