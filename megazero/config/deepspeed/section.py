"""Sections of DeepSpeed's JSON: each key with its type, its default there, and what it does here."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from megazero.config.numbers import LARGEST

AUTO = "auto"


class Nothing(Enum):
    """The absence of a value: it is of another type, left out, or has no effect."""

    NOTHING = 0


NOTHING = Nothing.NOTHING

Values = Mapping[str, Any]
"""Key path -> value of a whole JSON, as read; `"auto"` if it could not be resolved."""
Convert = Callable[[Any, Values], object]
"""Maps a key's value, and the values of all keys, to the value of its field or to NOTHING."""
Read = Callable[[object], object]
Auto = Callable[[Values], object]
"""Resolves "auto" from what flags, YAML or the caller give: path -> value."""


@dataclass(frozen=True)
class ValueShape:
    """A type of value, in words, and how to read it; `read` returns NOTHING for a value of another type."""

    says: str
    read: Read


def _number(value: object) -> float | Nothing:
    """A finite number that a float can hold; one in quotes counts too."""
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return NOTHING
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return NOTHING
    return number if math.isfinite(number) else NOTHING


def _integer(value: object) -> int | Nothing:
    """An integer of at most 64 bits; one written as 5e8, "500" or true counts too, because that is exact."""
    if isinstance(value, str):
        value = float(value) if "." in value and _number(value) is not NOTHING else value
        value = int(value) if isinstance(value, str) and re.fullmatch(r" *[+-]?\d{1,19} *", value) else value
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, int | float) or _number(value) is NOTHING or value != value // 1:
        return NOTHING
    return int(value) if abs(value) <= LARGEST else NOTHING


def boolean(value: object) -> bool | Nothing:
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


def _endless(value: object) -> object:
    """A positive integer; one that no run reaches is the largest of 64 bits."""
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value > LARGEST
    return LARGEST if whole and value != math.inf else _at_least(1, _integer)(value)


def _at_least(least: int, read: Callable[[object], float | Nothing]) -> Read:
    def within(value: object) -> float | Nothing:
        number = read(value)
        return number if number is not NOTHING and number >= least else NOTHING

    return within


def _list_of(read: Read, length: int | None = None) -> Read:
    def list_of_values(value: object) -> tuple[object, ...] | Nothing:
        items = [read(item) for item in value] if isinstance(value, list | tuple) else [NOTHING]
        return NOTHING if NOTHING in items or len(items) != (length or len(items)) else tuple(items)

    return list_of_values


def _of(*types: type) -> Read:
    return lambda value: value if isinstance(value, types) else NOTHING


BOOL = ValueShape("true or false", boolean)
INTEGER = ValueShape("an integer", _integer)
COUNT = ValueShape("a positive integer", _at_least(1, _integer))
INTERVAL = ValueShape("a positive integer", _endless)
OR_NEVER = ValueShape(
    "a positive integer, or null for never",
    lambda value: LARGEST if value is None or value == math.inf else _endless(value),
)
SIZE = ValueShape("an integer, at least 0", _at_least(0, _integer))
NUMBER = ValueShape("a number", _number)
AMOUNT = ValueShape("a number, at least 0", _at_least(0, _number))
PAIR = ValueShape("a list of two numbers", _list_of(_number, 2))
COUNTS = ValueShape("a list of positive integers", _list_of(COUNT.read))
INDICES = ValueShape("a list of integers, at least 0", _list_of(SIZE.read))
TEXT = ValueShape("text", _of(str))
TEXTS = ValueShape("a list of texts", _list_of(_of(str)))
SECTION = ValueShape("an object", _of(Mapping))
ANYTHING = ValueShape("any value", lambda value: value)
PLACE = ValueShape(
    '"none", "cpu" or "nvme"', lambda value: value if value in ("none", "cpu", "nvme") else NOTHING
)


@dataclass(frozen=True)
class Declared:
    """A declared key, before it becomes a `KeyRow`: DeepSpeed's side, and the row's other attributes."""

    upstream: Upstream
    effect: Mapping[str, Any]


