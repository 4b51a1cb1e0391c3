"""Nodes that others start: by hand, as the launchers in scripts/ do, or pdsh and mpirun over real ssh."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import time

import pytest

from megazero.errors import ConfigError, LaunchError
from megazero.launch import rendezvous, secret
from megazero.launch.channel import open_port_at, stream_channel
from megazero.launch.hosts import Host
from megazero.launch.job import Job, Script
from megazero.launch.rendezvous import in_runs
from tests.launch.cluster import WHY_NOT, Cluster, Launch, free_ports, has_sshd, is_alive, processes_of, until
from tests.launch.programs import SHOW, WAIT
from tests.tables import over_table


@pytest.fixture
def nodes(tmp_path):
    """A function that starts nodes by hand, and ends those that are left."""
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "wait.py").write_text(WAIT)
    (port,), started = free_ports(1), []

    def start(rank: int, count: int, *words: str) -> Launch:
        place = ["--no-ssh", "--num-nodes", str(count), "--node-rank", str(rank), "--num-gpus", "2"]
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port), "--grace", "0.3"]
        started.append(Launch([*place, *meeting, *words], tmp_path, {"HOME": str(tmp_path)}))
        return started[-1]

    yield start
    for launch in started:
        if launch.poll() is None:
            launch.kill()
            launch.wait()


@over_table(("numbers", "text"), [([], ""), ([3], "3"), ([1, 2, 3, 7], "1-3, 7"), ([9, 1, 2, 8], "1-2, 8-9")])
def test_runs_of_numbers(numbers, text):
    assert in_runs(numbers) == text


SECRET = b"only the nodes know"


class Lobby:
    """Node 0's wait for six nodes, and connections to it."""

    def __init__(self) -> None:
        self.job = Job("key", tuple(Host(f"node {rank}", (0,)) for rank in range(6)), Script(("x",), {}, "."))
        self.rendezvous = rendezvous.NodeRendezvous(self.job, SECRET, ("10.0.0.1", 1))
        self.door = open_port_at("127.0.0.1", 0)
        self.gathering = asyncio.create_task(self.rendezvous.gather(self.door))
        self.writers = []

    async def connect(self):
        reader, writer = await asyncio.open_connection(*self.door.getsockname()[:2])
        self.writers.append(writer)
        return reader, writer

    async def come(self, rank: int, secret: bytes = SECRET, **claims) -> asyncio.StreamWriter:
        reader, writer = await self.connect()
        facts = {"node": rank, "nodes": 6, "world": 6, "host": f"h{rank}", **claims}
        await rendezvous._introduce(stream_channel(reader, writer), secret, facts)
        return writer

    async def all_come(self) -> list[str]:
        for rank in range(6):
            if rank not in self.rendezvous._links:
                await self.come(rank)
        links = await asyncio.wait_for(self.gathering, 5)
        self.rendezvous.close()
        for writer in self.writers:
            writer.close()
        return [link.name for link in links]


EVERYBODY = [f"h{rank}" for rank in range(6)]


def test_node_0_names_the_nodes_that_have_not_come(monkeypatch, capsys):
    """A node that goes away before all have come is missing again."""
    monkeypatch.setattr(rendezvous, "_NEWS", 0.2)

    async def meet() -> list[str]:
        lobby = Lobby()
        await lobby.come(0)
        leaving = await lobby.come(4)
        await asyncio.sleep(0.3)
        leaving.close()
        await asyncio.sleep(0.2)
        return await lobby.all_come()

    assert asyncio.run(meet()) == EVERYBODY
    text = capsys.readouterr().err
    assert "node 0 waits at 10.0.0.1:1 for 4 of 6 nodes: 1-3, 5" in text
    assert "node 4 on h4 has gone; it may come again" in text
    assert "for 5 of 6 nodes: 1-5" in text


def test_a_stranger_neither_ends_a_launch_nor_takes_a_seat(monkeypatch, capsys, caplog):
    """One line from anyone ended it; `"node": -3` took a seat, and `{"kind":"hello"}` left a traceback."""
    monkeypatch.setattr(rendezvous, "_INTRODUCTION", 0.3)
    claims = {"node": 1, "nodes": 6, "world": 6, "host": "h\x1b[31m", "nonce": "n", "proof": "0" * 64}
    lines = [
        b"",
        b"\xff\x00\x1b]0;title\x07 GET / HTTP/1.1\n",
        b'{"kind":"hello"}\n',
        b'{"kind":"node"}\n',
        b"[" * 60_000 + b"\n",
        b"x" * 200_000,
        *(
            json.dumps({"kind": "node", **claims, **more}).encode() + b"\n"
            for more in ({}, {"host": "h"}, {"node": -3}, {"node": True}, {"host": 5}, {"proof": "\ud800"})
        ),
    ]

    async def meet() -> list[str]:
        lobby = Lobby()
        for line in lines:
            _, writer = await lobby.connect()
            writer.write(line)
        with pytest.raises(LaunchError, match="must know the secret of node 0, but has another one"):
            await lobby.come(2, secret=b"a secret of another launch")
        await asyncio.sleep(0.5)
        assert lobby.rendezvous._links == {}
        assert lobby.rendezvous._problem is None
        return await lobby.all_come()

    assert asyncio.run(meet()) == EVERYBODY
    text = capsys.readouterr().err
    assert "8 connections without the launch's secret left out, the last from 127.0.0.1" in text
    assert text.replace("\n", "").isprintable()
    assert caplog.text == ""


