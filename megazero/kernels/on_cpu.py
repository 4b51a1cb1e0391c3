"""Run csrc/*/cuda.cu on the CPU, compiled by a C++ compiler, and count what each kernel does.

csrc/common/cuda_on_cpu.h imitates CUDA, and csrc/common/on_cpu/watch.hpp counts.
"""

from __future__ import annotations

import ctypes
import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megazero.kernels.library import MOST_GROUPS, Argument, KernelLibrary, tensors_among


class ThreadOrder(enum.Enum):
    """The order in which a block's threads run; without a needed barrier, results depend on it."""

    FORWARD = 0
    BACKWARD = 1
    SHUFFLED = 2


@dataclass(frozen=True)
class MemoryCounts:
    """A kernel's accesses of memory.

    Attributes:
        bytes_read, bytes_written: bytes of device memory that threads read and wrote, without cached reads.
        cached_bytes: distinct bytes read from tensors that stay in the device's cache (a norm's weight).
        sectors: 32-byte sectors that warps touched, without cached reads.
        ideal_sectors: the fewest sectors that the same bytes fit in.
        shared_accesses: accesses of shared memory by warps.
        bank_conflicts: further cycles that these accesses took because lanes met in a bank.
    """

    bytes_read: int
    bytes_written: int
    cached_bytes: int
    sectors: int
    ideal_sectors: int
    shared_accesses: int
    bank_conflicts: int

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written, and each cached byte once."""
        return self.bytes_read + self.bytes_written + self.cached_bytes


@dataclass(frozen=True)
class MistakeCounts:
    """How often a kernel did what no kernel may do.

    Attributes:
        races: accesses of one address by two threads, one of them a write, without a barrier between.
        divergent_barriers: barriers or warp operations that some threads did not reach.
        out_of_bounds: accesses outside of the tensors and shared arrays.
        misaligned: accesses at addresses that are no multiple of their size.
        unwritten_reads: reads of shared memory that no thread had written.
        bad_launches: launches that exceed a device's limits.
    """

    races: int
    divergent_barriers: int
    out_of_bounds: int
    misaligned: int
    unwritten_reads: int
    bad_launches: int

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class KernelCounts:
    """Counts of what one kernel did over all its launches.

    Attributes:
        launches: number of launches.
        threads_per_block: the most threads of a block.
        shared_bytes: the most shared memory of a block, static and dynamic.
        memory: counts of memory accesses.
        mistakes: counts of forbidden actions.
    """

    launches: int
    threads_per_block: int
    shared_bytes: int
    memory: MemoryCounts
    mistakes: MistakeCounts

    @classmethod
    def read(cls, counts: Mapping[str, int]) -> KernelCounts:
        """Parse the counts that the library reports by name."""
        own, memory, mistakes = (
            {field.name: counts[field.name] for field in fields(kind) if field.name in counts}
            for kind in (cls, MemoryCounts, MistakeCounts)
        )
        return cls(**own, memory=MemoryCounts(**memory), mistakes=MistakeCounts(**mistakes))


@dataclass(frozen=True)
class WatchReport:
    """The counts of each kernel, and a sentence for each of the first faults."""

    kernels: dict[str, KernelCounts]
    faults: tuple[str, ...]


class WatchedLibrary(KernelLibrary):
    """Kernels that run on the CPU, on CPU tensors; an access outside of a launch's tensors is a fault."""

    def __init__(self, path: Path, order: ThreadOrder = ThreadOrder.FORWARD, seed: int = 0) -> None:
        """Load the library; a block's threads run in `order`, shuffled by `seed`."""
        super().__init__(path)
        self._order = (order.value, seed)
        self._library.megazero_on_cpu_report.restype = ctypes.c_char_p
        self._library.megazero_on_cpu_declare.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._library.megazero_on_cpu_order.argtypes = [ctypes.c_int64, ctypes.c_int64]

    def column_groups(self, count: int, width: int) -> int:
        """As the library says, but at most MOST_GROUPS, so that small inputs have several rows per group."""
        return min(super().column_groups(count, width), MOST_GROUPS)

    def launch(self, name: str, *arguments: Argument) -> None:
        """Launch as `KernelLibrary.launch` does; the kernel may touch the memory of the arguments alone."""
        for tensor in tensors_among(arguments):
            if tensor.numel():
                size = tensor.numel() * tensor.element_size()
                self._library.megazero_on_cpu_declare(tensor.data_ptr(), size)
        try:
            super().launch(name, *arguments)
        finally:
            self._library.megazero_on_cpu_forget()

    def report(self) -> WatchReport:
        """The counts and faults of this thread's launches since the last `reset`."""
        report = json.loads(self._library.megazero_on_cpu_report())
        kernels = {name: KernelCounts.read(counts) for name, counts in report["kernels"].items()}
        return WatchReport(kernels, tuple(report["faults"]))

    def reset(self) -> None:
        """Forget counts and faults."""
        self._library.megazero_on_cpu_reset()

    def _start(self, function: Any, values: list[Any], device: int) -> int:
        self._library.megazero_on_cpu_order(*self._order)
        code: int = function(*values, None)
        return code
