"""Turns what a user wrote (a flag's text, a value in a YAML file) into a value of the field's type.

Stricter than pydantic's lax mode where that would guess: `true` is not a number, `1.5` is not an integer, and
an integer may be written as 1e6 or 300_000 only because that is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from types import MappingProxyType
from typing import Any

from megazero.config.fields import FieldSpec, Kind
from megazero.config.lists import Unreadable, read_list

_LARGEST_EXPONENT = 30  # 1e30 is more than any count here; 1e999999999 would fill the memory
_LONGEST_NUMBER = 40  # characters
_LARGEST = 2**63 - 1  # what an integer of 64 bits holds, as sample numbers and file offsets do


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` may stand for, ignoring case and `_` versus `-`; None if there is none.

    It is the shortest word that starts with `word`, or else the one that is the fewest edits away, if that
    is no more than one edit for every four letters.
    """
    given = _plain(word)
    words = list(known)
    longer = sorted((len(each), each) for each in words if len(given) > 3 and _plain(each).startswith(given))
    if longer:
        return longer[0][1]
    near = sorted((distance, each) for each in words if (distance := _edits(given, _plain(each))) is not None)
    return near[0][1] if near else None


def _plain(word: str) -> str:
    return word.lower().replace("_", "-").lstrip("-")


def _edits(word: str, other: str) -> int | None:
    """How many letters must be changed, added, left out or swapped; None if too many."""
    most = max(1, len(word) // 4)
    if abs(len(word) - len(other)) > most:
        return None
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(word):
        earlier, before, row = before, row, [i + 1]
        for j, theirs in enumerate(other):
            cheapest = min(before[j] + (letter != theirs), before[j + 1] + 1, row[j] + 1)
            if i and j and letter == other[j - 1] and word[i - 1] == theirs:
                cheapest = min(cheapest, earlier[j - 1] + 1)
            row.append(cheapest)
    return row[-1] if row[-1] <= most else None


def coerce(spec: FieldSpec, value: Any) -> Any:
    """`value` as the field's type; ranges are checked later, by the tree. Raises Unreadable."""
    if value is None:
        if not spec.optional:
            raise Unreadable("must not be null; leave the key out for the default")
        return None
    return _READERS[spec.kind](spec, value)


def _read_int(spec: FieldSpec, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return _of_64_bits(value)
    if isinstance(value, float | str):
        text = str(value).strip()
        if len(text) > _LONGEST_NUMBER:
            raise Unreadable("must be an integer of fewer digits")
        if re.fullmatch(r"[+-]?\d+(_\d+)*", text):
            return _of_64_bits(int(text))
        if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
            return _of_64_bits(_exact_int(text))
    raise Unreadable("must be an integer")


def _of_64_bits(number: int) -> int:
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


def _read_float(spec: FieldSpec, value: Any) -> float:
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


def _read_text(spec: FieldSpec, value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable("must be text; put it in quotes")
    return value


def _read_choice(spec: FieldSpec, value: Any) -> Any:
    if isinstance(spec.choices[0], int):
        return _read_numbered_choice(spec, value)
    by_lower = {choice.lower(): choice for choice in spec.choices}
    by_lower |= {word.lower(): choice for word, choice in spec.synonyms.items()}
    if isinstance(value, str) and value.lower() in by_lower:
        return by_lower[value.lower()]
    raise Unreadable(f"must be one of {', '.join(spec.choices)}{_why_not(spec, value)}")


def _why_not(spec: FieldSpec, value: Any) -> str:
    """Why this choice is not offered, or the nearest one that is."""
    if not isinstance(value, str):
        return ""
    reasons = {name.lower(): f" ({name} {reason})" for name, reason in spec.refused.items()}
    hint = nearest(value, [*spec.choices, *spec.synonyms])
    return reasons.get(value.lower(), f" (did you mean {hint}?)" if hint else "")


def _read_numbered_choice(spec: FieldSpec, value: Any) -> int:
    """One of a few integers; Megatron-DeepSpeed writes its default stage as 1.0, which is exact."""
    try:
        number = _read_int(spec, value)
    except Unreadable:
        number = None
    if number not in spec.choices:
        raise Unreadable(f"must be one of {', '.join(map(str, spec.choices))}")
    return number


def _read_bool(spec: FieldSpec, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise Unreadable("must be true or false")


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        return value.split()
    return list(value) if isinstance(value, list | tuple) else [value]


def _read_ints(spec: FieldSpec, value: Any) -> tuple[int, ...]:
    items = _items(value)
    if spec.length is None and items and all(isinstance(item, str) for item in items):
        written = " ".join(items)
        if "[" in written:
            return tuple(map(_of_64_bits, read_list(written)))
    if spec.length not in (None, len(items)):
        raise Unreadable(f"must be {spec.length} integers")
    return tuple(_read_int(spec, item) for item in items)


def _read_floats(spec: FieldSpec, value: Any) -> tuple[float, ...]:
    return tuple(_read_float(spec, item) for item in _items(value))


def _read_choices(spec: FieldSpec, value: Any) -> tuple[Any, ...]:
    return tuple(_read_choice(spec, item) for item in _items(value))


def _read_texts(spec: FieldSpec, value: Any) -> tuple[str, ...]:
    """A list is kept as it is; a single string is split at blanks, as a shell splits a flag's values."""
    items = _items(value)
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        raise Unreadable("must be a list of texts")
    return tuple(str(item) for item in items)


_READERS: Mapping[Kind, Callable[[FieldSpec, Any], Any]] = MappingProxyType(
    {
        Kind.INT: _read_int,
        Kind.FLOAT: _read_float,
        Kind.TEXT: _read_text,
        Kind.CHOICE: _read_choice,
        Kind.BOOL: _read_bool,
        Kind.INTS: _read_ints,
        Kind.FLOATS: _read_floats,
        Kind.CHOICES: _read_choices,
        Kind.TEXTS: _read_texts,
    }
)
