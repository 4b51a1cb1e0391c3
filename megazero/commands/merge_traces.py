"""The command `megazero merge-traces`: merge the ranks' traces of `--profile` into one timeline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megazero.account.profilers.merge import alignment_lines, merge_traces
from megazero.commands.outputs import output_file
from megazero.errors import exit_status


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero merge-traces",
        description="Merge the traces that the ranks of a run wrote with `--profile --profile-ranks -1` into "
        "one, with their clocks aligned by the ends of the calls that they made together.",
    )
    parser.add_argument("folder", type=Path, help="the folder of one step, such as profile/step11")
    parser.add_argument(
        "--output", type=output_file, help="the file to write; default: merged.json.gz in the folder"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: merge the traces, and print how far the ranks' clocks were apart."""
    flags = build_parser().parse_args(argv)

    def merge() -> None:
        output = flags.output or flags.folder / "merged.json.gz"
        lines = alignment_lines(merge_traces(flags.folder, output))
        print("\n".join([*lines, f"wrote {output}, which chrome://tracing and ui.perfetto.dev open"]))

    return exit_status(merge)
