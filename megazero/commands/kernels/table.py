"""The table of kernels: each case run on the CPU, beside what the compiler for GPUs says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megazero.commands.kernels.case import KernelCase
from megazero.commands.kernels.compiled import CompiledKernel, occupancy, read_compiled
from megazero.kernels.build import ARCHITECTURES, build, cuda_recipe, on_cpu_recipe
from megazero.kernels.on_cpu import KernelCounts, WatchedLibrary


@dataclass(frozen=True)
class KernelRow:
    """The measurements of a kernel in a case.

    Attributes:
        kernel, case: their names.
        counts: the bytes, sectors and conflicts of the kernel.
        must_move: the bytes that the kernel must move, None if the case does not say.
        scattered: the reason why its sectors are not ideal; empty if they must be.
        compiled: the needs of the kernel by architecture; empty without nvcc.
    """

    kernel: str
    case: str
    counts: KernelCounts
    must_move: int | None
    scattered: str
    compiled: Mapping[str, CompiledKernel]

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes moved per byte that must move."""
        return self.counts.bytes_moved / self.must_move if self.must_move else None

    @property
    def sectors_ratio(self) -> float:
        """32-byte sectors touched per sector that its bytes fit in."""
        return self.counts.sectors / max(self.counts.ideal_sectors, 1)

    def occupancy(self, architecture: str) -> float:
        """The share of a multiprocessor's warps that its blocks can fill."""
        registers = self.compiled[architecture].registers
        return occupancy(architecture, registers, self.counts.threads_per_block, self.counts.shared_bytes)

    def problems(self) -> list[str]:
        """The bounds on every kernel that this one breaks in its case: a sentence each."""
        counts, where = self.counts, f"`{self.kernel}` in {self.case}"
        sentences = []
        if counts.mistakes:
            sentences.append(f"{where} must make no mistake, but makes {counts.mistakes}")
        if counts.bank_conflicts:
            sentences.append(f"{where} must have no bank conflict, but has {counts.bank_conflicts}")
        # Fewer bytes than it must move would mean that the case is wrong.
        if self.bytes_ratio is None or not 0.99 <= self.bytes_ratio <= 1.05:
            sentences.append(
                f"{where} must move at most 1.05 of the bytes that it must, but moves {self.bytes_ratio}"
            )
        if not self.scattered and self.sectors_ratio > 1.1:
            sentences.append(
                f"{where} must touch at most 1.1 of the sectors, but touches {self.sectors_ratio:.3f}"
            )
        return sentences

    def as_json(self) -> dict[str, object]:
        """The whole row as a JSON object."""
        return {
            "kernel": self.kernel,
            "case": self.case,
            "must_move": self.must_move,
            "bytes_ratio": self.bytes_ratio,
            "sectors_ratio": self.sectors_ratio,
            "scattered": self.scattered,
            **asdict(self.counts),
            **{
                architecture: {**asdict(kernel), "occupancy": self.occupancy(architecture)}
                for architecture, kernel in self.compiled.items()
            },
        }


def kernel_rows(cases: Iterable[KernelCase], compiled_by_nvcc: bool) -> list[KernelRow]:
    """Run the cases and return the rows of their kernels, in order.

    The library for the CPU, and with `compiled_by_nvcc` the one for GPUs, is built if it is not there yet.
    Raises BuildError if one cannot be built.
    """
    library = WatchedLibrary(build(on_cpu_recipe()))
    compiled = read_compiled(_cuda_log()) if compiled_by_nvcc else {}
    rows = []
    for case in cases:
        library.reset()
        case.run(library)
        for kernel, counts in library.report().kernels.items():
            by_architecture = {a: compiled[kernel, a] for a in ARCHITECTURES if (kernel, a) in compiled}
            rows.append(
                KernelRow(
                    kernel,
                    case.name,
                    counts,
                    case.must_move.get(kernel),
                    case.scattered.get(kernel, ""),
                    by_architecture,
                )
            )
    return rows


def _cuda_log() -> str:
    return Path(build(cuda_recipe())).with_suffix(".log").read_text(encoding="utf-8")


def markdown(rows: Iterable[KernelRow]) -> str:
    """The rows as a Markdown table, with notes below it."""
    numbers = " / ".join(name.removeprefix("sm_") for name in ARCHITECTURES)
    lines = [
        "| kernel | case | bytes / must | sectors / ideal | conflicts | threads | shared B "
        f"| registers {numbers} | spilled B {numbers} | occupancy {numbers} |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for row in rows:
        mark = ""
        if row.scattered:
            if row.scattered not in notes:
                notes.append(row.scattered)
            mark = f" [{notes.index(row.scattered) + 1}]"
        kernels = [row.compiled.get(a) for a in ARCHITECTURES]
        registers = " / ".join("-" if kernel is None else str(kernel.registers) for kernel in kernels)
        spilled = " / ".join("-" if kernel is None else str(kernel.spilled) for kernel in kernels)
        shares = " / ".join(f"{row.occupancy(a):.0%}" if a in row.compiled else "-" for a in ARCHITECTURES)
        ratio = "-" if row.bytes_ratio is None else f"{row.bytes_ratio:.3f}"
        counts = row.counts
        work = (f"`{row.kernel}`", row.case, ratio, f"{row.sectors_ratio:.3f}{mark}", counts.bank_conflicts)
        needs = (counts.threads_per_block, counts.shared_bytes, registers, spilled, shares)
        lines.append(f"| {' | '.join(map(str, (*work, *needs)))} |")
    return "\n".join([*lines, "", *(f"[{i}] {note}" for i, note in enumerate(notes, 1))]).rstrip() + "\n"
