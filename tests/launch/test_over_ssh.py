"""A launch over real ssh to several "hosts": sshd instances on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.launch.cluster import (
    WHY_NOT,
    Cluster,
    Launch,
    answers,
    freeze,
    has_sshd,
    is_alive,
    processes_of,
    until,
)
from tests.launch.programs import SHOW, WAIT, WITH_CHILD

pytestmark = pytest.mark.skipif(not has_sshd(), reason=WHY_NOT)
QUOTED = [
    "a b",
    "'single' \"double\"",
    "$HOME `date`",
    "two\nlines",
    "%n %h",
    "k=v",
    "",
    "--x=~ *",
    "ü\udcff",
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("hosts"), 3)
    for name, text in {"show.py": SHOW, "wait.py": WAIT, "child.py": WITH_CHILD}.items():
        (cluster.folder / name).write_text(text)
    yield cluster
    cluster.close()


def start(cluster: Cluster, *words: str, ranks: int = 6, **options: str) -> tuple[Launch, dict[int, int]]:
    """A launch of ranks that wait, and their processes by rank."""
    launch = cluster.launch("-H", cluster.hostfile(), "--grace", "0.3", *words, **options)
    lines = launch.await_lines(ranks, "pid")
    return launch, {int(line.split("[")[1].split("]")[0]): int(line.split()[2]) for line in lines}


def gone(pids, seconds: float = 20) -> None:
    until(lambda: not any(map(is_alive, pids)), seconds)


def key_of(pid: int) -> str:
    """The mark of a rank's launch, without its node."""
    marks = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(m for m in marks if m.startswith(b"MEGAZERO_LAUNCH=")).decode().split("=")[1].split("/")[0]


def test_words_and_variables_survive_ssh(cluster):
    value = "'x' \"y\" $HOME\n%n=1 \\"
    launch = cluster.launch("-H", cluster.hostfile([2, 1, 2]), "--env", f"GIVEN={value}", "show.py", *QUOTED)
    assert launch.status() == 0, launch.notices()
    ranks = {}
    for line in launch.lines():
        who, _, text = line.partition(": ")
        ranks[json.loads(text)["RANK"]] = (who, json.loads(text))
    assert [ranks[str(rank)][0] for rank in range(5)] == ["w-0[0]", "w-0[1]", "w-1[2]", "w-2[3]", "w-2[4]"]
    for _, seen in ranks.values():
        assert seen["argv"] == [f"--local_rank={seen['LOCAL_RANK']}", *QUOTED]
        assert (seen["given"], seen["cwd"], seen["WORLD_SIZE"]) == (value, str(cluster.folder), "5")
        assert (seen["CROSS_SIZE"], seen["MASTER_ADDR"]) == ("3", "127.0.0.1")
    assert [ranks[str(rank)][1]["LOCAL_RANK"] for rank in range(5)] == ["0", "1", "0", "0", "1"]
    assert [ranks[str(rank)][1]["devices"] for rank in range(5)] == ["0,1", "0,1", "0", "0,1", "0,1"]
    assert len({seen["MASTER_PORT"] for _, seen in ranks.values()}) == 1
    assert "are one machine" in launch.notices()


