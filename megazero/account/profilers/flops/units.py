"""Format FLOPs, parameters and seconds with units, as DeepSpeed's reports do."""

from __future__ import annotations

from types import MappingProxyType

_UNITS = MappingProxyType({"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6})


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """A number and its unit: ``1.5 K``."""
    if units is None:
        units = next((unit for unit, size in _UNITS.items() if num >= size), "u" if num else "")
    return f"{round(num / _UNITS.get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiply-accumulate operations: ``1.5 KMACs``."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """FLOPs per second: ``1.5 KFLOPS``."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Bytes: ``1.5 KB``."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Parameters: ``1.5 B`` is 1.5e9."""
    units = "G" if units == "B" else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds: ``1.5 ms``."""
    return f"{number_to_string(duration, units, precision)}s"
