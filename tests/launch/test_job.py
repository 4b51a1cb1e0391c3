"""A launch as a value: who has which rank, with which variables, and on how long a command line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.errors import LaunchError
from megazero.launch.commands import Reach, agent_command, mpirun_command, pdsh_command, srun_command
from megazero.launch.hosts import Host
from megazero.launch.job import HostOptions, Job, Script, pack, processes_of, share_cores, unpack, with_hosts

SCRIPT = Script(("python", "-u", "train.py", None, "--lr", "1"), {"NCCL_DEBUG": "INFO"}, "/data/run 1")
REACH = Reach("/opt/python", "/data/run 1")
MASTER = ("w-0", 29500)


def job(*sizes: int, script: Script = SCRIPT) -> Job:
    hosts = tuple(Host(f"w-{node}", tuple(range(size))) for node, size in enumerate(sizes))
    return Job("key", hosts, script)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_ranks_are_hosts_and_slots_in_order_whatever_their_number(sizes):
    launch = job(*sizes)
    variables = [
        (node, process.environment)
        for node in range(len(sizes))
        for process in processes_of(launch, node, MASTER)
    ]
    assert [int(own["RANK"]) for _, own in variables] == list(range(sum(sizes)))
    places = [(node, int(own["LOCAL_RANK"])) for node, own in variables]
    assert places == [(node, slot) for node, size in enumerate(sizes) for slot in range(size)]
    assert all(int(own["LOCAL_RANK"]) < int(own["LOCAL_SIZE"]) == sizes[node] for node, own in variables)


def test_the_variables_and_words_of_a_rank():
    launch = replace(job(2, 1), hosts=(Host("w-0", (1, 3)), Host("w-1", (0,))))
    second = processes_of(launch, 0, ("10.0.0.1", 1234), attempt=2)[1]
    assert second.words == ("python", "-u", "train.py", "--local_rank=1", "--lr", "1")
    assert dict(second.environment) == {
        "NCCL_DEBUG": "INFO",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "WORLD_SIZE": "3",
        "LOCAL_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "CROSS_RANK": "0",
        "CROSS_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "MEGAZERO_LAUNCH": "key/0",
        "RANK": "1",
        "LOCAL_RANK": "1",
    }


@pytest.mark.parametrize(
    ("rendezvous", "least", "words"),
    [
        ("static", None, "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr fe80::1 --master-port 5"),
        (
            "c10d",
            1,
            "--nproc-per-node 4 --nnodes 1:2 --rdzv-backend c10d --rdzv-id key --rdzv-endpoint [fe80::1]:5",
        ),
    ],
)
def test_torchrun_starts_the_ranks_of_a_host(rendezvous, least, words):
    torchrun = replace(SCRIPT, words=("torchrun", None, "train.py"), rendezvous=rendezvous)
    (process,) = processes_of(replace(job(2, 4, script=torchrun), least_hosts=least), 1, ("fe80::1", 5))
    assert process.words == ("torchrun", *words.split(), "train.py")
    assert "RANK" not in process.environment


def test_a_job_survives_its_command_line_and_is_as_long_for_a_thousand_hosts():
    launch = replace(job(2, 1, 4), options=HostOptions(cores=(0, 1, 5), bind=True), restarts=3)
    again = unpack(pack(launch))
    assert again.hosts == tuple(replace(h, name=f"node {n}") for n, h in enumerate(launch.hosts))
    assert replace(again, hosts=launch.hosts) == launch
    assert abs(len(pack(job(*[8] * 1000))) - len(pack(job(*[8] * 10)))) <= 8


def test_the_agents_command_is_as_long_for_many_ranks_as_for_one():
    lengths = {len(agent_command(REACH, job(*[8] * size), 1)[-1]) for size in (2, 1000)}
    assert len(lengths) == 1


def test_commands_keep_folders_with_spaces_whole():
    words = agent_command(replace(REACH, setup="env/bin/activate", words=("-F", "config")), job(1, 1), 1)
    assert words[:3] == ("ssh", "-F", "config")
    assert words[-2] == "w-1"
    assert words[-1] == (
        "sh -c '. env/bin/activate && cd '\"'\"'/data/run 1'\"'\"' && env MEGAZERO_LAUNCH=key/1 /opt/python "
        "-u -m "
        "megazero.launch.agent; exit $?'"
    )


def test_this_machine_needs_no_ssh_unless_it_is_asked_for():
    local = replace(job(1), hosts=(Host("localhost", (0,)),))
    assert agent_command(REACH, local, 0)[0] == "sh"
    assert agent_command(replace(REACH, always=True), local, 0)[0] == "ssh"


def test_other_launchers_start_a_node_that_knows_its_number():
    launch = job(2, 2)
    pdsh = pdsh_command(REACH, launch, MASTER, "secret", prefix=True)
    assert "MEGAZERO_LAUNCH_SECRET=secret" in pdsh[-1]
    assert pdsh[pdsh.index("-w") + 1] == "w-0,w-1"
    assert f"{pack(launch)} --node-rank %n --master-addr w-0 --master-port 29500" in pdsh[-1]
    srun = srun_command(REACH, launch, MASTER, prefix=False)
    assert srun[-8:] == (
        pack(launch),
        *("--node-rank", "SLURM_NODEID", "--master-addr", "w-0", "--master-port", "29500", "--no-prefix"),
    )
    assert {"--kill-on-bad-exit=1", "w-0,w-1"} < set(srun)
    mpirun = mpirun_command(REACH, launch, MASTER, prefix=True)
    assert mpirun[:5] == ("mpirun", "-np", "2", "--host", "w-0:1,w-1:1")
    assert "OMPI_COMM_WORLD_RANK" in mpirun
    assert mpirun[mpirun.index("MEGAZERO_LAUNCH_SECRET") - 1] == "-x"  # by its name alone


def test_cores_are_shared_out():
    assert [share_cores(range(8), 3, local) for local in range(3)] == [(0, 1), (2, 3), (4, 5)]
    with pytest.raises(LaunchError, match="a core for each of 4 ranks, but has 3"):
        share_cores(range(3), 4, 0)


def test_a_job_on_fewer_hosts_has_other_ranks():
    fewer = with_hosts(job(2, 1, 2), ["w-0", "w-2"])
    assert fewer.first_ranks() == (0, 2)
    assert fewer.world_size == 4