@pytest.mark.parametrize("victim", ["rank", "agent", "ssh"])
def test_what_is_killed_is_named_and_ends_all(cluster, victim):
    launch, pids = start(cluster, "wait.py")
    node = list(processes_of(f"{key_of(pids[2])}/1"))
    agent = next(
        pid for pid in node if command_of(pid).startswith(f"{sys.executable} -u -m megazero.launch.agent")
    )
    ssh = next(pid for pid in node if command_of(pid).startswith("ssh "))
    began = time.monotonic()
    os.kill({"rank": pids[2], "agent": agent, "ssh": ssh}[victim], signal.SIGKILL)
    name = "rank 2 on w-1" if victim == "rank" else "w-1"
    until(lambda: name in launch.notices().partition("meet at")[2], 10, launch.notices)
    assert launch.status() == 137
    assert "SIGKILL (status 137); all other ranks are ended" in launch.notices()
    gone([*pids.values(), agent, ssh])
    assert time.monotonic() < began + 20
    assert "[0]: got SIGTERM" in "\n".join(launch.lines())


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def test_a_killed_launcher_leaves_nothing_of_its_own_and_all_of_others(cluster):
    other, others = start(cluster, "--include", "w-0:0@w-1:0", "wait.py", ranks=2)
    launch, pids = start(cluster, "child.py")
    words = [line.split() for line in launch.await_lines(6, "pid")]
    launch.kill()
    gone([int(word) for line in words for word in line[2:4]])
    assert list(processes_of(key_of(others[0])))
    assert all(map(is_alive, others.values()))
    other.send_signal(signal.SIGINT)
    assert other.status() == 130
    gone([*others.values(), *pids.values()])


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)]
)
def test_ctrl_c_and_a_closed_terminal_leave_nothing_running(cluster, number, status):
    launch, pids = start(cluster, "child.py")
    key = key_of(pids[0])
    launch.send_signal(number)
    assert launch.status() == status
    gone(pids.values())
    assert list(processes_of(key)) == []


def test_ctrl_c_while_hosts_are_connected_to_leaves_nothing(cluster):
    launch = cluster.launch("-H", cluster.hostfile(), "wait.py")
    until(lambda: any(command_of(pid).startswith("ssh ") for pid in processes_of(str(cluster.config))), 10)
    launch.send_signal(signal.SIGINT)
    assert launch.status(10) == 130
    until(
        lambda: (
            not [p for p in processes_of("megazero.launch.agent") if str(cluster.folder) in command_of(p)]
        ),
        10,
    )


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_signals_reach_ranks_that_save_and_end_well(cluster, number):
    launch, _ = start(cluster, "wait.py", "--save")
    launch.send_signal(number)
    assert launch.status() == 0
    assert len(launch.await_lines(6, f"got {number.name}")) == len(launch.await_lines(6, "saved")) == 6


def test_a_frozen_host_is_named_given_up_and_swept(cluster):
    launch, pids = start(cluster, "--silence", "4", "wait.py")
    node = processes_of(f"{key_of(pids[2])}/1")
    agent = next(
        pid for pid in node if command_of(pid).startswith(f"{sys.executable} -u -m megazero.launch.agent")
    )
    frozen = [pids[2], pids[3], agent]
    began = time.monotonic()
    freeze(frozen)
    until(lambda: "w-1 has said nothing for" in launch.notices(), 10, launch.notices)
    assert launch.status() == 1
    gone([*pids.values(), *frozen])
    assert time.monotonic() < began + 20


@pytest.mark.slow
def test_a_frozen_rank_is_named_and_given_up(cluster):
    launch, pids = start(cluster, "--silence", "2", "wait.py")
    freeze([pids[4]])
    until(lambda: "w-2 has had stopped ranks (4) for" in launch.notices(), 10, launch.notices)
    assert launch.status() == 1
    gone(pids.values())


def test_all_hosts_that_do_not_answer_are_named_at_once_and_nothing_starts(cluster):
    cluster.stop("w-1")
    cluster.stop("w-2")
    try:
        launch = cluster.launch("-H", cluster.hostfile(), "show.py")
        assert launch.status() == 1
        text = launch.notices()
        assert "every host must answer, but 2 do not:" in text
        assert all(f"{name}: ssh: connect to host 127.0.0.1" in text for name in ("w-1", "w-2"))
        assert launch.lines() == []
    finally:
        cluster.start("w-1")
        cluster.start("w-2")


def test_a_restart_keeps_hosts_and_ranks(cluster):
    (cluster.folder / "once.py").write_text(
        "import os, sys, time\n"
        "attempt, rank = os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['RANK']\n"
        "print('attempt', attempt, flush=True)\n"
        "if attempt == '0': time.sleep(0.3 if rank == '3' else 60); sys.exit(7)\n"
    )
    launch = cluster.launch("-H", cluster.hostfile(), "--grace", "0.3", "--max-restarts", "1", "once.py")
    assert launch.status() == 0, launch.notices()
    assert "rank 3 on w-1 ended with status 7" in launch.notices()
    places = [sorted(line.split(":")[0] for line in launch.lines() if f"attempt {n}" in line) for n in (0, 1)]
    assert places[0] == places[1] == ["w-0[0]", "w-0[1]", "w-1[2]", "w-1[3]", "w-2[4]", "w-2[5]"]


