"""The command `megazero run`: run a script in which `import deepspeed` means megazero."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megazero.errors import ConfigError, exit_status


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags; what follows the script is the script's own."""
    parser = argparse.ArgumentParser(
        prog="megazero run",
        description="Run a training script as `python` does, but `import deepspeed` and its modules mean "
        "megazero, in the script and in all processes that it starts, whether DeepSpeed is installed or not. "
        "For several nodes: `torchrun ... -m megazero.deepspeed train.py`.",
    )
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--num_gpus", type=int, help="ranks on this host, each given `--local_rank`")
    ranks.add_argument("--nproc_per_node", type=int, help="ranks on this host, started as by `torchrun`")
    parser.add_argument("--no_local_rank", action="store_true", help="no `--local_rank` with `--num_gpus`")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the script, or the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def command(flags: argparse.Namespace) -> list[str]:
    """The command line that runs the script on the ranks that the flags ask for.

    Raises:
        ConfigError: the number of ranks is below 1, or the script does not exist.
    """
    own = ["-m", "megazero.deepspeed"]
    if flags.num_gpus is not None and not flags.no_local_rank:
        own.append("--local_rank")
    script = [*(["-m"] if flags.module else []), flags.script, *flags.arguments]
    count = flags.nproc_per_node if flags.num_gpus is None else flags.num_gpus
    if count is None:
        return [sys.executable, *own, *script]
    if count < 1:
        raise ConfigError(f"the number of ranks must be at least 1, but is {count}; correct it")
    if not (flags.module or os.path.exists(flags.script)):  # checked here, not by every rank and the launcher
        raise ConfigError(
            f"the script must be a file, but there is no {os.path.abspath(flags.script)}; correct it"
        )
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    return [sys.executable, *launcher, *own, *script]


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by the script or its launcher; returns only if the flags are refused."""
    flags = build_parser().parse_args(argv)

    def become() -> None:
        words = command(flags)
        sys.stdout.flush()
        os.execv(words[0], words)

    return exit_status(become)
