"""The fields of the tree as a flat table of facts, from which flags, YAML, docs and rules are made."""

from __future__ import annotations

import types
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from megazero.config.condition import Condition, Need
from megazero.config.tree.config import Config
from megazero.config.tree.data_sampling import CurriculumMetric
from megazero.config.tree.option import Section

_OF_RUNS = frozenset({"training", "optimizer", "checkpoint", "logging", "guards", "distillation"})
_COUNTED = frozenset({"iterations", "samples", "tokens"})
_SCALE_WINDOW = "precision.loss_scale_window"


class Kind(Enum):
    """The type of a field, by which its text is read."""

    INT = "int"
    FLOAT = "float"
    TEXT = "text"
    CHOICE = "choice"
    BOOL = "bool"
    INTS = "ints"
    FLOATS = "floats"
    CHOICES = "choices"
    TEXTS = "texts"
    METRICS = "metrics"


@dataclass(frozen=True)
class FieldSpec:
    """One field: where it sits in the tree, how it is read, and how the command line spells it.

    `length` is the number of items of a list, and None for a list of any length or for anything else.
    """

    section: str
    name: str
    kind: Kind
    choices: tuple[str, ...] | tuple[int, ...]
    length: int | None
    optional: bool
    required: bool
    default: Any
    help: str
    flag: str
    aliases: tuple[str, ...]
    switches: Mapping[str, Any]
    yielding: frozenset[str]
    implies: Mapping[str, tuple[str, Any]]
    synonyms: Mapping[str, Any]
    refused: Mapping[str, str]
    unit: str | None
    package: str | None

    @property
    def path(self) -> str:
        """`section.name`, the key of YAML and of rules."""
        return f"{self.section}.{self.name}"

    @property
    def flag_value(self) -> bool:
        """The value that the presence of a boolean's flag sets: the opposite of its default."""
        return not self.default

    @property
    def is_list(self) -> bool:
        """Whether its value is a tuple."""
        return self.kind in (Kind.INTS, Kind.FLOATS, Kind.CHOICES, Kind.TEXTS)

    @property
    def is_endless(self) -> bool:
        """Whether it is a length or an interval of the training, which a large number makes endless."""
        return (self.section in _OF_RUNS and self.unit in _COUNTED) or self.path == _SCALE_WINDOW

    @property
    def type_name(self) -> str:
        """The type in words, for help and docs."""
        if self.kind is Kind.BOOL:
            return "switch"
        if self.kind is Kind.METRICS:
            return "JSON or file"
        if self.kind in (Kind.CHOICE, Kind.CHOICES):
            item = " | ".join(map(str, self.choices))
        else:
            item = self.kind.value.removesuffix("s")
        if not self.is_list:
            return item
        return f"{item} ..." if self.length is None else f"{self.length} x {item}"

    def can_be(self, text: str) -> bool:
        """Whether a value of this field is written like this in a condition."""
        if text == "None":
            return self.optional
        if self.kind in (Kind.TEXT, Kind.CHOICE):
            return self.kind is Kind.TEXT or text in map(str, self.choices)
        kinds = {Kind.BOOL: bool, Kind.INT: int, Kind.FLOAT: float}
        try:
            value = literal_eval(text)
        except (ValueError, SyntaxError):
            return False
        return type(value) is kinds.get(self.kind, tuple) and str(value) == text

    @property
    def default_text(self) -> str | None:
        """The default as a user writes it; None if there is nothing to write."""
        if self.default in (None, ()):
            return None
        return spoken(self.default)


