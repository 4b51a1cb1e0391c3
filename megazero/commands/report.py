"""The command `megazero report`: one page of HTML that shows runs, or a server of it while they go on."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megazero.checkpoint.remote.disk import put_file
from megazero.commands.outputs import output_file, run_folder
from megazero.errors import ConfigError, exit_status, printable
from megazero.report.page import page_of, read_runs
from megazero.report.run import Source
from megazero.report.watch import serve

PAGE = "report.html"


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero report",
        description="Write one page of HTML that shows runs: losses, throughput, memory, experts, incidents, "
        "evaluations, texts, settings. It opens anywhere, without a server or a network.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=run_folder,
        metavar="RUN",
        help="a run's folder, as given to --save, or a file of --metrics-jsonl; several are drawn together",
    )
    parser.add_argument(
        "--output",
        type=output_file,
        help=f"the file (default: {PAGE} in the first run's folder, or here if that cannot be written)",
    )
    parser.add_argument("--plan", type=Path, help="plan.json of `megazero plan --output` for the first run")
    parser.add_argument(
        "--sample",
        action="append",
        default=[],
        metavar="PROMPT",
        help="let the newest checkpoint of the first run continue this text; may be given several times",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="serve the page on 127.0.0.1 while the runs go on, and keep it fresh",
    )
    parser.add_argument("--port", type=int, default=0, help="port of --watch (default: any that is free)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    return exit_status(lambda: _report(flags))


def _report(flags: argparse.Namespace) -> None:
    if not 0 <= flags.port < 65536:
        raise ConfigError(f"`--port` must be a number from 0 to 65535, but is {flags.port}; correct it")
    if flags.watch and flags.output is not None:
        raise ConfigError("`--output` must be left out with `--watch`, which writes no file; leave out one")
    sources = [Source.of(run, flags.plan if i == 0 else None) for i, run in enumerate(flags.runs)]
    if flags.sample:
        _sample(sources[0], flags.sample)
    if flags.watch:
        serve(sources, flags.port, lambda address: print(f"watch at {address}", flush=True))
        return
    shown = read_runs(sources)
    for line in (line for run in shown["runs"] for line in run["damage"]):
        print(f"warning: {line}", file=sys.stderr)
    folder = flags.runs[0] if flags.runs[0].is_dir() else flags.runs[0].parent
    output = flags.output or (folder if os.access(folder, os.W_OK) else Path()) / PAGE
    try:
        output.write_text(page_of(shown), encoding="utf-8")
        put_file(output)
    except OSError as error:
        raise ConfigError(f"`--output` must be a file that can be written, but: {error}") from error
    print(printable(f"written to {output}"))


def _sample(source: Source, prompts: Sequence[str]) -> None:
    """Let the newest checkpoint continue texts, and keep them in the run's folder.

    Raises:
        ConfigError: there is no checkpoint that can.
    """
    from megazero.commands import generate  # imports torch, which takes seconds

    folder = source.read()["folder"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    sizes = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    if generate.main(["--load", folder, "--save-samples", "--max-new-tokens", "32", *sizes, *words]):
        raise ConfigError(
            f"`--sample` must have a checkpoint that can continue texts, but {folder} has none; leave it out"
        )
