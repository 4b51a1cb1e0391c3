"""From flags to a launch: hosts, command, the variables that are sent, and the output of `--dry-run`."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from megazero.errors import ConfigError
from megazero.launch import commands, environment
from megazero.launch.flags import cores_of
from megazero.launch.hosts import Host, exclude, first, include, read_hostfile
from megazero.launch.job import HostOptions, Job, Script, Timeouts, processes_of
from megazero.launch.start import LaunchSettings

_HOSTFILE = "/job/hostfile"  # DeepSpeed's default
PORT = 29500
_SLURM_TIMEOUT = 60.0  # seconds


def hosts_of(flags: argparse.Namespace, variables: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts and slots that the flags choose.

    Raises ConfigError if the hostfile or a flag is wrong, or there is nothing to start.
    """
    path = flags.hostfile or (_HOSTFILE if Path(_HOSTFILE).exists() and not flags.no_ssh else None)
    if flags.no_ssh and path is None:
        slots = tuple(range(_own_slots(flags, variables)))
        count = flags.num_nodes or 1
        names = ["localhost"] if count == 1 else [f"node {node}" for node in range(count)]
        return tuple(Host(name, slots) for name in names)
    if path is not None:
        hosts = read_hostfile(path)
    elif flags.launcher == "srun":
        hosts = _hosts_of_slurm(flags, variables)
    else:
        if flags.num_nodes not in (None, 1):
            raise ConfigError(
                f"`--num-nodes` must be 1 without a hostfile, but is {flags.num_nodes}; name the hosts in "
                "`--hostfile`"
            )
        hosts = (Host("localhost", tuple(range(_own_slots(flags, variables)))),)
    if flags.include:
        return include(hosts, flags.include)
    if flags.exclude:
        return exclude(hosts, flags.exclude)
    most = flags.num_nodes if flags.max_elastic_nodes is None else min(flags.max_elastic_nodes, len(hosts))
    return first(hosts, most, flags.num_gpus)


def _own_slots(flags: argparse.Namespace, variables: Mapping[str, str]) -> int:
    """The number of slots of this machine: its GPUs, or the wanted number of ranks without GPUs."""
    gpus = environment.slots_here(variables.get("CUDA_VISIBLE_DEVICES"), gpus_here())
    count = flags.num_gpus if flags.no_ssh and flags.num_gpus else gpus or flags.num_gpus
    if not count:
        raise ConfigError("`--num-gpus` must say how many ranks to start on a machine without GPUs")
    return int(count)


def gpus_here() -> int:
    """The number of this machine's NVIDIA GPUs, from the driver."""
    folder = Path("/proc/driver/nvidia/gpus")
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


def _hosts_of_slurm(flags: argparse.Namespace, variables: Mapping[str, str]) -> tuple[Host, ...]:
    nodes = variables.get("SLURM_JOB_NODELIST")
    if nodes is None:
        raise ConfigError(
            "`--launcher srun` must run within an allocation of SLURM (sbatch, salloc), or with `--hostfile`"
        )
    named = variables.get("SLURM_GPUS_ON_NODE", "")
    count = flags.num_gpus or (int(named) if named.isdecimal() and len(named) < 5 else 0)
    if count < 1:
        raise ConfigError(
            "`--num-gpus` must say how many ranks to start on each node, as SLURM names no GPUs"
        )
    words = ["scontrol", "show", "hostnames", nodes]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_SLURM_TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"`{shlex.join(words)}` must name the hosts of the allocation, but has failed ({error}); name "
            "them in `--hostfile`"
        ) from error
    return tuple(Host(name, tuple(range(count))) for name in answer.stdout.split())


