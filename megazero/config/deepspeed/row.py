"""The row of the DeepSpeed table: one JSON key, the values that it may have, and its effect."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

AUTO = "auto"
LARGEST = 2**63 - 1
"""The largest integer of 64 bits."""


class Nothing(Enum):
    """The result of a converter whose value leaves a field as it is."""

    NOTHING = 0


NOTHING = Nothing.NOTHING

Values = Mapping[str, Any]
"""Key path -> value of a whole JSON, as read; `"auto"` if it could not be resolved."""


@dataclass(frozen=True)
class ValueShape:
    """A type of value, in words, and how to read it; `read` returns NOTHING for a value of another type."""

    says: str
    read: Callable[[Any], Any]


def _number(value: Any) -> Any:
    """A finite number that a float can hold; one in quotes counts too."""
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return NOTHING
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return NOTHING
    return number if math.isfinite(number) else NOTHING


def _integer(value: Any) -> Any:
    """An integer of at most 64 bits; one written as 5e8, "500" or true counts too, because that is exact."""
    if isinstance(value, str):
        value = float(value) if "." in value and _number(value) is not NOTHING else value
        value = int(value) if isinstance(value, str) and re.fullmatch(r" *[+-]?\d{1,19} *", value) else value
    if isinstance(value, bool):
        return int(value)
    whole = isinstance(value, int | float) and _number(value) is not NOTHING and value == value // 1
    return int(value) if whole and abs(value) <= LARGEST else NOTHING


def _boolean(value: Any) -> Any:
    """True or false; 1 and 0 and the words that pydantic takes for them count too."""
    if isinstance(value, str):
        return _WORDS.get(value.lower(), NOTHING)
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else NOTHING


_WORDS: Mapping[str, bool] = MappingProxyType(
    {
        **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
        **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
    }
)


def _endless(value: Any) -> Any:
    """A positive integer; one that no run reaches is the largest of 64 bits."""
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value > LARGEST
    return LARGEST if whole and value != math.inf else _at_least(1, _integer)(value)


def _or_never(value: Any) -> Any:
    """A positive number of steps; None and infinity are the largest of 64 bits."""
    return LARGEST if value is None or value == math.inf else _endless(value)


def _at_least(least: int, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def within(value: Any) -> Any:
        number = read(value)
        return number if number is not NOTHING and number >= least else NOTHING

    return within


def _numbers(value: Any) -> Any:
    items = [_number(item) for item in value] if isinstance(value, list | tuple) else [NOTHING]
    return NOTHING if NOTHING in items or len(items) != 2 else tuple(items)


def _list_of(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def list_of_values(value: Any) -> Any:
        items = [read(item) for item in value] if isinstance(value, list | tuple) else [NOTHING]
        return NOTHING if NOTHING in items else tuple(items)

    return list_of_values


def _of(*types: type) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, types) else NOTHING


BOOL = ValueShape("true or false", _boolean)
INTEGER = ValueShape("an integer", _integer)
COUNT = ValueShape("a positive integer", _at_least(1, _integer))
INTERVAL = ValueShape("a positive integer", _endless)
OR_NEVER = ValueShape("a positive integer, or null for never", _or_never)
SIZE = ValueShape("an integer, at least 0", _at_least(0, _integer))
NUMBER = ValueShape("a number", _number)
AMOUNT = ValueShape("a number, at least 0", _at_least(0, _number))
PAIR = ValueShape("a list of two numbers", _numbers)
COUNTS = ValueShape("a list of positive integers", _list_of(_at_least(1, _integer)))
INDICES = ValueShape("a list of integers, at least 0", _list_of(_at_least(0, _integer)))
TEXT = ValueShape("text", _of(str))
TEXTS = ValueShape("a list of texts", _list_of(_of(str)))
SECTION = ValueShape("an object", _of(Mapping))
ANYTHING = ValueShape("any value", lambda value: value)


@dataclass(frozen=True)
class Only:
    """The values with which a key is accepted; with others it is refused."""

    says: str
    holds: Callable[[Any], bool]


def only(*values: Any) -> Only:
    """Accept these values alone; strings match in any case."""
    spelled = {_plain(value) for value in values}
    says = " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return Only(says, lambda value: _plain(value) in spelled)


def _plain(value: Any) -> Any:
    return (type(value) is bool, value.lower() if isinstance(value, str) else value)


def _enables_nothing(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled") is not True and all(map(_enables_nothing, value.values()))
    return True


DISABLED = Only("`enabled` false", lambda section: _boolean(section.get("enabled", False)) is False)
NOTHING_ENABLED = Only("nothing in it `enabled`", _enables_nothing)


@dataclass(frozen=True)
class KeyRow:
    """One key of the JSON.

    Attributes:
        key: its path, such as `zero_optimization.stage`. Nothing below a key of shape SECTION is looked at.
        shape: what it must hold.
        fields: paths of the tree that it sets.
        convert: turns the value and those of all keys into the field's value, or into one for each of several
            fields, or into NOTHING, also for one of several; None if another key sets the fields from both.
        extra: the attribute of `Extras` that it sets; without `fields`, only `megazero.initialize` reads it.
        accepted: why it has no effect; together with `extra`, why it has none in a training script.
        refused: what to do instead.
        only: the values with which it is accepted; with others it is `refused`.
        script_refused: what to do instead in a training script, if only an engine takes it.
        when: the key that must be on for this one to count, as must be the one that it counts beside.
        faults: what is wrong with the value, or with all values because of it, as sentences without their
            period; for what is looked at below a key of shape SECTION.
        absent: what DeepSpeed assumes if `when` is on and the key is missing; flags and YAML override it.
        auto: how "auto" is resolved from what flags and YAML give (path -> value); NOTHING leaves it to
            them. None if the key cannot be "auto".
    """

    key: str
    shape: ValueShape
    fields: tuple[str, ...] = ()
    convert: Callable[[Any, Values], Any] | None = None
    extra: str | None = None
    accepted: str | None = None
    refused: str | None = None
    only: Only | None = None
    script_refused: str | None = None
    when: str | None = None
    absent: Any = NOTHING
    auto: Callable[[Mapping[str, Any]], Any] | None = None
    faults: Callable[[Any, Values], list[str]] | None = None

    @property
    def is_of_another(self) -> bool:
        """Whether it only ever refuses something of what another key turns on."""
        return self.when is not None and not (self.fields or self.extra)

    def takes(self, value: Any) -> bool:
        """Whether the key may have this value of its shape."""
        if self.only is not None:
            return self.only.holds(value)
        return bool(self.fields or self.extra or self.accepted)


def say(value: Any) -> str:
    """A value as JSON writes it; None is what was not set."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def plainly(value: Any, values: Values) -> Any:
    """The converter that changes nothing."""
    return value


