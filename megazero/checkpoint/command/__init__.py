"""The command `megazero checkpoint`: inspect, check, compare, rewrite and remove checkpoints.

Each verb is a module with `add_verb`, which describes its flags, and `run`, which takes them and returns the
exit status. The verbs for foreign formats are commands in packages of their own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megazero.checkpoint.command import convert, diff, inspect, prune, verify
from megazero.checkpoint.command.show import printable
from megazero.errors import MegazeroError

_OTHERS = (
    ("to-hf", "write a model as transformers reads it"),
    ("from-hf", "make a checkpoint from a Hugging Face model"),
    ("import-megatron", "make a checkpoint from one of Megatron-LM or Megatron-DeepSpeed"),
)


def build_parser() -> argparse.ArgumentParser:
    """All verbs and their flags; for those in `_OTHERS`, only the line of help."""
    parser = argparse.ArgumentParser(
        prog="megazero checkpoint",
        description="Inspect, check, compare, rewrite and remove checkpoints.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for module in (inspect, verify, diff, convert, prune):
        module.add_verb(verbs)
    for name, line in _OTHERS:
        verbs.add_parser(name, help=line)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a verb with its flags; returns the exit status: 0, or what the verb's help says."""
    verb, *rest = argv or [""]
    if verb == "to-hf":
        from megazero.checkpoint.hf.command import main_to_hf

        return main_to_hf(rest)
    if verb == "from-hf":
        from megazero.checkpoint.hf.command import main_from_hf

        return main_from_hf(rest)
    if verb == "import-megatron":
        from megazero.checkpoint.megatron.command import main_import_megatron

        return main_import_megatron(rest)
    flags = build_parser().parse_args(argv)
    try:
        status: int = flags.run(flags)
        sys.stdout.flush()
        return status
    except MegazeroError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return max(int(flags.trouble), error.exit_code)
    except BrokenPipeError:
        # The reader has seen enough; what is still buffered must not be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # such as a checkpoint that its run removes at this very moment
        print(f"error: {printable(error)}", file=sys.stderr)
        return int(flags.trouble)
