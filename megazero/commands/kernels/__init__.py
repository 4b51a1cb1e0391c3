"""The command `megazero kernels`: build the CUDA kernels, and show what they do and need."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megazero.errors import ConfigError, exit_status
from megazero.kernels.build import (
    ARCHITECTURES,
    build,
    cuda_recipe,
    find_nvcc,
    on_cpu_recipe,
    refuse_warnings,
)

BEGIN, END = "<!-- kernels: begin -->", "<!-- kernels: end -->"


def build_parser() -> argparse.ArgumentParser:
    """Build a parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="megazero kernels", description="Build the CUDA kernels, or show what they do and need."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    builder = verbs.add_parser("build", help="compile them, if that is not done yet, and say where they are")
    builder.add_argument("--on-cpu", action="store_true", help="with a C++ compiler, to be run on the CPU")
    builder.add_argument(
        "--architectures",
        nargs="+",
        metavar="sm_NN",
        help=f"the GPUs to compile for (default: those of {' '.join(ARCHITECTURES)} that nvcc knows)",
    )
    builder.add_argument("--strict", action="store_true", help="a warning of the compiler's is an error")
    report = verbs.add_parser(
        "report",
        help="run each kernel on the CPU and count its bytes, sectors and conflicts, beside registers and "
        "occupancy as nvcc gives them",
    )
    report.add_argument("--json", action="store_true", help="print JSON lines")
    report.add_argument("--no-nvcc", action="store_true", help="leave out what nvcc says (it takes minutes)")
    report.add_argument("--update", type=Path, metavar="PAGE", help="write the table into this page instead")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command with its flags; returns the exit status."""
    flags = build_parser().parse_args(argv)
    return exit_status(lambda: _build(flags) if flags.verb == "build" else _report(flags))


def _build(flags: argparse.Namespace) -> None:
    library = build(on_cpu_recipe() if flags.on_cpu else cuda_recipe(flags.architectures))
    if flags.strict:
        refuse_warnings(library)
    print(library)


def _report(flags: argparse.Namespace) -> None:
    # torch, which these need, takes seconds to load.
    from megazero.commands.kernels.table import kernel_rows, markdown, measured_operators

    page = _page(flags.update) if flags.update else None
    with_nvcc = not flags.no_nvcc
    if with_nvcc and find_nvcc() is None:
        print("nvcc is not found, so registers and occupancy are left out")
        with_nvcc = False
    rows = kernel_rows(measured_operators(), with_nvcc)
    if flags.json:
        for row in rows:
            print(json.dumps(row.as_json()))
    elif page is not None:
        before, after = page
        flags.update.write_text(f"{before}{BEGIN}\n\n{markdown(rows)}\n{END}{after}", encoding="utf-8")
        print(f"{flags.update} has {len(rows)} rows")
    else:
        print(markdown(rows), end="")


def _page(path: Path) -> tuple[str, str]:
    """The text of a page before and after its table. Raises ConfigError if the table's marks are missing."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN not in text or END not in text:
        raise ConfigError(f"`--update` must be a page with the lines `{BEGIN}` and `{END}`, but is {path}.")
    return text.partition(BEGIN)[0], text.partition(END)[2]
