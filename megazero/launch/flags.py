"""The flags of `megazero launch`, also in DeepSpeed's spellings, and their checks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import MappingProxyType

from megazero.errors import ConfigError
from megazero.launch.hosts import MOST_SLOTS

_MOST_NODES = 1 << 16
_MOST_CORES = 1 << 16
_LAUNCHERS = ("ssh", "pdsh", "srun", "mpirun", "torchrun")
_DEEPSPEED_LAUNCHERS = MappingProxyType({"slurm": "srun", "openmpi": "mpirun"})
_REFUSED_LAUNCHERS = ("impi", "mpich", "mvapich")
_STARTS_NODES = ("pdsh", "srun", "mpirun")  # launchers that start all nodes, in place of agents over ssh
_EPILOG = (
    "What follows the script is the script's own. Each flag may be written with underscores. Without hosts, "
    "the ranks run on this machine. docs/launch.md has the grammar of hostfiles and the meaning of exit "
    "statuses."
)


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the verb's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero launch",
        description="Start the ranks of a script on one or many hosts, show what they print, and end them "
        "together.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    for add in (_hosts, _connections, _script, _around, _restarts):
        add(parser)
    return parser


def _add(group: argparse._ActionsContainer, *names: str, **options: object) -> None:
    spelled = dict.fromkeys((*names, *(f"--{n[2:].replace('-', '_')}" for n in names if n.startswith("--"))))
    group.add_argument(*spelled, **options)  # type: ignore[arg-type]  # argparse's own types differ by action


def _hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hosts and slots")
    _add(group, "-H", "--hostfile", help="lines `NAME slots=N`; /job/hostfile if there is one")
    _add(
        group,
        "-i",
        "--include",
        default="",
        metavar="FILTER",
        help="w-0@w-1:0,2: all of w-0, two slots of w-1",
    )
    _add(group, "-e", "--exclude", default="", metavar="FILTER", help="the same, for what is left out")
    _add(group, "--num-nodes", type=int, metavar="N", help="the first N hosts")
    _add(group, "--num-gpus", "--num-accelerators", type=int, metavar="N", help="slots 0 to N-1 of each host")
    _add(group, "--elastic-training", action="store_true", help="restart with fewer hosts if some stay away")
    _add(group, "--min-elastic-nodes", type=int, metavar="N", help="the fewest hosts to restart with (1)")
    _add(group, "--max-elastic-nodes", type=int, metavar="N", help="the most hosts to take")
    _add(group, "--force-multi", action="store_true", help="use the launcher for this machine alone, too")


def _connections(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how hosts are reached, and where ranks meet")
    _add(group, "--launcher", default="ssh", metavar="NAME", help=f"one of {', '.join(_LAUNCHERS)} (ssh)")
    _add(group, "--launcher-args", default="", metavar="WORDS", help="words for it, such as `-F ssh_config`")
    _add(group, "--ssh-args", default="", metavar="WORDS", help="words for ssh under `--launcher torchrun`")
    _add(group, "--ssh-port", type=int, metavar="PORT", help="the port of sshd")
    _add(group, "--fan-out", type=int, default=32, metavar="N", help="connections that are made at once (32)")
    _add(
        group,
        "--master-addr",
        metavar="ADDR",
        help="an address of the first host; by default one that all reach",
    )
    _add(
        group,
        "--master-port",
        type=int,
        metavar="PORT",
        help="by default one that is free; 29500 without ssh",
    )
    _add(group, "--no-ssh-check", action="store_true", help="do not try the address from every host")
    _add(group, "--no-ssh", action="store_true", help="start this node's part alone; run it on every node")
    _add(group, "--node-rank", type=int, metavar="N", help="this node's number, with --no-ssh")
    _add(group, "--rdzv-backend", choices=("static", "c10d"), help="torchrun's rendezvous (static)")


def _script(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the script")
    _add(group, "-m", "--module", action="store_true", help="it is the name of a module")
    _add(group, "--no-python", action="store_true", help="it is a program of its own")
    _add(group, "--no-local-rank", action="store_true", help="do not give it `--local_rank=N`")
    _add(group, "--python", metavar="PATH", help="the hosts' Python; by default this one's path")
    _add(group, "--venv-script", metavar="FILE", help="a script that the hosts source first")
    _add(group, "--env", action="append", default=[], metavar="NAME[=VALUE]", help="send a variable")
    _add(
        group,
        "--import-deepspeed",
        choices=("megazero", "installed"),
        help="what `import deepspeed` means to the script; by default megazero where DeepSpeed is not "
        "installed",
    )
    group.add_argument("script", nargs="?", help="the script, module or program")
    group.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def _around(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("around the ranks")
    _add(group, "--dry-run", action="store_true", help="print hosts, variables and commands; touch nothing")
    _add(group, "--no-prefix", action="store_true", help="show lines without `HOST[RANK]: `")
    _add(group, "--enable-each-rank-log", metavar="DIR", help="a file for each rank, on its host")
    _add(group, "--save-pid", action="store_true", help="TMPDIR/PID.deepspeed on each host, while it runs")
    _add(group, "--bind-cores-to-rank", action="store_true", help="each rank has physical cores of its own")
    _add(group, "--bind-core-list", metavar="CORES", help="the cores to share out: 0-3,8")
    _add(group, "-q", "--quiet", action="store_true", help="no notices, errors alone")
    levels = ("debug", "info", "warning", "error", "critical")
    _add(group, "--log-level", default="info", choices=levels, help="above info: no notices")
    _add(
        group,
        "--autotuning",
        choices=("tune", "run"),
        help="look for the best layout first (`megazero tune`); run: then start the script in it",
    )


def _restarts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ends and restarts, in seconds")
    _add(
        group,
        "--max-restarts",
        type=int,
        metavar="N",
        help="start the ranks again after a failure (0; 100 if elastic)",
    )
    _add(group, "--grace", type=float, default=10.0, help="for ranks to end before they are killed (10)")
    _add(group, "--save-grace", type=float, default=300.0, help="the same after SIGTERM, to save (300)")
    _add(
        group, "--silence", type=float, default=15.0, help="until a silent host counts as lost; 0: never (15)"
    )
    _add(
        group, "--rejoin", type=float, default=60.0, help="for a lost host to come back before a restart (60)"
    )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; DeepSpeed's names of launchers are replaced by megazero's.

    Raises ConfigError if flags contradict each other, are out of range, or ask for an unsupported launcher.
    """
    flags = build_parser().parse_args(words)
    flags.launcher = _DEEPSPEED_LAUNCHERS.get(flags.launcher, flags.launcher)
    checks = [*_launcher_checks(flags), *_combination_checks(flags), *_range_checks(flags)]
    problems = [problem for problem, is_violated in checks if is_violated]
    if problems:
        raise ConfigError(problems)
    return flags


