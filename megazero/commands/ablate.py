"""The command `megazero ablate`: train a folder of configurations, and compare what they learned."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megazero.ablate.corpus import FAMILIES, Corpus
from megazero.ablate.progress import ProgressTable
from megazero.ablate.runs import Command, Failure, run_all, training_command
from megazero.ablate.study import Member, StudyOptions, chosen, read_study, with_teachers
from megazero.ablate.trial import Trial, trials_of
from megazero.commands.outputs import add_theme, output_folder
from megazero.config.words import split_training_flags
from megazero.errors import ConfigError, MegazeroError, exit_status

_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's own flags."""
    parser = argparse.ArgumentParser(
        prog="megazero ablate",
        description="Train every configuration (*.yaml) of a folder, except those named base*.yaml, which "
        "others are built on, and compare what they learned: results.jsonl has an object per run, results.md "
        "a table, results.png the validation loss against tokens, FLOPs and time. Configurations that name "
        "no data are trained on the quickstart's corpus, Python's standard library for a GPT and the King "
        "James Bible for a BERT; it is made if it is not there, and analyzed for curricula that name no "
        "index. When called again, the command trains only what is not finished, from the last checkpoint "
        "on.",
        epilog="Flags of pretrain_gpt.py or pretrain_bert.py may follow after `--`; they take precedence "
        "over all files, as in `megazero ablate examples_3d/moe -- --bf16`. Status 0: all runs are finished; "
        "1: some failed; 2: refused; 130: interrupted.",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the configurations")
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of each: its seed and the next (default 1)"
    )
    parser.add_argument("--nproc", type=int, default=1, help="ranks of each run (default 1)")
    parser.add_argument(
        "--steps",
        type=int,
        help="optimizer steps of each run, with everything in it at the same places (default: the files')",
    )
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="S",
        help="train each at these multiples of its length, with everything in it at the same places: "
        "learning rate, schedules, evaluations (default 1); NAME@S is NAME at S times its length",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="train only these and those they learn from"
    )
    parser.add_argument(
        "--baseline", metavar="NAME", help="the one that the others are compared with (default: the first)"
    )
    parser.add_argument(
        "--out",
        type=output_folder,
        help="where everything is written (default: out/ablate/ and the folder's name)",
    )
    add_theme(parser)
    return parser


def main(argv: Sequence[str], command: Command = training_command) -> int:
    """Run the command with its flags; returns the exit status.

    Args:
        argv: the command's flags; after ``--``, those of the training.
        command: returns the command line that trains a run.
    """
    own, passed = split_training_flags(argv)
    flags = build_parser().parse_args(own)
    failures: list[Failure] = []
    try:
        status = exit_status(lambda: failures.extend(_ablate(flags, tuple(passed or ()), command)))
    except KeyboardInterrupt:
        print("interrupted; run the command again to go on", file=sys.stderr)
        return _INTERRUPTED
    if failures:
        print(f"error: {len(failures)} of the runs did not get to their end:", file=sys.stderr)
        print("\n".join(f"  {failure}" for failure in failures), file=sys.stderr)
    return status or int(bool(failures))


def _ablate(flags: argparse.Namespace, passed: tuple[str, ...], command: Command) -> list[Failure]:
    _check(flags)
    out = (flags.out or Path("out/ablate") / flags.folder.resolve().name).resolve()
    corpora = {family: Corpus(out / "corpus", family) for family in FAMILIES}
    named = {family: corpus.flags for family, corpus in corpora.items()}
    options = StudyOptions(flags.nproc, flags.steps, tuple(dict.fromkeys(flags.shares)), passed, named)
    study = read_study(flags.folder, options)
    members = study.members
    baseline = chosen(members, [flags.baseline or members[0].name], "--baseline")[0]
    wanted = with_teachers(chosen(members, flags.only, "--only"), members)
    for warning in study.warnings:
        print(f"megazero ablate: {warning}", file=sys.stderr)
    for family in {member.config.model.family: None for member in wanted if member.takes_corpus}:
        corpora[family].prepare()
    trials = trials_of(members, flags.seeds, flags.nproc, out)
    chosen_trials = [trial for trial in trials if trial.member in wanted]
    _analyze([trial for trial in chosen_trials if trial.to_analyze and not trial.finished()])
    try:
        with ProgressTable(chosen_trials) as board:
            return run_all(chosen_trials, board, command)
    finally:
        _report(members, trials, baseline, out, flags)


def _analyze(trials: Sequence[Trial]) -> None:
    """Measure the samples for these trials' curricula; trials with the same samples share a measurement."""
    done: set[tuple[Path, str]] = set()
    for trial in trials:
        metrics, config, corpus = trial.to_analyze, trial.config(), trial.corpus
        wanted = {(corpus.analysis(config), metric.name) for metric in metrics}
        if not wanted <= done:
            corpus.analyze(metrics, config)
            done |= wanted


def _check(flags: argparse.Namespace) -> None:
    violations = [
        f"`--{name}` must be at least 1, but is {value}; raise it"
        for name in ("seeds", "nproc", "steps")
        if (value := getattr(flags, name)) is not None and value < 1
    ]
    violations += [
        f"`--shares` must be greater than 0 and finite, but one is {share:g}; correct it"
        for share in flags.shares
        if not 0 < share < math.inf
    ]
    if violations:
        raise ConfigError(violations)


def _report(
    members: Sequence[Member], trials: Sequence[Trial], baseline: Member, out: Path, flags: argparse.Namespace
) -> None:
    """Write the results of all finished runs, and print the table."""
    from megazero.ablate.picture import draw
    from megazero.ablate.results import grouped, result_of, write_lines
    from megazero.ablate.sizes import size_of
    from megazero.ablate.table import markdown

    done = [trial for trial in trials if trial.finished()]
    if not done:
        return
    names = {trial.member.name for trial in done}
    sizes = {member.name: size_of(member.config) for member in members if member.name in names}
    results = [result_of(trial, sizes[trial.member.name]) for trial in done]
    order = {member.name: number for number, member in enumerate(members)}
    findings = sorted(grouped(results), key=lambda finding: order[finding.name])
    write_lines(results, out / "results.jsonl")
    table = markdown(findings, baseline.name)
    (out / "results.md").write_text(table, encoding="utf-8")
    print(f"\n{table}")
    written = ["results.jsonl", "results.md"]
    try:
        draw(findings, baseline.name, out / "results.png", str(flags.folder), flags.theme)
        written.append("results.png")
    except MegazeroError as error:
        print(f"no picture: {error}", file=sys.stderr)
    print(f"{out}: {', '.join(written)}")