def variables_of(flags: argparse.Namespace, variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The variables that are sent to the hosts; PYTHONPATH begins with the working folder.

    Raises ConfigError if an environment file or `--env` is wrong.
    """
    files = environment.environment_files(variables, Path.home(), folder)
    sent = environment.inherited(variables) | environment.read_environment_files(files)
    sent |= environment.assigned(flags.env, variables)
    sent["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), sent.get("PYTHONPATH")]))
    return sent


def imports_deepspeed(path: Path) -> bool:
    """Whether a script imports `deepspeed` anywhere; False for a file that is not Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return any(name.split(".")[0] == "deepspeed" for name in names)


def replaces_deepspeed(flags: argparse.Namespace) -> tuple[bool, str | None]:
    """Whether `import deepspeed` in the script gives megazero, and a notice about it."""
    if flags.import_deepspeed == "megazero":
        if flags.no_python:
            raise ConfigError(
                "`--import-deepspeed megazero` must be given with a Python script, not with `--no-python`"
            )
        return True, None
    path = Path(flags.script.replace(".", "/")).with_suffix(".py") if flags.module else Path(flags.script)
    if flags.import_deepspeed == "installed" or flags.no_python or not imports_deepspeed(path):
        return False, None
    if importlib.util.find_spec("deepspeed") is not None:
        return False, (
            f"{flags.script} imports deepspeed and gets the one that is installed; `--import-deepspeed "
            "megazero` puts megazero in its place"
        )
    return True, f"{flags.script} imports deepspeed, which is not installed: megazero is in its place"


def script_of(flags: argparse.Namespace, sent: Mapping[str, str], folder: str, as_deepspeed: bool) -> Script:
    """The command of every rank, or of torchrun on every host.

    as_deepspeed: whether `import deepspeed` gives megazero, see `replaces_deepspeed`.
    """
    python = flags.python or sys.executable
    kind = ("-m",) if flags.module else ()
    if as_deepspeed:
        kind = ("-m", "megazero.deepspeed", *kind)
    script = (*kind, flags.script)
    if flags.launcher == "torchrun":
        rendezvous = flags.rdzv_backend or ("c10d" if flags.elastic_training else "static")
        own = (*shlex.split(flags.launcher_args), "--max-restarts", str(restarts_of(flags)))
        start = (python, "-u", "-m", "torch.distributed.run", *own, None)
        return Script(
            (*start, *(("--no-python",) if flags.no_python else ()), *script, *flags.arguments),
            sent,
            folder,
            rendezvous,
        )
    place = () if flags.no_local_rank else (None,)
    start = () if flags.no_python else (python, "-u")
    return Script((*start, *script, *place, *flags.arguments), sent, folder)


def restarts_of(flags: argparse.Namespace) -> int:
    """How often ranks are started again; 100 times with elastic training, as in DeepSpeed."""
    if flags.max_restarts is not None:
        return int(flags.max_restarts)
    return 100 if flags.elastic_training else 0


def job_of(flags: argparse.Namespace, hosts: tuple[Host, ...], script: Script) -> Job:
    """The launch that the flags ask for.

    Raises ConfigError if cores are wrong, or KMP_AFFINITY is set, which binds cores too.
    """
    bind = flags.bind_cores_to_rank or flags.bind_core_list is not None
    if bind and "KMP_AFFINITY" in os.environ:
        raise ConfigError(
            "`--bind-cores-to-rank` must not be given while KMP_AFFINITY is set, which binds, too; unset it"
        )
    pid_file = str(Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed")) if flags.save_pid else None
    options = HostOptions(
        logs=flags.enable_each_rank_log,
        stamp=time.strftime("%Y%m%d%H%M%S"),
        bind=bind,
        cores=cores_of(flags.bind_core_list) if flags.bind_core_list else None,
        pid_file=pid_file,
    )
    timeouts = Timeouts(flags.grace, flags.save_grace, flags.silence, flags.rejoin)
    least = (flags.min_elastic_nodes or 1) if flags.elastic_training else None
    restarts = 0 if script.rendezvous else restarts_of(flags)
    return Job(secrets.token_hex(4), hosts, script, timeouts, options, restarts, least)


def reach_of(flags: argparse.Namespace, folder: str) -> commands.Reach:
    """How the hosts are reached."""
    words = tuple(shlex.split(flags.ssh_args if flags.launcher == "torchrun" else flags.launcher_args))
    if flags.ssh_port is not None:
        words = (*words, "-p", str(flags.ssh_port))
    path = os.environ.get("PYTHONPATH")
    return commands.Reach(
        flags.python or sys.executable, folder, flags.venv_script, path, words, flags.force_multi
    )


def settings_of(flags: argparse.Namespace) -> LaunchSettings:
    """The settings that are not part of the job."""
    quiet = flags.quiet or flags.log_level not in ("debug", "info")
    try_it = not flags.no_ssh_check
    return LaunchSettings(
        flags.master_addr, flags.master_port, try_it, flags.fan_out, not flags.no_prefix, quiet
    )


def command_of(flags: argparse.Namespace, reach: commands.Reach, job: Job, secret: str) -> tuple[str, ...]:
    """The command of pdsh, srun or mpirun that starts all nodes.

    srun and mpirun pass the secret on in their environment; pdsh's command contains it.

    Raises:
        ConfigError: the launcher is not installed, or needs hosts with the same number of slots.
    """
    makers = {"srun": commands.srun_command, "mpirun": commands.mpirun_command}
    problems = []
    if flags.launcher == "srun" and len({len(host.slots) for host in job.hosts}) > 1:
        listed = ", ".join(f"{host.name} {len(host.slots)}" for host in job.hosts[:8])
        problems.append(
            f"hosts must have equally many slots for `--launcher srun`, but have {listed}; use "
            "`--launcher ssh`"
        )
    if shutil.which(flags.launcher) is None and not flags.dry_run:
        problems.append(
            f"`--launcher {flags.launcher}` must be installed here; install it, or leave the flag out for ssh"
        )
    if problems:
        raise ConfigError(problems)
    master = (flags.master_addr or job.hosts[0].name, flags.master_port or PORT)
    prefix = not flags.no_prefix
    if flags.launcher == "pdsh":
        return commands.pdsh_command(reach, job, master, secret, prefix=prefix)
    return makers[flags.launcher](reach, job, master, prefix=prefix)


def described(flags: argparse.Namespace, reach: commands.Reach, job: Job) -> Iterator[str]:
    """The lines of `--dry-run`."""
    yield "hosts"
    for host, start in zip(job.hosts, job.first_ranks(), strict=True):
        slots = ",".join(map(str, host.slots))
        yield f"  {host.name}: ranks {start}-{start + len(host.slots) - 1} on slots {slots}"
    yield "variables that are sent"
    yield from (f"  {line}" for line in environment.shown(job.script.environment))
    own = flags.launcher in ("pdsh", "srun", "mpirun") or flags.no_ssh
    default = (job.hosts[0].name, PORT) if own else ("(one that all hosts reach)", 0)
    address, port = flags.master_addr or default[0], flags.master_port or default[1]
    process = processes_of(job, 0, (address, port))[0]
    yield (
        f"rank {process.label} on {job.hosts[0].name}" if process.label != "torchrun" else "on the first host"
    )
    yield f"  {shlex.join(process.words)}"
    for name, value in process.environment.items():
        if name not in job.script.environment:
            yield f"  {name}={'(one that is free)' if (name, value) == ('MASTER_PORT', '0') else value}"
    yield "commands"
    if flags.no_ssh:
        yield f"  none: this node starts its ranks, as node {flags.node_rank} of {len(job.hosts)}"
    elif flags.launcher in ("pdsh", "srun", "mpirun"):
        yield f"  {shlex.join(command_of(flags, reach, job, environment.NOT_SHOWN))}"
    else:
        for node in range(len(job.hosts)):
            yield f"  {shlex.join(commands.agent_command(reach, job, node))}"
