"""What a user reads is printable, whatever the files hold that messages quote."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from megazero.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HostConfigError,
    MegazeroError,
    exit_status,
    printable,
)
from tests.tables import over_table

QUOTED = "a\x1b[31mb\u202ec\x00d\ud800e\x85f\u2028g é猫👩"
SHOWN = "a\\x1b[31mb\\u202ec\\x00d\\ud800e\\x85f\\u2028g é猫👩"


def test_what_a_terminal_would_obey_or_hide_is_escaped():
    assert printable(QUOTED) == SHOWN
    assert printable("two\nlines\r") == "two\nlines\\r"
    assert printable("two\nlines", kept="") == "two\\nlines"
    assert printable("back\\slash 'quotes' \"too\"") == "back\\slash 'quotes' \"too\""


@over_table("kind", [MegazeroError, DataError, CheckpointError, ConfigError])
def test_every_error_says_so_once(kind):
    error = kind(f"`x` must be plain, but is {QUOTED}\n  and more")
    assert str(error) == f"`x` must be plain, but is {SHOWN}\n  and more"
    assert str(error).encode().decode() == str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, str(error))


def test_a_reader_that_has_gone_is_no_fault():
    """And no traceback; but a pipe that breaks elsewhere is told of."""
    script = "import sys; from megazero.errors import exit_status\nsys.exit(exit_status(lambda: {}))"
    talk = "[print('x' * 9999) for _ in range(99)]"
    command = [sys.executable, "-c", script.format(talk)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(3) == "xxx"
        process.stdout.close()
        assert (process.wait(timeout=60), process.stderr.read()) == (141, "")

    def elsewhere() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        exit_status(elsewhere)


def test_a_violation_is_one_line_so_that_a_value_cannot_pretend_to_be_another():
    error = ConfigError(["`a` must be x, but is y\n`b` must be z.", f"`c` is {QUOTED}."])
    assert error.violations == ["`a` must be x, but is y\\n`b` must be z.", f"`c` is {SHOWN}."]
    assert str(error).count("\n") == 1


def test_what_a_host_lacks_is_said_once_for_all_its_ranks(monkeypatch, capsys):
    """NCCL on a CPU was refused by every rank."""

    def lacks() -> None:
        raise HostConfigError("no NCCL")

    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert exit_status(lacks) == 2
    assert capsys.readouterr().err == "error: no NCCL\n"
