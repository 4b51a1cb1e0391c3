"""The command `megazero env`: reports on the machine and its problems."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megazero.env.gather import gather
from megazero.env.problems import Trouble, troubles
from megazero.env.report import document, report
from megazero.errors import ConfigError, exit_status


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero env",
        description="Show versions, devices, memory, threads, network, which implementation each operator "
        "uses and why no faster one, and the problems that are found, each with a remedy.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--check", action="store_true", help="end with status 1 if there is a problem")
    parser.add_argument(
        "--nproc", type=int, help="ranks that are to run here (default LOCAL_WORLD_SIZE, or one per GPU)"
    )
    return parser


def main(argv: Sequence[str] = ()) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    problems: list[Trouble] = []

    def show() -> None:
        if flags.nproc is not None and flags.nproc < 1:
            raise ConfigError(f"`--nproc` must be at least 1, but is {flags.nproc}; correct it")
        env = gather(flags.nproc)
        problems.extend(troubles(env))
        print(json.dumps(document(env)) if flags.json else report(env))

    status = exit_status(show)
    return status or int(flags.check and bool(problems))
