"""The command `megazero checkpoint`: inspect, check, compare, rewrite and remove checkpoints.

Each verb is a module with `add_verb`, which declares its flags, and `run`, which takes the parsed flags and
returns the exit status. The verbs of foreign formats parse their own flags, and are imported when they run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from megazero.commands.checkpoint import convert, diff, extend_positions, inspect, prune, verify
from megazero.commands.show import one_line
from megazero.errors import MegazeroError

_OTHERS = (
    ("to-hf", "write a model as transformers reads it", "hf", "main_to_hf"),
    ("from-hf", "make a checkpoint from a Hugging Face model", "hf", "main_from_hf"),
    (
        "import-megatron",
        "make a checkpoint from one of Megatron-LM or Megatron-DeepSpeed",
        "megatron",
        "main_import_megatron",
    ),
)


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of all verbs and their flags; verbs of `_OTHERS` have a line of help alone."""
    parser = argparse.ArgumentParser(
        prog="megazero checkpoint",
        description="Inspect, check, compare, rewrite and remove checkpoints.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for module in (inspect, verify, diff, convert, extend_positions, prune):
        module.add_verb(verbs)
    for name, line, _, _ in _OTHERS:
        verbs.add_parser(name, help=line)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a verb with its flags; returns the exit status: 0, or what the verb's help says."""
    verb, *rest = argv or [""]
    for name, _, module, function in _OTHERS:
        if name == verb:
            converted: int = getattr(import_module(f"megazero.commands.checkpoint.{module}"), function)(rest)
            return converted
    flags = build_parser().parse_args(argv)
    try:
        status: int = flags.run(flags)
        sys.stdout.flush()
        return status
    except MegazeroError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return max(int(flags.trouble), error.exit_code)
    except BrokenPipeError:
        # The reader has gone; the buffered rest must not be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # such as a checkpoint that its run removes in the meantime
        print(f"error: {one_line(error)}", file=sys.stderr)
        return int(flags.trouble)
