"""The commands that reach the hosts of a launch: ssh, pdsh, srun or mpirun."""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass

from megazero.launch.hosts import LOCAL_NAMES, Host
from megazero.launch.job import MARK, Job, pack
from megazero.launch.secret import SECRET

AGENT = "megazero.launch.agent"
SWEEPER = "megazero.launch.processes"
NODE = "megazero.launch.node"
# With ssh's limit of three unanswered keepalives, a lost host is noticed after 15 s.
_SSH = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")


@dataclass(frozen=True)
class Reach:
    """How hosts are reached, and how a Python module is run there.

    Attributes:
        python: the path of Python on the hosts.
        folder: the working folder.
        setup: a script to source first.
        path: PYTHONPATH of the modules that the launch itself runs.
        words: the user's arguments for ssh, pdsh, srun or mpirun.
        always: whether this machine, too, is reached over ssh.
    """

    python: str
    folder: str
    setup: str | None = None
    path: str | None = None
    words: tuple[str, ...] = ()
    always: bool = False

    def is_here(self, host: Host) -> bool:
        """Whether a host is this machine, so that no connection is needed."""
        return not self.always and host.name.lower() in LOCAL_NAMES | {socket.gethostname().lower()}

    def module(self, module: str, *arguments: str, **variables: str) -> str:
        """The shell command that runs a module on a host, with some environment variables.

        The shell does not exec the module, so that a module ended by signal n is reported as status 128 + n.
        """
        variables |= {"PYTHONPATH": self.path} if self.path else {}
        set_them = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
        run = shlex.join([*set_them, self.python, "-u", "-m", module, *arguments])
        source = f". {shlex.quote(self.setup)} && " if self.setup else ""
        return shlex.join(["sh", "-c", f"{source}cd {shlex.quote(self.folder)} && {run}; exit $?"])

    def over_ssh(self, host: Host, command: str) -> tuple[str, ...]:
        """The command that runs a shell command on a host; without ssh on this machine."""
        if self.is_here(host):
            return tuple(shlex.split(command))
        return ("ssh", *self.words, *_SSH, host.name, command)


def agent_command(reach: Reach, job: Job, node: int) -> tuple[str, ...]:
    """The command that starts the agent of a node. Its length does not depend on the number of ranks."""
    return reach.over_ssh(job.hosts[node], reach.module(AGENT, **{MARK: job.mark(node)}))


def sweep_command(reach: Reach, job: Job, node: int) -> tuple[str, ...]:
    """The command that kills the processes that a launch has left on a node."""
    return reach.over_ssh(job.hosts[node], reach.module(SWEEPER, job.mark(node)))


def node_words(job: Job, node: str, master: tuple[str, int], *, prefix: bool) -> tuple[str, ...]:
    """The arguments of the module NODE, which runs a node's part of a launch."""
    words = (pack(job), "--node-rank", node, "--master-addr", master[0], "--master-port", str(master[1]))
    return words if prefix else (*words, "--no-prefix")


def pdsh_command(
    reach: Reach, job: Job, master: tuple[str, int], secret: str, *, prefix: bool
) -> tuple[str, ...]:
    """The command that starts all nodes through pdsh, which replaces ``%n`` by a node's number.

    pdsh sends no variables, so the secret of the nodes is in the command.
    """
    command = reach.module(NODE, *node_words(job, "@", master, prefix=prefix), **{SECRET: secret})
    command = command.replace("%", "%%")
    names = ",".join(host.name for host in job.hosts)
    command = command.replace(" @ ", " %n ")
    fan_out = str(max(32, len(job.hosts)))
    return ("pdsh", "-S", "-b", "-N", "-R", "ssh", "-f", fan_out, *reach.words, "-w", names, command)


def srun_command(reach: Reach, job: Job, master: tuple[str, int], *, prefix: bool) -> tuple[str, ...]:
    """The command that starts a task on each node through srun; SLURM_NODEID is the node's number."""
    nodes = str(len(job.hosts))
    names = ",".join(host.name for host in job.hosts)
    layout = ("--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1", "--nodelist", names)
    ends = ("--kill-on-bad-exit=1", "--wait=60", "--export=ALL")
    words = node_words(job, "SLURM_NODEID", master, prefix=prefix)
    return ("srun", *layout, *ends, *reach.words, reach.python, "-u", "-m", NODE, *words)


def mpirun_command(reach: Reach, job: Job, master: tuple[str, int], *, prefix: bool) -> tuple[str, ...]:
    """The command that starts a process on each node through Open MPI.

    OMPI_COMM_WORLD_RANK is the node's number.
    """
    names = ",".join(f"{host.name}:1" for host in job.hosts)
    layout = ("-np", str(len(job.hosts)), "--host", names, "--map-by", "ppr:1:node", "--bind-to", "none")
    path = ("-x", f"PYTHONPATH={reach.path}") if reach.path else ()
    place = ("-wdir", reach.folder, *path, "-x", SECRET)
    words = node_words(job, "OMPI_COMM_WORLD_RANK", master, prefix=prefix)
    return ("mpirun", *layout, *place, *reach.words, reach.python, "-u", "-m", NODE, *words)
