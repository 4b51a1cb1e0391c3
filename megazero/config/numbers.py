"""Numbers and lists of integers as users write them.

1e6 and 300_000 are integers, because that is exact; true is no number. Lists may be as in scripts of
Megatron-LM, `([0]*3+[1]*21)`, and are read without evaluating them.
"""

from __future__ import annotations

import ast
import re
from decimal import Decimal, InvalidOperation

_LARGEST_EXPONENT = 30  # 1e30 is more than any count here; 1e999999999 would fill the memory
_BEYOND = Decimal(10) ** _LARGEST_EXPONENT  # stands for all that is larger
_LONGEST_NUMBER = 40  # characters; the time to convert more grows with their square
LARGEST = 2**63 - 1
"""The largest integer of 64 bits, in which samples and file offsets are numbered."""
_LONGEST_TEXT = 2000  # characters
_MOST_ITEMS = 10_000
_FORM = "must be integers, or a list such as ([0]*3+[1]*21)"


class Unreadable(ValueError):
    """A value does not have the field's type. The message says what it must be: "must be an integer"."""


def read_int(value: object) -> int:
    """Read an integer of 64 bits from a number or its text. Raises Unreadable."""
    return of_64_bits(_any_int(value))


def read_count(value: object) -> int:
    """Read a count; one beyond 64 bits, which no run reaches, becomes the largest. Raises Unreadable."""
    return of_64_bits(min(_any_int(value), LARGEST))


def _any_int(value: object) -> int:
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


def read_float(value: object) -> float:
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


def plain_text(text: str) -> str:
    """Return the text.

    Raises:
        Unreadable: it has a lone surrogate, other than one for a byte of a name that is not UTF-8 (PEP 383).
    """
    if any("\ud800" <= c <= "\udfff" and not "\udc80" <= c <= "\udcff" for c in text):
        raise Unreadable("must be text that can be written, without half a surrogate pair")
    return text


def read_list(text: str) -> list[int]:
    """Read an expression of lists, integers, `+`, `*` and parentheses, as in Python, and return its list.

    Raises:
        Unreadable: `text` is not such an expression, or the list would be too long.
    """
    if len(text) > _LONGEST_TEXT:
        raise Unreadable(f"must be written in at most {_LONGEST_TEXT} characters")
    try:
        items = _value(ast.parse(text.strip(), mode="eval").body)
    except Unreadable:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(_FORM) from error
    if not isinstance(items, list):
        raise Unreadable(_FORM)
    return items


def _value(node: ast.expr) -> list[int] | int:
    if isinstance(node, ast.List):
        return [_integer(item) for item in node.elts]
    if not isinstance(node, ast.BinOp):
        return _integer(node)
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return _joined(left + right, 1)
    if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
        return _joined(left, right)
    if isinstance(node.op, ast.Mult) and isinstance(left, int) and isinstance(right, list):
        return _joined(right, left)
    raise Unreadable(_FORM)


def _joined(items: list[int], times: int) -> list[int]:
    if len(items) * times > _MOST_ITEMS:
        raise Unreadable(f"must have at most {_MOST_ITEMS} items")
    return items * times


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise Unreadable(_FORM)