def _launcher_checks(flags: argparse.Namespace) -> list[tuple[str, bool]]:
    """Problems, and whether the flags have them."""
    names = ", ".join(_LAUNCHERS)
    return [
        ("a script must follow the flags, but there is none; see `megazero launch --help`", not flags.script),
        (
            f"`--launcher` must be one of {names}, but is {flags.launcher}, which is not built; use ssh, or "
            "mpirun with Open MPI",
            flags.launcher in _REFUSED_LAUNCHERS,
        ),
        (
            f"`--launcher` must be one of {names}, but is {flags.launcher}",
            flags.launcher not in (*_LAUNCHERS, *_REFUSED_LAUNCHERS),
        ),
    ]


def _combination_checks(flags: argparse.Namespace) -> list[tuple[str, bool]]:
    counted = flags.num_nodes is not None or flags.num_gpus is not None
    elastic = flags.min_elastic_nodes is not None or flags.max_elastic_nodes is not None
    return [
        ("`--include` must not be given with `--exclude`; give one", bool(flags.include and flags.exclude)),
        (
            "`--num-nodes` and `--num-gpus` must not be given with `--include` or `--exclude`, which choose "
            "slots",
            counted and bool(flags.include or flags.exclude),
        ),
        ("`--module` must not be given with `--no-python`; give one", flags.module and flags.no_python),
        (
            "`--node-rank` must be given with `--no-ssh`: this node's number",
            flags.no_ssh and flags.node_rank is None,
        ),
        ("`--no-ssh` must be given with `--node-rank`", not flags.no_ssh and flags.node_rank is not None),
        ("`--launcher` must be left out with `--no-ssh`", flags.no_ssh and flags.launcher != "ssh"),
        (
            "`--elastic-training` must be given with `--min-elastic-nodes` or `--max-elastic-nodes`",
            elastic and not flags.elastic_training,
        ),
        (
            "`--elastic-training` must go through ssh or torchrun; leave `--launcher` out",
            flags.elastic_training and (flags.launcher in _STARTS_NODES or flags.no_ssh),
        ),
        (
            "`--rdzv-backend` must be given with `--launcher torchrun`",
            flags.rdzv_backend is not None and flags.launcher != "torchrun",
        ),
        (
            "`--bind-cores-to-rank` must not be given with `--launcher torchrun`; give "
            "`--launcher-args` what `torchrun --numa-binding` takes",
            flags.launcher == "torchrun" and flags.bind_cores_to_rank,
        ),
        (
            "`--master-addr` must be the address of node 0, the same on all nodes, with `--no-ssh`",
            flags.no_ssh
            and flags.num_nodes not in (None, 1)
            and not (flags.master_addr or flags.hostfile or flags.dry_run),
        ),
    ]


def _range_checks(flags: argparse.Namespace) -> list[tuple[str, bool]]:
    times = ("grace", "save_grace", "silence", "rejoin", "max_restarts")
    negative = [f"--{name.replace('_', '-')}" for name in times if (getattr(flags, name) or 0) < 0]
    without_ssh = flags.launcher in _STARTS_NODES or (flags.no_ssh and flags.num_nodes != 1)
    return [
        ("`--fan-out` must be at least 1", flags.fan_out < 1),
        *(
            (f"`--{name.replace('_', '-')}` must be at most {most}", (getattr(flags, name) or 0) > most)
            for name, most in (("num_nodes", _MOST_NODES), ("num_gpus", MOST_SLOTS), ("ssh_port", 65535))
        ),
        (f"{', '.join(negative)} must be at least 0", bool(negative)),
        (
            f"`--master-port` must be 0 to 65535, but is {flags.master_port}",
            flags.master_port is not None and not 0 <= flags.master_port <= 65535,
        ),
        (
            "`--master-port` must name a port where hosts are not reached over ssh; 0 cannot be agreed on",
            flags.master_port == 0 and without_ssh,
        ),
    ]


def cores_of(text: str) -> tuple[int, ...]:
    """Parse a list of cores such as ``0-3,8``.

    Raises ConfigError if the text has another form, or names a core twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        start, dash, end = part.strip().partition("-")
        if not _is_number(start) or (dash and not _is_number(end)):
            raise ConfigError(f"`--bind-core-list` must be cores such as 0-3,8, but is `{text}`")
        if len(start) > 6 or len(end) > 6 or int(end or start) >= _MOST_CORES:
            raise ConfigError(f"`--bind-core-list` must be cores below {_MOST_CORES}, but is `{text}`")
        cores += range(int(start), int(end or start) + 1)
    if len(set(cores)) < len(cores):
        raise ConfigError(f"`--bind-core-list` must name a core once, but is `{text}`")
    return tuple(cores)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