def test_a_node_does_not_obey_a_stranger_in_the_place_of_node_0():
    """It hears a challenge, answers, and is not shown the proof that only node 0 can give."""

    async def pretend(answer: dict) -> bool:
        async def serve(reader, writer):
            channel = stream_channel(reader, writer)
            await channel.send("challenge", nonce="n")
            proof = (await channel.receive())["proof"]
            await channel.send(**{"kind": "welcome", "proof": proof, **answer})

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        facts = {"node": 1, "nodes": 6, "world": 6, "host": "h1"}
        try:
            return await rendezvous._introduce(stream_channel(reader, writer), SECRET, facts)
        finally:
            writer.close()
            server.close()

    for answer in ({}, {"kind": "bye", "status": 0, "again": False}, {"kind": "start"}):
        assert not asyncio.run(pretend(answer))


def test_node_0_listens_at_the_masters_address_alone(capsys):
    """It listened on all of them."""
    door, here = rendezvous.open_listener(("127.0.0.2", 0))
    with door:
        assert (door.getsockname()[0], here) == ("127.0.0.2", "127.0.0.2")
    door, here = rendezvous.open_listener(("192.0.2.7", 0))  # a gateway's
    with door:
        assert here == "localhost"
    assert "192.0.2.7 is no address of this machine" in capsys.readouterr().err


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert secret.known_secret({}) is None
    made, is_new = secret.made_secret({})
    file = secret.secret_file()
    assert is_new
    assert len(made) == 64
    assert (file.stat().st_mode & 0o777, list(file.parent.iterdir())) == (0o600, [file])
    assert secret.made_secret({}) == (made, False)
    assert secret.known_secret({secret.SECRET: "another, of this launch"}) == b"another, of this launch"
    with pytest.raises(ConfigError, match="at least 16 characters"):
        secret.known_secret({secret.SECRET: "short"})
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="its owner alone"):
        secret.known_secret({})
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError, match="cannot be read"):
        secret.known_secret({})


@pytest.mark.slow
def test_the_missing_nodes_are_named_every_ten_seconds(nodes):
    others = [nodes(rank, 5, "show.py") for rank in (2,)]
    first = nodes(0, 5, "show.py")
    until(lambda: "waits at 127.0.0.1:" in first.notices(), 15, first.notices)
    assert "for 3 of 5 nodes: 1, 3-4" in first.notices()
    others += [nodes(rank, 5, "show.py") for rank in (1, 3, 4)]
    assert [launch.status() for launch in (first, *others)] == [0] * 5
    host = socket.gethostname()
    lines = [line for launch in (first, *others) for line in launch.lines()]
    seen = {line.split(": ")[0]: json.loads(line.partition(": ")[2]) for line in lines}
    assert sorted(seen) == sorted(f"{host}[{rank}]" for rank in range(10))
    assert all(own["WORLD_SIZE"] == "10" for own in seen.values())
    assert {own["MASTER_PORT"] for own in seen.values()} == {
        first.args[first.args.index("--master-port") + 1]
    }


def test_one_failed_rank_ends_all_nodes_with_its_status(nodes):
    launches = [nodes(rank, 3, "wait.py") for rank in range(3)]
    pids = [int(line.split()[-1]) for launch in launches for line in launch.await_lines(2, "pid")]
    os.kill(pids[2], signal.SIGKILL)
    assert [launch.status() for launch in launches] == [137] * 3
    assert "(node 1) ended by SIGKILL (status 137); all other ranks are ended" in launches[0].notices()
    until(lambda: not any(map(is_alive, pids)), 10)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_node_ends_the_others(nodes, victim):
    launches = [nodes(rank, 2, "wait.py") for rank in range(2)]
    pids = [int(line.split()[-1]) for launch in launches for line in launch.await_lines(2, "pid")]
    launches[victim].kill()
    assert launches[1 - victim].status(20) == 1
    assert "is lost" in launches[1 - victim].notices()
    until(lambda: not any(map(is_alive, pids)), 10)


