"""`megazero env` on several hosts: all are asked; what differs is named, and who does not answer."""

from __future__ import annotations

import copy
import json
import shlex
import sys
import time
from pathlib import Path

import pytest

from megazero.commands import env as command
from megazero.env.hosts import (
    COMPARED,
    Hosts,
    differences,
    gather_hosts,
    hosts_report,
    hosts_status,
    remote_command,
)
from megazero.env.report import document
from megazero.errors import ConfigError
from tests.env.test_env import SOUND
from tests.tables import over_table

SSH = f"{sys.executable} {Path(__file__).with_name('fake_ssh.py')}"
DOCUMENT = json.loads(json.dumps(document(SOUND)))


def changed(*path: str, value: object) -> dict:
    result = copy.deepcopy(DOCUMENT)
    place = result
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return result


def test_hosts_that_are_alike_differ_in_nothing() -> None:
    assert differences({"a": DOCUMENT, "b": DOCUMENT}) == ()


GPU = {"index": 0, "values": {"driver_version": "570.1", "clocks.max.sm": "1980", "power.limit": "700.00"}}
PORT = {"name": "mlx5_0 port 1", "state": "ACTIVE", "rate": 400.0, "layer": "InfiniBand"}
CHANGES = {
    "megazero": changed("versions", "megazero", value="0.2.0"),
    "megazero's sources": changed("node", "code", value="c0ffee"),
    "Python": changed("versions", "python", value="3.10.1"),
    "torch": changed("versions", "torch", value="2.12.0"),
    "torch's CUDA": changed("versions", "cuda", value="12.8"),
    "NCCL": changed("versions", "nccl", value="2.20"),
    "modules not built": changed("modules", value=[{"name": "megazero.ops._native", "trouble": "x"}]),
    "GPUs": changed("gpus", value=DOCUMENT["gpus"][:4]),
    "driver": changed("node", "gpus", value=[{**GPU, "values": {"driver_version": "570.1"}}]),
    "GPU clocks (MHz)": changed("node", "gpus", value=[{**GPU, "values": {"clocks.max.sm": "1755"}}]),
    "GPU power (W)": changed("node", "gpus", value=[{**GPU, "values": {"power.limit": "500.00"}}]),
    "active RDMA ports": changed("node", "ports", value=[PORT, PORT]),
    "kernel": changed("node", "kernel", "release", value="5.15"),
    "governor": changed("node", "kernel", "governors", value=["powersave"]),
    "usable cores": changed("processors", "usable", value=8),
    "variables of NCCL": changed("variables", value={"NCCL_DEBUG": "INFO"}),
}


@over_table("name", [row.name for row in COMPARED])
def test_each_fact_that_differs_is_named_alone(name: str) -> None:
    (trouble,) = differences({"a": DOCUMENT, "b": DOCUMENT, "odd": CHANGES[name]})
    assert trouble.message.startswith(f"{name} must be the same on all hosts, but is ")
    assert " on a, b, and " in trouble.message
    assert trouble.message.endswith(" on odd")
    assert trouble.remedy


def test_the_sentences() -> None:
    documents = {f"n{number}": DOCUMENT for number in range(6)} | {
        "odd": CHANGES["torch"],
        "pair": CHANGES["GPUs"],
    }
    assert [str(trouble) for trouble in differences(documents)] == [
        "torch must be the same on all hosts, but is 2.11.0 on n0, n1, n2 and 4 more, and "
        "2.12.0 on odd; install the "
        "same one on all hosts [differs_torch]",
        "GPUs must be the same on all hosts, but is 8 x H100 on n0, n1, n2 and 4 more, and 4 x "
        "H100 on pair; use hosts "
        "of one kind: all ranks wait for the slowest [differs_gpus]",
    ]
    assert [trouble.stops for trouble in differences(documents)] == [True, False]
    assert CHANGES["active RDMA ports"]["node"]["ports"][0]["rate"] == 400.0


def test_the_report_has_a_row_for_each_host_and_says_a_shared_problem_once() -> None:
    problem = {"name": "x", "message": "this must be so", "remedy": "do it", "stops": False}
    ill = {**DOCUMENT, "problems": [problem]}
    hosts = Hosts({"a": ill, "bb": ill, "c": CHANGES["torch"]}, {"gone": "status 255: No route to host"})
    lines = hosts_report(hosts).splitlines()
    assert lines[1].split() == ["host", "megazero", "torch", "NCCL", "driver", "GPUs", "kernel"]
    assert [line.split()[0] for line in lines[2:6]] == ["a", "bb", "c", "gone"]
    assert lines[2].split()[:4] == ["a", "0.1.0", "2.11.0", "2.28"]
    assert lines[5] == "  gone  unreachable: status 255: No route to host"
    assert lines[7] == "differences: 1"
    assert lines[-2:] == ["problems: 2", "  a, bb: this must be so; do it [x]"]
    assert hosts_status(hosts) == (True, True)
    assert hosts_status(Hosts({"a": ill}, {})) == (True, False)
    assert hosts_status(Hosts({"a": DOCUMENT}, {})) == (False, False)


