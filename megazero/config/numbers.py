"""Numbers as users write them: 1e6 and 300_000 are integers, because that is exact; true is no number."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from megazero.config.lists import Unreadable

_LARGEST_EXPONENT = 30  # 1e30 is more than any count here; 1e999999999 would fill the memory
_LONGEST_NUMBER = 40  # characters
_LARGEST = 2**63 - 1  # what an integer of 64 bits holds, as sample numbers and file offsets do


def read_int(value: Any) -> int:
    """An integer of 64 bits, from a number or its text. Raises Unreadable."""
    if isinstance(value, int) and not isinstance(value, bool):
        return of_64_bits(value)
    if isinstance(value, float | str):
        text = str(value).strip()
        if len(text) > _LONGEST_NUMBER:
            raise Unreadable("must be an integer of fewer digits")
        if re.fullmatch(r"[+-]?\d+(_\d+)*", text):
            return of_64_bits(int(text))
        if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
            return of_64_bits(_exact_int(text))
    raise Unreadable("must be an integer")


def of_64_bits(number: int) -> int:
    """The number. Raises Unreadable if it does not fit 64 bits."""
    if abs(number) > _LARGEST:
        raise Unreadable(f"must be an integer of at most 64 bits, no larger than {_LARGEST}")
    return number


def _exact_int(text: str) -> int:
    try:
        number = Decimal(text)
    except InvalidOperation as error:
        raise Unreadable("must be an integer") from error
    if number.adjusted() > _LARGEST_EXPONENT or number != number.to_integral_value():
        raise Unreadable("must be an integer")
    return int(number)


def read_float(value: Any) -> float:
    """A number that a float can hold, from a number or its text; infinite ones too. Raises Unreadable."""
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