# What a section annotates its keys with: the shape of the value that is read.
Bool = Annotated[Declared, BOOL]
Integer = Annotated[Declared, INTEGER]
Count = Annotated[Declared, COUNT]
Interval = Annotated[Declared, INTERVAL]
Size = Annotated[Declared, SIZE]
Number = Annotated[Declared, NUMBER]
Amount = Annotated[Declared, AMOUNT]
Text = Annotated[Declared, TEXT]
Object = Annotated[Declared, SECTION]
Anything = Annotated[Declared, ANYTHING]


@dataclass(frozen=True)
class Only:
    """The values with which a key is accepted; with others it is refused."""

    says: str
    holds: Callable[[Any], bool]


def only(*values: object) -> Only:
    """Accept these values alone; strings match in any case."""
    spelled = {_plain(value) for value in values}
    says = " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return Only(says, lambda value: _plain(value) in spelled)


def _plain(value: object) -> tuple[bool, object]:
    return (type(value) is bool, value.lower() if isinstance(value, str) else value)


def _enables_nothing(value: object) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled") is not True and all(map(_enables_nothing, value.values()))
    return True


DISABLED = Only("`enabled` false", lambda section: boolean(section.get("enabled", False)) is False)
NOTHING_ENABLED = Only("nothing in it `enabled`", _enables_nothing)


@dataclass(frozen=True)
class Upstream:
    """DeepSpeed's side of a key: its default, and the names under which scripts find it.

    Attributes:
        default: its default; NOTHING if it has none, or has no such key any more.
        absent: the value that it assumes if `when` is on and the key is missing; flags and YAML override it.
        getter: the engine's method that returns the value; True for the name by `JsonSection.getter_of`.
        attribute: the attribute of `DeepSpeedConfig` that has the value; True for the key's name.
    """

    default: Any = NOTHING
    absent: object = NOTHING
    getter: str | bool | None = None
    attribute: str | bool | None = None

    def named(self, getter: str, attribute: str) -> Upstream:
        """Replace True by these names."""
        return replace(
            self,
            getter=getter if self.getter is True else self.getter,
            attribute=attribute if self.attribute is True else self.attribute,
        )


@dataclass(frozen=True)
class KeyRow:
    """One key of the JSON, as its section declares it.

    Attributes:
        key: its path, such as `zero_optimization.stage`. Nothing below a key of shape SECTION is looked at.
        shape: what it must hold.
        fields: paths of the tree that it sets.
        convert: maps the value, and the values of all keys, to the field's value, or to a tuple of one value
            for each field; NOTHING leaves a field alone. None if another key sets the fields from both.
        extra: the attribute of `Extras` that it sets; without `fields`, only `megazero.initialize` reads it.
        accepted: why it has no effect; together with `extra`, why it has none in a training script.
        refused: what to do instead.
        only: the values with which it is accepted; with others it is `refused`.
        script_refused: what to do instead in a training script, if only an engine takes it.
        when: the key that must be on for this one to count, and whose own `when` must be on, too; "" for none
            where the section has one.
        faults: returns what is wrong with the value beside all others, as sentences without a period.
        auto: resolves "auto" from what flags and YAML give (path -> value), or returns NOTHING to leave the
            field to them. None if the key cannot be "auto".
        upstream: DeepSpeed's default and names for it.
    """

    key: str
    shape: ValueShape
    fields: tuple[str, ...] = ()
    convert: Convert | None = None
    extra: str | None = None
    accepted: str | None = None
    refused: str | None = None
    only: Only | None = None
    script_refused: str | None = None
    when: str | None = None
    auto: Auto | None = None
    faults: Callable[[Any, Values], list[str]] | None = None
    upstream: Upstream = Upstream()

    @property
    def is_of_another(self) -> bool:
        """Whether it sets nothing, and can only be refused where another key is on."""
        return self.when is not None and not (self.fields or self.extra)

    def takes(self, value: object) -> bool:
        """Whether the key may have this value of its shape."""
        if self.only is not None:
            return self.only.holds(value)
        return bool(self.fields or self.extra or self.accepted)


