"""The command `megazero moe-report`: show how evenly a mixture of experts uses its experts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megazero.commands.moe_report.balance import COLUMNS, rows, verdict
from megazero.commands.moe_report.loads import LoadRecord, read_loads, summed
from megazero.commands.moe_report.picture import figure_of, idlest_layer
from megazero.commands.outputs import add_picture_flags, run_folder
from megazero.errors import ConfigError, exit_status
from megazero.pictures.style import save, styled
from megazero.report.run_folder import run_name


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero moe-report",
        description="Show how many tokens each expert of each layer gets, against an even share, and name "
        "the experts that get next to none.",
    )
    parser.add_argument(
        "where",
        metavar="WHERE",
        type=run_folder,
        help="a file of --metrics-jsonl, a checkpoint, or a run's folder",
    )
    add_picture_flags(parser)
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.1,
        help="share of an even load below which an expert is dead (0.1)",
    )
    parser.add_argument(
        "--last",
        type=int,
        default=1,
        metavar="N",
        help="add up the last N records of the metrics (default 1)",
    )
    parser.add_argument(
        "--layer", type=int, help="the layer to draw over time (default: that of the idlest expert)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    return exit_status(lambda: _report(flags))


def _report(flags: argparse.Namespace) -> None:
    from megazero.commands.show import print_table

    _check(flags)
    records = read_loads(flags.where)
    latest = records[-flags.last :]
    shown = summed(latest)
    layer = _layer(flags.layer, shown)
    print(f"{_span(latest)}; a half bar is an even share, · is dead")
    print_table(COLUMNS, rows(shown, flags.threshold), left=2)
    print(verdict(shown, flags.threshold))
    if flags.output is not None:
        with styled(flags.theme):
            run = run_name(flags.where)
            save(figure_of(records, shown, layer, flags.threshold, run, flags.theme), flags.output)


def _check(flags: argparse.Namespace) -> None:
    violations = []
    if not 0 <= flags.threshold <= 1:
        violations.append(f"`--threshold` must be from 0 to 1, but is {flags.threshold:g}; correct it")
    if flags.last < 1:
        violations.append(f"`--last` must be at least 1, but is {flags.last}; raise it")
    if violations:
        raise ConfigError(violations)


def _layer(wanted: int | None, record: LoadRecord) -> int:
    known = [load.layer for load in record.layers]
    if wanted is not None and wanted not in known:
        raise ConfigError(
            f"`--layer` must be one with experts ({', '.join(map(str, known))}), but is {wanted}; correct it"
        )
    return idlest_layer(record) if wanted is None else wanted


def _span(latest: Sequence[LoadRecord]) -> str:
    if len(latest) == 1:
        return f"iteration {latest[0].iteration}"
    return f"{len(latest)} records, iterations {latest[0].iteration} to {latest[-1].iteration}"
