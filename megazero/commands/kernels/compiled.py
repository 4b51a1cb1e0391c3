"""The registers of compiled kernels, as ptxas reports them, and the occupancy that follows."""

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
# Registers, warps and blocks of a multiprocessor, the same on all these architectures.
_REGISTERS, _WARPS, _BLOCKS = 65536, 64, 32
_REGISTER_UNIT = 256  # a warp's registers are allocated in multiples of this
_SHARED_KIB: Mapping[str, int] = MappingProxyType({"sm_80": 164, "sm_90": 228, "sm_100": 228})
_RESERVED_SHARED = 1024  # bytes of each block


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel compiled for one architecture; the figures are maxima over its template's instances.

    Attributes:
        registers: registers of a thread.
        spilled: bytes of registers that a thread keeps in memory.
        instances: number of the template's instances.
    """

    registers: int
    spilled: int
    instances: int


def read_compiled(log: str) -> dict[tuple[str, str], CompiledKernel]:
    """Read the output of `ptxas -v` in a build's log, by (kernel, architecture)."""
    kernels: dict[tuple[str, str], CompiledKernel] = {}
    for entry in _ENTRY.finditer(log):
        key = (_kernel_name(entry["name"]), entry["arch"])
        before = kernels.get(key, CompiledKernel(0, 0, 0))
        kernels[key] = CompiledKernel(
            max(before.registers, int(entry["registers"])),
            max(before.spilled, int(entry["spilled"])),
            before.instances + 1,
        )
    return kernels


def _kernel_name(mangled: str) -> str:
    """The last name in a mangled symbol, `_ZN8megazero4nameI...`, where each name follows its length."""
    names, rest = [], mangled.removeprefix("_ZN").removeprefix("_Z")
    while (length := re.match(r"\d+", rest)) is not None:
        begin, size = length.end(), int(length[0])
        names.append(rest[begin : begin + size])
        rest = rest[begin + size :]
    return names[-1]


def occupancy(architecture: str, registers: int, threads: int, shared_bytes: int) -> float:
    """The share of a multiprocessor's warps, 0 to 1, that blocks of this shape can fill."""
    warps = math.ceil(threads / 32)
    per_warp = math.ceil(registers * 32 / _REGISTER_UNIT) * _REGISTER_UNIT
    blocks = min(
        _BLOCKS,
        _WARPS // warps,
        _REGISTERS // (per_warp * warps),
        _SHARED_KIB[architecture] * 1024 // (shared_bytes + _RESERVED_SHARED),
    )
    return blocks * warps / _WARPS