@pytest.mark.slow
def test_a_lost_host_is_left_out_of_an_elastic_restart_and_the_change_is_said(cluster):
    script = "import os, sys; print('world', os.environ['WORLD_SIZE']); sys.stdout.flush()\n"
    script += "import time; time.sleep(60 if os.environ['WORLD_SIZE'] == '6' else 0)\n"
    (cluster.folder / "elastic.py").write_text(script)
    words = ["--elastic-training", "--min-elastic-nodes", "2", "--rejoin", "1", "--grace", "1", "elastic.py"]
    launch = cluster.launch("-H", cluster.hostfile(), *words)
    launch.await_lines(6, "world 6")
    cluster.stop("w-1")
    try:
        for pid in processes_of(str(cluster.config)):
            if command_of(pid).startswith("ssh ") and " w-1 " in command_of(pid):
                os.kill(pid, signal.SIGKILL)
        assert launch.status() == 0, launch.notices()
        assert len(launch.await_lines(4, "world 4")) == 4
        assert "w-1 does not answer and is left out" in launch.notices()
        assert "4 ranks are left of 6: w-0 has ranks 0-1, w-2 has ranks 2-3" in launch.notices()
    finally:
        cluster.start("w-1")


@pytest.mark.slow
def test_two_launches_at_once_do_not_share_a_port_and_a_taken_one_is_refused(cluster):
    first, pids = start(cluster, "wait.py")
    second, others = start(cluster, "wait.py")
    ports = [launch.notices().split("meet at ")[1].split()[0] for launch in (first, second)]
    assert ports[0] != ports[1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        third = cluster.launch(
            "-H", cluster.hostfile(), "--master-port", str(taken.getsockname()[1]), "wait.py"
        )
        assert third.status() == 1
        assert f"w-0: port {taken.getsockname()[1]} must be free, but is taken" in third.notices()
    for launch in (first, second):
        launch.send_signal(signal.SIGINT)
        assert launch.status() == 130
    gone([*pids.values(), *others.values()])


@pytest.mark.slow
def test_an_address_that_not_all_reach_is_refused(cluster):
    launch = cluster.launch("-H", cluster.hostfile(), "--master-addr", "192.0.2.1", "show.py")
    assert launch.status() == 1
    assert "every host must reach w-0, but w-1, w-2 do not (tried 192.0.2.1:" in launch.notices()


@pytest.mark.slow
def test_a_host_without_the_package_says_so(cluster):
    launch = cluster.launch("-H", cluster.hostfile(), "--python", "/nowhere/python", "show.py")
    assert launch.status() == 1
    assert launch.notices().count("/nowhere/python") >= 3
    assert answers(cluster.ports["w-0"])


@pytest.mark.slow
def test_many_hosts_are_connected_to_a_few_at_a_time(cluster):
    """An sshd that takes two new connections at once stands for a gateway before twelve hosts."""
    cluster.stop("w-0")
    cluster.start("w-0", "MaxStartups 2:100:2\n")
    names = [f"v-{number}" for number in range(12)]
    text = cluster.config.read_text()
    config = cluster.folder / "many_config"
    config.write_text("".join(f"Host {name}\n  Port {cluster.ports['w-0']}\n" for name in names) + text)
    (cluster.folder / "many").write_text("".join(f"{name} slots=1\n" for name in names))
    try:
        words = ["-H", "many", "--launcher-args", f"-F {config}", "--fan-out", "2", "show.py"]
        launch = cluster.begin(words)
        assert launch.status() == 0, launch.notices()
        assert sorted(line.split("[")[0] for line in launch.lines()) == sorted(names)
    finally:
        cluster.stop("w-0")
        cluster.start("w-0")
