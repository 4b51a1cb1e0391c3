"""Turn the values that users write (a flag's text, a value in a YAML file) into values of the field's type.

Stricter than pydantic's lax mode where that would guess: `true` is not a number, `1.5` is not an integer, and
an integer may be written as 1e6 or 300_000 only because that is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from megazero.config.fields import FieldSpec, Kind
from megazero.config.metric_text import read_metrics
from megazero.config.numbers import (
    Unreadable,
    of_64_bits,
    plain_text,
    read_count,
    read_float,
    read_int,
    read_list,
)
from megazero.config.words import nearest


def coerce(spec: FieldSpec, value: object) -> object:
    """Convert `value` to the field's type; ranges are checked later, by the tree. Raises Unreadable."""
    if value is None:
        if not spec.optional:
            raise Unreadable("must not be null; leave the key out for the default")
        return None
    return _READERS[spec.kind](spec, value)


def _read_int(spec: FieldSpec, value: object) -> int:
    if isinstance(value, str) and value in spec.synonyms:
        return int(spec.synonyms[value])
    return read_count(value) if spec.is_endless else read_int(value)


def _read_text(spec: FieldSpec, value: object) -> str:
    if not isinstance(value, str):
        raise Unreadable("must be text; put it in quotes")
    return plain_text(value)


def _read_choice(spec: FieldSpec, value: object) -> str | int:
    if isinstance(spec.choices[0], int):
        return _read_numbered_choice(spec, value)
    by_lower: dict[str, str | int] = {choice.lower(): choice for choice in spec.choices}
    by_lower |= {word.lower(): choice for word, choice in spec.synonyms.items()}
    if isinstance(value, str) and value.lower() in by_lower:
        return by_lower[value.lower()]
    raise Unreadable(f"must be one of {', '.join(spec.choices)}{_why_not(spec, value)}")


def _why_not(spec: FieldSpec, value: object) -> str:
    """Say why a choice is not offered, or which offered one is nearest; empty if neither is known."""
    if not isinstance(value, str):
        return ""
    reasons = {name.lower(): f" ({name} {reason})" for name, reason in spec.refused.items()}
    hint = nearest(value, [*spec.choices, *spec.synonyms])
    return reasons.get(value.lower(), f" (did you mean {hint}?)" if hint else "")


def _read_numbered_choice(spec: FieldSpec, value: object) -> int:
    """Read one of a few integers; Megatron-DeepSpeed writes its default stage as 1.0, which is exact."""
    try:
        number = _read_int(spec, value)
    except Unreadable:
        number = None
    if number is None or number not in spec.choices:
        raise Unreadable(f"must be one of {', '.join(map(str, spec.choices))}")
    return number


def _read_bool(spec: FieldSpec, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise Unreadable("must be true or false")


def _items(value: object) -> Sequence[object]:
    if isinstance(value, str):
        return value.split()
    return list(value) if isinstance(value, list | tuple) else [value]


def _read_ints(spec: FieldSpec, value: object) -> tuple[int, ...]:
    items = _items(value)
    if spec.length is not None and len(items) == 1 and isinstance(items[0], str):  # as (128,0) in Megatron-LM
        items = items[0].strip("()").replace(",", " ").split()
    if spec.length is None and items and all(isinstance(item, str) for item in items):
        written = " ".join(map(str, items))
        if "[" in written:
            return tuple(map(of_64_bits, read_list(written)))
    if spec.length not in (None, len(items)):
        raise Unreadable(f"must be {spec.length} integers")
    return tuple(_read_int(spec, item) for item in items)


def _read_texts(spec: FieldSpec, value: object) -> tuple[str, ...]:
    """Read the texts of a list, or split one string at blanks, as a shell does."""
    items = _items(value)
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        raise Unreadable("must be a list of texts")
    return tuple(plain_text(str(item)) for item in items)


_READERS: Mapping[Kind, Callable[[FieldSpec, object], object]] = MappingProxyType(
    {
        Kind.INT: _read_int,
        Kind.FLOAT: lambda spec, value: read_float(value),
        Kind.TEXT: _read_text,
        Kind.CHOICE: _read_choice,
        Kind.BOOL: _read_bool,
        Kind.INTS: _read_ints,
        Kind.FLOATS: lambda spec, value: tuple(map(read_float, _items(value))),
        Kind.CHOICES: lambda spec, value: tuple(_read_choice(spec, item) for item in _items(value)),
        Kind.TEXTS: _read_texts,
        Kind.METRICS: lambda spec, value: read_metrics(value),
    }
)
