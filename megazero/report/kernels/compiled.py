"""What the compiler for GPUs says of the kernels, and how many of their threads fit on a device at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>sm_\d+)'.*?"
    r"(?P<spilled>\d+) bytes spill stores.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)
# Registers, warps and blocks of a multiprocessor: alike on all; shared memory (KiB) is not.
_REGISTERS, _WARPS, _BLOCKS = 65536, 64, 32
_REGISTER_UNIT = 256  # registers are given to warps by this many
_SHARED_KIB = MappingProxyType({"sm_80": 164, "sm_90": 228, "sm_100": 228})
_RESERVED_SHARED = 1024  # bytes of each block


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one architecture; of its template's instances, the one that needs most.

    Attributes:
        registers: of a thread.
        spilled: bytes of registers that a thread keeps in memory.
        instances: how many there are.
    """

    registers: int
    spilled: int
    instances: int


def read_compiled(log: str) -> dict[tuple[str, str], CompiledKernel]:
    """(kernel, architecture) -> what `ptxas -v` said of it in the build's log."""
    found: dict[tuple[str, str], CompiledKernel] = {}
    for entry in _ENTRY.finditer(log):
        key = (_kernel_name(entry["name"]), entry["arch"])
        before = found.get(key, CompiledKernel(0, 0, 0))
        found[key] = CompiledKernel(
            max(before.registers, int(entry["registers"])),
            max(before.spilled, int(entry["spilled"])),
            before.instances + 1,
        )
    return found


def _kernel_name(mangled: str) -> str:
    """The last of the names in `_ZN8megazero4nameI...`, which stand there with their lengths."""
    names, rest = [], mangled.removeprefix("_ZN").removeprefix("_Z")
    while (length := re.match(r"\d+", rest)) is not None:
        begin, size = length.end(), int(length[0])
        names.append(rest[begin : begin + size])
        rest = rest[begin + size :]
    return names[-1]


def occupancy(architecture: str, registers: int, threads: int, shared_bytes: int) -> float:
    """The share of a multiprocessor's warps that blocks of this shape can fill: 0 to 1."""
    warps = math.ceil(threads / 32)
    per_warp = math.ceil(registers * 32 / _REGISTER_UNIT) * _REGISTER_UNIT
    shared: Mapping[str, int] = _SHARED_KIB
    blocks = min(
        _BLOCKS,
        _WARPS // warps,
        _REGISTERS // (per_warp * warps),
        shared[architecture] * 1024 // (shared_bytes + _RESERVED_SHARED),
    )
    return blocks * warps / _WARPS
