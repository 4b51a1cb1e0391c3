"""A launch as a value: which process runs where, with which command and variables; nothing is executed."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

from megazero.errors import LaunchError
from megazero.launch.hosts import Host

MARK = "MEGAZERO_LAUNCH"
"""The environment variable with the launch and node of a process."""


@dataclass(frozen=True)
class Timeouts:
    """The timeouts of a launch, in seconds.

    Attributes:
        grace: until ranks are killed that do not end after a failure, Ctrl-C or a hang-up.
        save_grace: the same after SIGTERM, for ranks that save first.
        silence: until a silent host or a stopped rank counts as lost; 0 for never.
        rejoin: for lost hosts to come back before a restart.
        connect: for a host to answer.
    """

    grace: float = 10.0
    save_grace: float = 300.0
    silence: float = 15.0
    rejoin: float = 60.0
    connect: float = 20.0


@dataclass(frozen=True)
class Script:
    """The command of every rank.

    Attributes:
        words: the command; None marks the place of words that differ between ranks, or between hosts.
        environment: variables that are sent to the hosts. folder: the working folder. rendezvous: "static" or
        "c10d" if the command is torchrun, which starts all ranks of a host; None if it
            starts one rank.
    """

    words: tuple[str | None, ...]
    environment: Mapping[str, str]
    folder: str
    rendezvous: str | None = None

    def filled(self, words: Sequence[str]) -> tuple[str, ...]:
        """The command with `words` in the place of None."""
        return tuple(word for part in self.words for word in (words if part is None else (part,)))


@dataclass(frozen=True)
class HostOptions:
    """Options that each host's agent applies.

    Attributes:
        logs: a folder on each host for log files, one for each rank.
        stamp: the prefix of the names of log files.
        bind: whether each rank is bound to cores of its own.
        cores: the cores to divide among the ranks; None for all.
        pid_file: a file on each host with the agent's process id while it runs.
    """

    logs: str | None = None
    stamp: str = ""
    bind: bool = False
    cores: tuple[int, ...] | None = None
    pid_file: str | None = None


@dataclass(frozen=True)
class Process:
    """A process for a host to start: a rank, or torchrun for all ranks of the host.

    Attributes:
        label: the rank's number, or "torchrun".
        local: its number among the host's processes.
    """

    label: str
    local: int
    words: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Job:
    """A launch.

    Attributes:
        key: a word that is unique to the launch.
        hosts: in the order of their ranks.
        restarts: how often the ranks are started again after a failure.
        least_hosts: the number of hosts that suffice for a restart; None for all.
    """

    key: str
    hosts: tuple[Host, ...]
    script: Script
    timeouts: Timeouts = field(default_factory=Timeouts)
    options: HostOptions = field(default_factory=HostOptions)
    restarts: int = 0
    least_hosts: int | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts."""
        return sum(len(host.slots) for host in self.hosts)

    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each host; ranks follow the order of hosts, and of slots within a host."""
        return tuple(accumulate((len(host.slots) for host in self.hosts[:-1]), initial=0))

    def mark(self, node: int) -> str:
        """The value of MARK in every process of a node."""
        return f"{self.key}/{node}"


def processes_of(job: Job, node: int, master: tuple[str, int], attempt: int = 0) -> tuple[Process, ...]:
    """The processes of a node.

    Args:
        job: the launch.
        node: the number of the host.
        master: the address and port of the ranks' rendezvous.
        attempt: the number of earlier restarts.
    """
    if job.script.rendezvous is not None:
        return (_torchrun(job, node, master),)
    host, start = job.hosts[node], job.first_ranks()[node]
    world = {
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_SIZE": str(len(host.slots)),
        "LOCAL_WORLD_SIZE": str(len(host.slots)),
        "GROUP_RANK": str(node),
        "CROSS_RANK": str(node),
        "CROSS_SIZE": str(len(job.hosts)),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        MARK: job.mark(node),
    }
    return tuple(
        Process(
            str(start + local),
            local,
            job.script.filled([f"--local_rank={local}"]),
            {**job.script.environment, **world, "RANK": str(start + local), "LOCAL_RANK": str(local)},
        )
        for local in range(len(host.slots))
    )


def _torchrun(job: Job, node: int, master: tuple[str, int]) -> Process:
    size, nodes = str(len(job.hosts[node].slots)), str(len(job.hosts))
    if job.script.rendezvous == "static":
        place = ["--nnodes", nodes, "--node-rank", str(node)]
        place += ["--master-addr", master[0], "--master-port", str(master[1])]
    else:
        least = nodes if job.least_hosts is None else f"{job.least_hosts}:{nodes}"
        place = ["--nnodes", least, "--rdzv-backend", "c10d", "--rdzv-id", job.key]
        place += ["--rdzv-endpoint", f"{bracketed(master[0])}:{master[1]}"]
    words = job.script.filled(["--nproc-per-node", size, *place])
    return Process("torchrun", 0, words, {**job.script.environment, MARK: job.mark(node)})


def bracketed(address: str) -> str:
    """An address in the form that precedes ``:port``: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def share_cores(cores: Sequence[int], ranks: int, local: int) -> tuple[int, ...]:
    """The cores of a rank: every rank of a host gets the same number of neighbouring cores.

    Raises LaunchError if there are fewer cores than ranks.
    """
    size = len(cores) // ranks
    if size == 0:
        raise LaunchError(
            f"`--bind-cores-to-rank` must have a core for each of {ranks} ranks, but has {len(cores)}"
        )
    return tuple(cores[local * size : (local + 1) * size])


def pack(job: Job) -> str:
    """Encode a job as one word for a command line.

    Names of hosts are left out and equal hosts are counted, so 1,000 equal hosts take as much room as two.
    """
    runs = [(slots, sum(1 for _ in group)) for slots, group in groupby(host.slots for host in job.hosts)]
    data = {**asdict(job), "hosts": runs}
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(data).encode())).decode()


def unpack(word: str) -> Job:
    """Decode a word of `pack`; the hosts have the names "node 0", "node 1", ..."""
    data: dict[str, Any] = json.loads(zlib.decompress(base64.urlsafe_b64decode(word)))
    slots = [tuple(slots) for slots, count in data["hosts"] for _ in range(count)]
    script, options = data["script"], data["options"]
    return Job(
        **{
            **data,
            "hosts": tuple(Host(f"node {node}", own) for node, own in enumerate(slots)),
            "script": Script(**{**script, "words": tuple(script["words"])}),
            "timeouts": Timeouts(**data["timeouts"]),
            "options": HostOptions(**{**options, "cores": options["cores"] and tuple(options["cores"])}),
        }
    )


def with_hosts(job: Job, names: Sequence[str]) -> Job:
    """The job on the hosts with these names."""
    return replace(job, hosts=tuple(host for host in job.hosts if host.name in names))
