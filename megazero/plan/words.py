"""Format figures for people: bytes, large numbers, times, and runs of numbers."""

from __future__ import annotations

from collections.abc import Iterable

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TIMES = ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"))


def shown(size: float) -> str:
    """Bytes in a unit with one to four digits before the point: ``1.5 GiB``."""
    unit = 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"


def many(number: float, letters: str = "MBTP") -> str:
    """A large number with a letter for its power of 1000: ``174.62B``; for rates, pass ``MGTP``."""
    power = min(len(letters), max(0, len(f"{number:.0f}") - 4) // 3)
    return f"{number / 1000 ** (power + 1):,.2f}{letters[power - 1]}" if power else f"{number:,.0f}"


def time_text(seconds: float) -> str:
    """Seconds in the usual unit: ``20.7 days``, ``1.36 s``, ``6.8 ms``."""
    for size, unit in _TIMES:
        if seconds >= 2 * size:
            return f"{seconds / size:,.{2 if size == 1 else 1}f} {unit}"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def money(amount: float) -> str:
    """An amount of any currency: ``48,200.00``, ``0.0031``."""
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.2g}"


def runs(numbers: Iterable[int]) -> str:
    """Ascending numbers, with runs of neighbours as two ends: ``0-3, 5``."""
    ends: list[list[int]] = []
    for number in numbers:
        if ends and number == ends[-1][-1] + 1:
            ends[-1][1:] = [number]
        else:
            ends.append([number])
    return ", ".join("-".join(map(str, run)) for run in ends)
