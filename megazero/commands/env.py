"""The command `megazero env`: report on this machine, or on the hosts of a job, and on their problems."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from megazero.env.gather import gather
from megazero.env.hosts import SSH, gather_hosts, hosts_document, hosts_report, hosts_status
from megazero.env.problems import find_problems
from megazero.env.report import document, report
from megazero.errors import ConfigError, exit_status
from megazero.launch.environment import NOT_SHOWN, is_secret
from megazero.launch.hosts import read_hostfile


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero env",
        description="Show versions, devices, memory, threads, network, links, limits, which implementation "
        "each operator uses and why no faster one, and the problems that are found, each with a remedy. The "
        "status is 1 if one of them would stop a training.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--check", action="store_true", help="end with status 1 if there is any problem")
    parser.add_argument(
        "--nproc", type=int, help="ranks that are to run on a host (default LOCAL_WORLD_SIZE, or one per GPU)"
    )
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--hosts", help="report on these hosts instead, over ssh: names separated by commas")
    hosts.add_argument("--hostfile", help="report on the hosts of this file instead, over ssh")
    parser.add_argument("--ssh", default=SSH, help="the command that reaches a host (default: %(default)s)")
    return parser


def main(argv: Sequence[str] = ()) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    return exit_status(lambda: _report(flags))


def _report(flags: argparse.Namespace) -> int:
    if flags.nproc is not None and flags.nproc < 1:
        raise ConfigError(f"`--nproc` must be at least 1, but is {flags.nproc}; correct it")
    if flags.hosts is None and flags.hostfile is None:
        env = gather(flags.nproc)
        values = {n: NOT_SHOWN if is_secret(n) else value for n, value in env.variables.items()}
        env = replace(env, variables=values)
        stops = [trouble.stops for trouble in find_problems(env)]
        any_problem, any_stop = bool(stops), any(stops)
        print(json.dumps(document(env)) if flags.json else report(env))
    else:
        hosts = gather_hosts(_chosen(flags), flags.ssh)
        any_problem, any_stop = hosts_status(hosts)
        print(json.dumps(hosts_document(hosts)) if flags.json else hosts_report(hosts))
    return int(any_problem if flags.check else any_stop)


def _chosen(flags: argparse.Namespace) -> dict[str, int | None]:
    """The hosts to ask, and the number of ranks of each: `--nproc`, or the slots in the hostfile.

    Raises:
        ConfigError: a host is named twice, or the hostfile is wrong.
    """
    if flags.hostfile is not None:
        return {host.name: flags.nproc or len(host.slots) for host in read_hostfile(flags.hostfile)}
    names = [name.strip() for name in flags.hosts.split(",")]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"`--hosts` must name each host once, but has {', '.join(twice)} again; remove it")
    return dict.fromkeys(names, flags.nproc)