def sets(*fields: str, default: object = NOTHING, **effect: object) -> Declared:
    """Declare a key that sets these fields of the tree, as it is unless `convert` says otherwise."""
    return does(default, fields=fields, **{"convert": plainly, **effect})


def ignored(reason: str, default: object = NOTHING, **effect: object) -> Declared:
    """Declare a key that has no effect, for this reason."""
    return does(default, accepted=reason, **effect)


def refused(remedy: str, taken: Only | None = None, default: object = NOTHING, **effect: object) -> Declared:
    """Declare a key that is refused, except with the values that ask for nothing."""
    return does(default, refused=remedy, only=taken, **effect)


def does(default: object = NOTHING, **effect: Any) -> Declared:
    """Declare a key with this default in DeepSpeed; the rest are attributes of `Upstream` and `KeyRow`.

    ``seen=True`` stands for ``getter=True, attribute=True``.
    """
    if effect.pop("seen", False):
        effect |= {"getter": True, "attribute": True}
    theirs = {name: effect.pop(name) for name in ("absent", "getter", "attribute") if name in effect}
    return Declared(Upstream(default, **theirs), MappingProxyType(effect))


class JsonSection:
    """The keys of one object of the JSON, declared together.

    Attributes:
        at: its path in the JSON; "" for keys at the top.
        heading: the heading in the docs.
        when: the key that must be on for any of these to count, unless a key says otherwise.
        attribute: the attribute of `DeepSpeedConfig` that shows its keys.
        mapping: whether that is a dictionary, not an object.
    """

    at: ClassVar[str] = ""
    heading: ClassVar[str]
    when: ClassVar[str | None] = None
    attribute: ClassVar[str | None] = None
    mapping: ClassVar[bool] = False

    @classmethod
    def getter_of(cls, name: str) -> str:
        """The name of a key's getter, where the key does not say another."""
        return name

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of its keys, in order."""
        return tuple(name for name, value in vars(cls).items() if isinstance(value, Declared))

    @classmethod
    def rows(cls) -> tuple[KeyRow, ...]:
        """The rows of its keys, in order."""
        module = vars(sys.modules[cls.__module__])
        # `typing.get_type_hints` does the same, and takes longer than everything else in this package.
        types = {name: eval(cls.__annotations__[name], module) for name in cls.names()}
        return tuple(cls._row(name, annotated.__metadata__[0]) for name, annotated in types.items())

    @classmethod
    def _row(cls, name: str, shape: ValueShape) -> KeyRow:
        declared: Declared = vars(cls)[name]
        key = f"{cls.at}.{name}" if cls.at else name
        when = declared.effect.get("when", None if cls.when == key else cls.when)
        upstream = declared.upstream.named(cls.getter_of(name), name)
        return KeyRow(key, shape, **{**declared.effect, "when": when or None, "upstream": upstream})

    @classmethod
    def defaults(cls) -> dict[str, object]:
        """Key -> DeepSpeed's default, for those that have one."""
        defaults = {name: vars(cls)[name].upstream.default for name in cls.names()}
        return {name: default for name, default in defaults.items() if default is not NOTHING}


def say(value: object) -> str:
    """Write a value as JSON does; None is "unset"."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def plainly(value: object, values: Values) -> object:
    """The converter that changes nothing."""
    return value


def if_enabled(section: object, values: Values) -> object:
    """The converter of a section that has an effect only if something in it is enabled."""
    return NOTHING if NOTHING_ENABLED.holds(section) else section


def left_to_flags(given: Values) -> Nothing:
    """The "auto" that means: whatever flags, YAML or the caller give."""
    return NOTHING


def of_hidden_size(formula: Callable[[int], int]) -> Auto:
    """The "auto" of transformers that follows from the hidden size; left to flags if that is unknown."""

    def resolve(given: Values) -> int | Nothing:
        hidden = given.get("model.hidden_size")
        return NOTHING if hidden is None else formula(hidden)

    return resolve