def spoken(value: Any) -> str:
    """A value in words, as messages and docs say it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "the default" if value is None else str(value)


def _unwrap(annotation: Any) -> tuple[Any, bool]:
    """Strip Annotated and `| None`; returns the bare type and whether None is allowed."""
    optional = False
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (Union, types.UnionType):
            members = [a for a in get_args(annotation) if a is not types.NoneType]
            assert len(members) == 1, f"a field has one type, or one type and None; got {annotation}"
            annotation, optional = members[0], True
        else:
            return annotation, optional


_KINDS = types.MappingProxyType({int: Kind.INT, float: Kind.FLOAT, str: Kind.TEXT, bool: Kind.BOOL})
_LIST_KINDS = types.MappingProxyType(
    {Kind.INT: Kind.INTS, Kind.FLOAT: Kind.FLOATS, Kind.CHOICE: Kind.CHOICES, Kind.TEXT: Kind.TEXTS}
)


def _kind(annotation: Any) -> tuple[Kind, tuple[str, ...], int | None]:
    if get_origin(annotation) is Literal:
        return Kind.CHOICE, get_args(annotation), None
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        if items[0] is CurriculumMetric:
            return Kind.METRICS, (), None
        kind, choices, _ = _kind(_unwrap(items[0])[0])
        return _LIST_KINDS[kind], choices, None if items[-1] is Ellipsis else len(items)
    return _KINDS[annotation], (), None


def _field_spec(section: str, name: str, annotation: Any, info: FieldInfo) -> FieldSpec:
    bare, optional = _unwrap(annotation)
    kind, choices, length = _kind(bare)
    extra: Any = info.json_schema_extra
    assert isinstance(extra, dict), f"{section}.{name} must be declared with option()"
    return FieldSpec(
        section=section,
        name=name,
        kind=kind,
        choices=choices,
        length=length,
        optional=optional,
        required=info.is_required(),
        default=None if info.is_required() else info.default,
        help=info.description or "",
        flag=extra["flag"] or "--" + name.replace("_", "-"),
        aliases=tuple(extra["aliases"]),
        switches=types.MappingProxyType(extra["switches"]),
        yielding=frozenset(extra["yielding"]),
        implies=types.MappingProxyType(extra["implies"]),
        synonyms=types.MappingProxyType(extra["synonyms"]),
        refused=types.MappingProxyType(extra["refused"]),
        unit=extra["unit"],
        package=extra["package"],
    )


def _section_fields(section: str, model: type[Section]) -> list[FieldSpec]:
    hints = get_type_hints(model, include_extras=True)
    return [_field_spec(section, name, hints[name], info) for name, info in model.model_fields.items()]


SECTIONS: Mapping[str, type[Section]] = types.MappingProxyType(
    {name: hint for name, hint in get_type_hints(Config).items() if name in Config.model_fields}
)
"""Section name -> its class, in the tree's order."""

FIELDS: tuple[FieldSpec, ...] = tuple(
    spec for section, model in SECTIONS.items() for spec in _section_fields(section, model)
)
"""Every field of the tree, in the tree's order."""

FIELD_BY_PATH: Mapping[str, FieldSpec] = types.MappingProxyType({spec.path: spec for spec in FIELDS})


def _instead_of(spec: FieldSpec) -> frozenset[str]:
    declared: Any = SECTIONS[spec.section].model_fields[spec.name].json_schema_extra
    return frozenset(f"{spec.section}.{name}" for name in declared["instead_of"])


INSTEAD_OF: Mapping[str, frozenset[str]] = types.MappingProxyType(
    {spec.path: others for spec in FIELDS if (others := _instead_of(spec))}
)
"""Path -> the paths of fields that say the same in another way."""


def needs_of(section: str, model: type[Section], name: str) -> tuple[Need, ...]:
    """The needs that a field of a section's class declares.

    Raises:
        ValueError: one of them cannot hold in any run.
    """
    declared: Any = model.model_fields[name].json_schema_extra
    home = next(base for base in model.__mro__ if name in vars(base).get("__annotations__", ()))
    assert issubclass(home, Section)
    needs = vars(home).get("needs", ()) if declared["needs"] is None else declared["needs"]
    read = tuple(Need.read(text, section) for text in ((needs,) if isinstance(needs, str) else needs))
    for need in read:
        for condition in (*need.conditions, Condition(f"{section}.{name}", need.of)):
            check_condition(condition, f"the needs of {section}.{name}")
    return read


def check_condition(condition: Condition, where: str) -> None:
    """Refuse a condition that cannot hold, which would refuse every run, as soon as it is declared.

    Raises:
        ValueError: there is no such field, or it has no such value.
    """
    spec = FIELD_BY_PATH.get(condition.path)
    if spec is None:
        raise ValueError(f"{where} must be about a field of the tree, but name `{condition.path}`")
    if wrong := [value for value in condition.values if not spec.can_be(value)]:
        raise ValueError(f"{where} must be values that `{spec.path}` can have, but are {', '.join(wrong)}")


NEEDS: Mapping[str, Mapping[str, tuple[Need, ...]]] = types.MappingProxyType(
    {
        section: types.MappingProxyType(
            {name: needs for name in model.model_fields if (needs := needs_of(section, model, name))}
        )
        for section, model in SECTIONS.items()
    }
)
"""Section -> the fields of it that need something beside them where they are not left at their defaults."""


def section_title(section: str) -> str:
    """The section's heading: the first line of its docstring."""
    return (SECTIONS[section].__doc__ or section).splitlines()[0]