def if_enabled(section: Any, values: Values) -> Any:
    """The converter of a section that counts if something in it is enabled."""
    return NOTHING if NOTHING_ENABLED.holds(section) else section


def left_to_flags(given: Mapping[str, Any]) -> Any:
    """The "auto" that means: whatever flags, YAML or the caller give."""
    return NOTHING


def of_hidden_size(formula: Callable[[int], int]) -> Callable[[Mapping[str, Any]], Any]:
    """The "auto" of transformers that follows from the hidden size; left to flags if that is unknown."""

    def resolve(given: Mapping[str, Any]) -> Any:
        hidden = given.get("model.hidden_size")
        return NOTHING if hidden is None else formula(hidden)

    return resolve


def sets(
    key: str, shape: ValueShape, *fields: str, convert: Callable[[Any, Values], Any] = plainly, **rest: Any
) -> KeyRow:
    """A row that sets fields of the tree."""
    return KeyRow(key, shape, fields, convert, **rest)


def ignores(reason: str, shape: ValueShape, *keys: str) -> tuple[KeyRow, ...]:
    """Rows of keys that have no effect, all for one reason."""
    return tuple(KeyRow(key, shape, accepted=reason) for key in keys)


def refuses(remedy: str, shape: ValueShape, taken: Only | None, *keys: str) -> tuple[KeyRow, ...]:
    """Rows of keys that are refused, except with the values that ask for nothing."""
    return tuple(KeyRow(key, shape, refused=remedy, only=taken) for key in keys)
