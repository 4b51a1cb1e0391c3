"""The fields of the tree as a flat table of facts, from which flags, YAML, docs and rules are made."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from megazero.config.condition import Condition, Need
from megazero.config.tree.config import Config
from megazero.config.tree.data_sampling import CurriculumMetric
from megazero.config.tree.option import Facets, Section
from megazero.config.tree.roles import RESUME, Role

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


@dataclass(frozen=True, kw_only=True)
class FieldSpec(Facets):
    """One field: where it sits in the tree, how it is read, and what it says of itself.

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

    def takes(self, value: Any) -> bool:
        """Whether the field can have this value, as far as its type tells."""
        if value is None:
            return self.optional
        if self.kind is Kind.CHOICE:
            return value in self.choices
        return type(value) is _TYPES.get(self.kind, tuple)

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


_TYPES = types.MappingProxyType({Kind.INT: int, Kind.FLOAT: float, Kind.TEXT: str, Kind.BOOL: bool})
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


def facets_of(model: type[Section], name: str) -> Facets:
    """What a field of a section's class says of itself."""
    extra: Any = model.model_fields[name].json_schema_extra
    assert isinstance(extra, dict), f"{model.__name__}.{name} must be declared with option()"
    facets: Facets = extra["facets"]
    return facets


def _field_spec(section: str, model: type[Section], name: str, annotation: Any) -> FieldSpec:
    info, facets = model.model_fields[name], facets_of(model, name)
    idle = facets.idle_without
    bare, optional = _unwrap(annotation)
    kind, choices, length = _kind(bare)
    classes = vars(declaring(model, name)).get("roles", Role.NONE)
    own = {
        "roles": facets.roles | (classes & ~RESUME if facets.roles & RESUME else classes),
        "flag": facets.flag or "--" + name.replace("_", "-"),
        "idle_without": None if idle is None else idle.within(section),
    }
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
        **{**vars(facets), **own},
    )


def declaring(model: type[Section], name: str) -> type[Section]:
    """The class among a section's bases that declares a field."""
    home = next(base for base in model.__mro__ if name in vars(base).get("__annotations__", ()))
    assert issubclass(home, Section)
    return home


def _section_fields(section: str, model: type[Section]) -> list[FieldSpec]:
    hints = get_type_hints(model, include_extras=True)
    return [_field_spec(section, model, name, hints[name]) for name in model.model_fields]


SECTIONS: Mapping[str, type[Section]] = types.MappingProxyType(
    {name: hint for name, hint in get_type_hints(Config).items() if name in Config.model_fields}
)
"""Section name -> its class, in the tree's order."""

FIELDS: tuple[FieldSpec, ...] = tuple(
    spec for section, model in SECTIONS.items() for spec in _section_fields(section, model)
)
"""Every field of the tree, in the tree's order."""

FIELD_BY_PATH: Mapping[str, FieldSpec] = types.MappingProxyType({spec.path: spec for spec in FIELDS})


INSTEAD_OF: Mapping[str, frozenset[str]] = types.MappingProxyType(
    {
        spec.path: frozenset(f"{spec.section}.{other}" for other in spec.instead_of)
        for spec in FIELDS
        if spec.instead_of
    }
)
"""Path -> the paths of fields that say the same in another way."""


def needs_of(section: str, model: type[Section], name: str) -> tuple[Need, ...]:
    """The needs that a field of a section's class declares.

    Raises:
        ValueError: one of them cannot hold in any run.
    """
    own = facets_of(model, name).needs
    needs = vars(declaring(model, name)).get("needs", ()) if own is None else own
    return checked(needs, f"{section}.{name}", section)


def checked(needs: Need | tuple[Need, ...], of: str, section: str = "") -> tuple[Need, ...]:
    """The needs of `of`, with paths that are whole: those of `here` are in `section`.

    Raises:
        ValueError: there is no such field, or it has no such value, so that the need would refuse every run.
    """
    needs = tuple(need.within(section) for need in (needs if isinstance(needs, tuple) else (needs,)))
    for need in needs:
        for condition in (*need.conditions, *([Condition(of, need.of)] if need.of else [])):
            spec = FIELD_BY_PATH.get(condition.path)
            if spec is None:
                raise ValueError(
                    f"the needs of {of} must be about a field of the tree, but name `{condition.path}`"
                )
            if wrong := ", ".join(repr(value) for value in condition.values if not spec.takes(value)):
                raise ValueError(
                    f"the needs of {of} must be values that `{spec.path}` can have, but are {wrong}"
                )
    return needs


NEEDS: Mapping[str, Mapping[str, tuple[Need, ...]]] = types.MappingProxyType(
    {
        section: types.MappingProxyType(
            {name: needs for name in model.model_fields if (needs := needs_of(section, model, name))}
        )
        for section, model in SECTIONS.items()
    }
)
"""Section -> the fields of it that need something beside them where they are not left at their defaults."""


paths = cast(
    Config,
    types.SimpleNamespace(
        **{
            section: types.SimpleNamespace(**{name: f"{section}.{name}" for name in model.model_fields})
            for section, model in SECTIONS.items()
        }
    ),
)
"""The paths of fields, read as fields are: `paths.model.num_layers` is "model.num_layers"."""


@cache
def fields_with(role: Role) -> tuple[FieldSpec, ...]:
    """The fields with all roles of `role`, in the tree's order."""
    return tuple(spec for spec in FIELDS if role in spec.roles)


@cache
def names_with(role: Role, section: str = "model") -> tuple[str, ...]:
    """The names of a section's fields with all roles of `role`, in the tree's order."""
    return tuple(spec.name for spec in fields_with(role) if spec.section == section)


def section_title(section: str) -> str:
    """The section's heading: the first line of its docstring."""
    return (SECTIONS[section].__doc__ or section).splitlines()[0]