def test_a_host_twice_is_refused(capsys) -> None:
    assert command.main(["--hosts", "a,b,a", "--ssh", SSH]) == ConfigError.exit_code
    assert "`--hosts` must name each host once, but has a again" in capsys.readouterr().err


def test_a_hostfile_says_how_many_ranks_a_host_has(tmp_path, monkeypatch) -> None:
    asked: dict = {}

    def noted(ranks, ssh):
        asked.update(ranks)
        return Hosts({"w-0": DOCUMENT}, {})

    monkeypatch.setattr(command, "gather_hosts", noted)
    path = tmp_path / "hostfile"
    path.write_text("w-0 slots=8\nw-1 slots=4 # new\n")
    assert command.main(["--hostfile", str(path)]) == 0
    assert asked == {"w-0": 8, "w-1": 4}
    assert command.main(["--hosts", "c"]) == 0
    assert asked["c"] is None
    path.write_text("w-0\n")
    assert command.main(["--hostfile", str(path)]) == ConfigError.exit_code


@pytest.mark.parametrize("flags", [["--json"], []])
def test_all_hosts_are_asked_and_those_that_do_not_answer_are_named(
    tmp_path, monkeypatch, capsys, flags
) -> None:
    (tmp_path / "one").write_text(json.dumps(DOCUMENT))
    (tmp_path / "odd").write_text(json.dumps(CHANGES["NCCL"]))
    monkeypatch.setenv("CANNED", str(tmp_path))
    status = command.main(["--hosts", "one,odd,gone,lost", "--ssh", SSH, *flags])
    said = capsys.readouterr().out
    assert status == 1
    gone = "status 1: ssh: connect to host {} port 22: No route to host"
    if flags:
        report = json.loads(said)
        assert report["hosts"] == {"one": DOCUMENT, "odd": CHANGES["NCCL"]}
        assert report["unreachable"] == {name: gone.format(name) for name in ("gone", "lost")}
        assert [trouble["name"] for trouble in report["differences"]] == ["differs_nccl"]
    else:
        assert (
            f"  gone  unreachable: {gone.format('gone')}\n  lost  unreachable: {gone.format('lost')}\n"
            in said
        )


def test_what_a_host_leaves_behind_or_says_besides_does_no_harm(tmp_path) -> None:
    """What ssh leaves (ControlPersist) held the output for minutes; `{"versions": 5}` was a traceback."""
    (tmp_path / "report").write_text(json.dumps(DOCUMENT))
    began = time.monotonic()
    hosts = gather_hosts({"a": None}, f"sh -c 'sleep 20 & cat {tmp_path}/report'")
    assert hosts.documents == {"a": DOCUMENT}
    assert time.monotonic() - began < 15
    odd = 'echo \'{"versions": 5, "problems": 7}\'; printf "\\033[31mred\\n" >&2; exit 3'
    hosts = gather_hosts({"a": None}, shlex.join(["sh", "-c", odd]))
    assert hosts.unreachable == {"a": "status 3: \\x1b[31mred"}


@pytest.mark.slow
def test_hosts_are_really_asked(capsys) -> None:
    """The command for a host runs, in processes of their own; one has another variable."""
    status = command.main(["--hosts", "real,odd", "--ssh", SSH, "--json", "--nproc", "1"])
    report = json.loads(capsys.readouterr().out)
    assert list(report["hosts"]) == ["real", "odd"]
    assert [trouble["name"] for trouble in report["differences"]] == ["differs_variables_of_nccl"]
    assert report["hosts"]["real"]["node"]["code"] == report["hosts"]["odd"]["node"]["code"]
    assert "variable_nccl_debug" in [problem["name"] for problem in report["hosts"]["odd"]["problems"]]
    assert status == 1


def test_a_command_that_is_not_there_is_named() -> None:
    hosts = gather_hosts({"a": None}, "/nowhere/ssh")
    assert hosts.unreachable == {"a": "`/nowhere/ssh` cannot be run: No such file or directory"}


def test_what_runs_there_is_what_runs_here() -> None:
    words = remote_command(["--nproc", "8"])
    assert words.endswith("-m megazero.cli env --json --nproc 8")
    assert sys.executable in words
