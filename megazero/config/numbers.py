"""Numbers as users write them: 1e6 and 300_000 are integers, because that is exact; true is no number."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from megazero.config.lists import Unreadable

_LARGEST_EXPONENT = 30  # 1e30 is more than any count here; 1e999999999 would fill the memory
_BEYOND = Decimal(10) ** _LARGEST_EXPONENT  # stands for all that is larger
_LONGEST_NUMBER = 40  # characters
LARGEST = 2**63 - 1
"""The largest integer of 64 bits, in which samples and file offsets are numbered."""


def read_int(value: Any) -> int:
    """Read an integer of 64 bits from a number or its text. Raises Unreadable."""
    return of_64_bits(_any_int(value))


def read_count(value: Any) -> int:
    """Read a count; one beyond 64 bits, which no run reaches, becomes the largest. Raises Unreadable."""
    return of_64_bits(min(_any_int(value), LARGEST))


def _any_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float | str):
        text = str(value).strip()
        if len(text) > _LONGEST_NUMBER:
            raise Unreadable("must be an integer of fewer digits")
        if re.fullmatch(r"[+-]?\d+(_\d+)*", text):
            return int(text)
        if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
            return _exact_int(text)
    raise Unreadable("must be an integer")


def of_64_bits(number: int) -> int:
    """Return the number. Raises Unreadable if it does not fit 64 bits."""
    if abs(number) > LARGEST:
        raise Unreadable(f"must be an integer of at most 64 bits, no larger than {LARGEST}")
    return number


def _exact_int(text: str) -> int:
    try:
        number = Decimal(text)
    except InvalidOperation as error:
        raise Unreadable("must be an integer") from error
    if number != number.to_integral_value():
        raise Unreadable("must be an integer")
    return int(number) if number.adjusted() <= _LARGEST_EXPONENT else int(_BEYOND.copy_sign(number))


def read_float(value: Any) -> float:
    """Read a float, also an infinite one, from a number or its text. Raises Unreadable."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise Unreadable("must be a number that a float can hold") from error
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError as error:
            raise Unreadable("must be a number") from error
    raise Unreadable("must be a number")