@pytest.mark.parametrize("everybody", [False, True])
def test_signals_of_a_scheduler_reach_the_ranks_of_each_node(nodes, everybody):
    """SLURM without cgroups sends a signal to all processes; ranks died of the second as they ended."""
    launches = [nodes(rank, 2, "wait.py", "--save") for rank in range(2)]
    pids = [int(line.split()[-1]) for launch in launches for line in launch.await_lines(2, "pid")]
    for launch in launches:
        launch.send_signal(signal.SIGUSR1)
    for pid in pids if everybody else ():
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.01)
    for launch in launches:
        launch.send_signal(signal.SIGUSR1)  # slurmstepd sends one, and srun another
    assert [launch.status() for launch in launches] == [0, 0]
    assert all(len(launch.await_lines(2, "saved")) == 2 for launch in launches)
    assert all(len(launch.await_lines(2, "got SIGUSR1")) == 2 for launch in launches)


@pytest.mark.slow
def test_nodes_restart_together(nodes, tmp_path):
    (tmp_path / "once.py").write_text(
        "import os, sys, time\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', "
        "attempt)\n"
        "sys.stdout.flush()\n"
        "if attempt == '0': time.sleep(0.3 if os.environ['RANK'] == '3' else 60); sys.exit(7)\n"
    )
    launches = [nodes(rank, 2, "--max-restarts", "1", "once.py") for rank in range(2)]
    assert [launch.status() for launch in launches] == [0, 0], launches[0].notices()
    assert all(len(launch.await_lines(2, "attempt 1")) == 2 for launch in launches)


@pytest.mark.slow
def test_nodes_that_do_not_fit_together_are_refused(nodes):
    first, other = nodes(0, 3, "show.py"), nodes(1, 2, "show.py")
    assert (first.status(), other.status()) == (1, 1)
    for launch in (first, other):
        assert "node 1" in launch.notices()
        assert "was told of 2 nodes and 4 ranks, node 0 of 3 and 6" in launch.notices()
    launches = [nodes(rank, 3, "show.py") for rank in (0, 1, 1)]
    assert {launch.status() for launch in launches} == {1}
    assert "`--node-rank` must be another one on each node" in launches[0].notices()


def test_a_taken_port_is_refused(nodes):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        launch = nodes(0, 2, "--master-port", str(taken.getsockname()[1]), "show.py")
        assert launch.status() == 1
        assert (
            f"`--master-port` must be free on node 0, but {taken.getsockname()[1]} is taken"
            in launch.notices()
        )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["pdsh", "mpirun"])
def test_other_launchers_over_real_ssh(tmp_path, launcher):
    if not has_sshd() or shutil.which(launcher) is None:
        pytest.skip(f"{WHY_NOT}, and {launcher}")
    cluster = Cluster(tmp_path, 3)
    try:
        (tmp_path / "show.py").write_text(SHOW)
        (tmp_path / "wait.py").write_text(WAIT)
        variables = {"PDSH_SSH_ARGS_APPEND": f"-F {cluster.config}"}
        words = [
            "--launcher",
            launcher,
            "-H",
            cluster.hostfile([2, 1, 2]),
            "--master-addr",
            "127.0.0.1",
            "--grace",
            "1",
        ]
        if launcher == "mpirun":
            root = "--allow-run-as-root " if os.getuid() == 0 else ""
            words += ["--launcher-args", f"{root}--oversubscribe --mca plm_rsh_args '-F {cluster.config}'"]
        (port,) = free_ports(1)
        shown = cluster.begin([*words, "--master-port", str(port), "show.py", "a b", "%n $x"], **variables)
        assert shown.status() == 0, shown.notices()
        seen = [json.loads(line[line.index("{") :]) for line in shown.lines() if "{" in line]
        assert sorted(int(own["RANK"]) for own in seen) == [0, 1, 2, 3, 4]
        assert all(own["argv"][1:] == ["a b", "%n $x"] for own in seen)
        (port,) = free_ports(1)
        waits = cluster.begin([*words, "--master-port", str(port), "wait.py"], **variables)
        pids = [int(line.split()[-1]) for line in waits.await_lines(5, "pid ")]
        os.kill(pids[1], signal.SIGKILL)
        assert waits.status() == 137, waits.notices()
        until(lambda: not any(map(is_alive, pids)), 20)
        (port,) = free_ports(1)
        waits = cluster.begin([*words, "--master-port", str(port), "wait.py"], **variables)
        pids = [int(line.split()[-1]) for line in waits.await_lines(5, "pid ")]
        waits.send_signal(signal.SIGINT)
        assert waits.status() != 0
        until(lambda: not any(map(is_alive, pids)), 20)
        until(lambda: list(processes_of(str(port))) == [], 20)
    finally:
        cluster.close()
