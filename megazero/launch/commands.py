"""The commands that reach the hosts of a launch, as values: over ssh, pdsh, srun or mpirun."""

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
_SSH = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
# ssh's own limit of three unanswered questions is then 15 s.


@dataclass(frozen=True)
class Reach:
    """How hosts are reached, and how a Python module is run there.

    Attributes:
        python: the path of Python on the hosts.
        folder: the folder to work in.
        setup: a script to source first.
        path: PYTHONPATH of the modules that the launch itself runs.
        words: the user's words for ssh, pdsh, srun or mpirun.
        always: whether this machine, too, is reached as the others are.
    """

    python: str
    folder: str
    setup: str | None = None
    path: str | None = None
    words: tuple[str, ...] = ()
    always: bool = False

    def is_here(self, host: Host) -> bool:
        """Whether a host is this machine, where no connection is needed."""
        return not self.always and host.name.lower() in LOCAL_NAMES | {socket.gethostname().lower()}

    def module(self, module: str, *arguments: str, **variables: str) -> str:
        """The shell's command that runs a module on a host, with some variables.

        The shell stays, so that a module that a signal ends is reported with status 128 + n.
        """
        variables |= {"PYTHONPATH": self.path} if self.path else {}
        set_them = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
        run = shlex.join([*set_them, self.python, "-u", "-m", module, *arguments])
        source = f". {shlex.quote(self.setup)} && " if self.setup else ""
        return shlex.join(["sh", "-c", f"{source}cd {shlex.quote(self.folder)} && {run}; exit $?"])

    def over_ssh(self, host: Host, command: str) -> tuple[str, ...]:
        """The command that runs a shell's command on a host; on this machine, without ssh."""
        if self.is_here(host):
            return tuple(shlex.split(command))
        return ("ssh", *self.words, *_SSH, host.name, command)


def agent_command(reach: Reach, job: Job, node: int) -> tuple[str, ...]:
    """The command that starts the agent of a node. It is as long for many ranks as for one."""
    return reach.over_ssh(job.hosts[node], reach.module(AGENT, **{MARK: job.mark(node)}))


def sweep_command(reach: Reach, job: Job, node: int) -> tuple[str, ...]:
    """The command that kills what a launch has left on a node."""
    return reach.over_ssh(job.hosts[node], reach.module(SWEEPER, job.mark(node)))


def node_words(job: Job, node: str, master: tuple[str, int], *, prefix: bool) -> tuple[str, ...]:
    """The arguments of the module NODE, with which a node takes its part in a launch by itself."""
    words = (pack(job), "--node-rank", node, "--master-addr", master[0], "--master-port", str(master[1]))
    return words if prefix else (*words, "--no-prefix")


def pdsh_command(
    reach: Reach, job: Job, master: tuple[str, int], secret: str, *, prefix: bool
) -> tuple[str, ...]:
    """The command that starts all nodes through pdsh, which writes a node's number for ``%n``.

    pdsh sends no variables, so the nodes' secret is in the command.
    """
    command = reach.module(NODE, *node_words(job, "@", master, prefix=prefix), **{SECRET: secret})
    command = command.replace("%", "%%")
    names = ",".join(host.name for host in job.hosts)
    command = command.replace(" @ ", " %n ")
    fan_out = str(max(32, len(job.hosts)))
    return ("pdsh", "-S", "-b", "-N", "-R", "ssh", "-f", fan_out, *reach.words, "-w", names, command)


def srun_command(reach: Reach, job: Job, master: tuple[str, int], *, prefix: bool) -> tuple[str, ...]:
    """The command that starts a task on each node through srun; its number is SLURM_NODEID."""
    nodes = str(len(job.hosts))
    names = ",".join(host.name for host in job.hosts)
    layout = ("--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1", "--nodelist", names)
    ends = ("--kill-on-bad-exit=1", "--wait=60", "--export=ALL")
    words = node_words(job, "SLURM_NODEID", master, prefix=prefix)
    return ("srun", *layout, *ends, *reach.words, reach.python, "-u", "-m", NODE, *words)


def mpirun_command(reach: Reach, job: Job, master: tuple[str, int], *, prefix: bool) -> tuple[str, ...]:
    """The command that starts a process on each node through Open MPI; its number is OMPI_COMM_WORLD_RANK."""
    names = ",".join(f"{host.name}:1" for host in job.hosts)
    layout = ("-np", str(len(job.hosts)), "--host", names, "--map-by", "ppr:1:node", "--bind-to", "none")
    path = ("-x", f"PYTHONPATH={reach.path}") if reach.path else ()
    place = ("-wdir", reach.folder, *path, "-x", SECRET)
    words = node_words(job, "OMPI_COMM_WORLD_RANK", master, prefix=prefix)
    return ("mpirun", *layout, *place, *reach.words, reach.python, "-u", "-m", NODE, *words)
