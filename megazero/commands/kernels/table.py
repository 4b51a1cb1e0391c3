"""The table of kernels: what operators' large examples do on the CPU, and what nvcc says of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megazero.commands.kernels.compiled import CompiledKernel, occupancy, read_compiled
from megazero.kernels.build import ARCHITECTURES, build, cuda_recipe, on_cpu_recipe
from megazero.kernels.library import KernelLibrary
from megazero.kernels.on_cpu import KernelCounts, WatchedLibrary
from megazero.ops import operators
from megazero.ops.dispatch import Operator
from megazero.ops.example import Example, Traffic
from megazero.ops.update import UPDATE, StepFacts, UpdateCall, has_kernels
from megazero.optim.elementwise import ELEMENTWISE, Elementwise

COUNT = 3 << 14
_BF16 = MappingProxyType({"bf16": torch.bfloat16})


@dataclass(frozen=True)
class KernelRow:
    """The measurements of a kernel in a case.

    Attributes:
        kernel: the kernel's name.
        case: the label of the operator's example, with the inputs' dtype.
        counts: counts of what the kernel did on the CPU.
        must_move: the bytes that the kernel must move; None if the example does not say.
        scattered: why the kernel may touch more sectors than its bytes fit in; empty if it may not.
        compiled: the compiled kernel by architecture; empty without nvcc.
    """

    kernel: str
    case: str
    counts: KernelCounts
    must_move: int | None
    scattered: str
    compiled: Mapping[str, CompiledKernel]

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes moved, as a multiple of the bytes that must move."""
        return self.counts.memory.bytes_moved / self.must_move if self.must_move else None

    @property
    def sectors_ratio(self) -> float:
        """32-byte sectors touched, as a multiple of the fewest that the same bytes fit in."""
        return self.counts.memory.sectors / max(self.counts.memory.ideal_sectors, 1)

    def occupancy(self, architecture: str) -> float:
        """The share of a multiprocessor's warps that its blocks can fill."""
        registers = self.compiled[architecture].registers
        return occupancy(architecture, registers, self.counts.threads_per_block, self.counts.shared_bytes)

    def problems(self) -> list[str]:
        """A sentence for each bound that the kernel breaks in this case."""
        counts, where = self.counts, f"`{self.kernel}` in {self.case}"
        sentences = []
        if counts.mistakes.total:
            sentences.append(f"{where} must make no mistake, but makes {counts.mistakes.total}")
        if counts.memory.bank_conflicts:
            sentences.append(f"{where} must have no bank conflict, but has {counts.memory.bank_conflicts}")
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
        """The row as a JSON object."""
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


def kernel_rows(examples: Iterable[tuple[Operator[Any], Example]], compiled_by_nvcc: bool) -> list[KernelRow]:
    """Run `measured_operators` on the CPU; returns a row for each kernel, example and dtype.

    Builds the library for the CPU, and with `compiled_by_nvcc` the one for GPUs, unless they exist. Raises
    BuildError if one cannot be built.
    """
    library = WatchedLibrary(build(on_cpu_recipe()))
    compiled = {}
    if compiled_by_nvcc:
        log = build(cuda_recipe()).with_suffix(".log")
        compiled = read_compiled(log.read_text(encoding="utf-8"))
    rows = []
    for operator, example in examples:
        traffic = example.traffic
        assert traffic is not None, "measured_operators leaves out examples without traffic"
        for name, dtype in traffic.dtypes.items():
            library.reset()
            run_by_kernels(operator, example, dtype, library)
            must_move = traffic.must_move(dtype)
            for kernel, counts in library.report().kernels.items():
                rows.append(
                    KernelRow(
                        kernel,
                        f"{example.label} {name}".rstrip(),
                        counts,
                        must_move.get(kernel),
                        traffic.scattered.get(kernel, ""),
                        {a: compiled[kernel, a] for a in ARCHITECTURES if (kernel, a) in compiled},
                    )
                )
    return rows


def measured_operators() -> list[tuple[Operator[Any], Example]]:
    """Pairs of an operator and an example that says what bytes its kernels must move."""
    pairs = [(operator, example) for operator in operators() for example in operator.examples()]
    pairs += [(UPDATE, example) for example in update_examples()]
    return [(operator, example) for operator, example in pairs if example.traffic is not None]


def update_examples() -> Iterator[Example]:
    """A step of each elementwise optimizer with kernels, which reads or writes all of its tensors once."""
    for rule in filter(has_kernels, ELEMENTWISE.values()):
        yield _example(rule())


def _example(rule: Elementwise) -> Example:
    kinds = len(rule.state_names)
    moved = {f"{rule.name}_update": (8 * (1 + kinds) + 2 + 2) * COUNT}

    def call(f: Callable[[UpdateCall], None]) -> None:
        master, *state = (torch.rand(COUNT) for _ in range(1 + kinds))
        grad, weights = (torch.rand(COUNT).bfloat16() for _ in range(2))
        f(UpdateCall(rule, StepFacts(1, 1e-3, 0.1), [master], [grad], [state], [weights]))

    return Example(rule.name, (), call, traffic=Traffic(lambda dtype: moved, _BF16))


def run_by_kernels(
    operator: Operator[Any], example: Example, dtype: torch.dtype, library: KernelLibrary
) -> None:
    """Run an example, forward and backward, by the operator's CUDA kernels in a library."""
    row = next(row for row in operator.implementations if row.name == "cuda")
    inputs = [
        torch.randn(shape).to(dtype).requires_grad_(operator.differentiable) for shape in example.shapes
    ]
    results = example.call(partial(row.fn, kernels=library), *inputs)
    if operator.differentiable and example.shapes:
        outs = (results,) if isinstance(results, Tensor) else results or ()
        torch.autograd.backward(outs, [torch.randn_like(out) for out in outs])


def markdown(rows: Iterable[KernelRow]) -> str:
    """Format the rows as a Markdown table, with notes below it."""
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
        work = (
            f"`{row.kernel}`",
            row.case,
            ratio,
            f"{row.sectors_ratio:.3f}{mark}",
            counts.memory.bank_conflicts,
        )
        needs = (counts.threads_per_block, counts.shared_bytes, registers, spilled, shares)
        lines.append(f"| {' | '.join(map(str, (*work, *needs)))} |")
    return "\n".join([*lines, "", *(f"[{i}] {note}" for i, note in enumerate(notes, 1))]).rstrip() + "\n"
