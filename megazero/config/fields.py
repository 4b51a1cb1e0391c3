"""The fields of the tree as a flat table of facts, from which flags, YAML, docs and rules are made."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from megazero.config.condition import Condition, Need
from megazero.config.tree.config import Config
from megazero.config.tree.data_sampling import CurriculumMetric
from megazero.config.tree.option import Section
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
class FieldSpec:
    """One field: where it sits in the tree, how it is read, and what it says of itself (`option`).

    Attributes:
        length: the number of items of a list; None for a list of any length and for anything else.
        roles: what the field is for.
        flag: the flag's name, by default ``--field-name``. For a boolean whose default is true, it is the
            flag that turns it off, by default ``--no-field-name`` (Megatron's ``store_false`` flags).
        aliases: other spellings of the same flag, such as an older name.
        switches: valueless flags that set this field to a constant, name -> constant.
        yielding: the switches and aliases that give way to any other flag of this field, as they do in
            Megatron scripts: `--no-position-embedding` beside `--use-rotary-position-embeddings` is rotary.
        implies: flags that set another field of the section too, flag -> (that field, its value).
        synonyms: other words for a choice, word -> choice, or words for an integer.
        refused: choices of other trainers that are not offered, choice -> the reason.
        unit: the unit of the number.
        instead_of: fields of the section that express the same in another way.
        needs: requirements, all of which must hold where the field is not at its default: ``here.kd``,
            ``(here.save | here.load).because("the reason")``, or for some values alone
            ``when("nvme", here.path)``. Fields of other sections are attributes of ``config``. By default,
            the needs of the class.
        idle_without: the requirement without which the field has no effect; a run then says so and goes on.
        package: the Python package that a run with this field needs.
        resolved: the property that has the value where the default follows from other fields.
        axis: the axis of the mesh whose size it is.
    """

    section: str
    name: str
    kind: Kind
    choices: tuple[str, ...] | tuple[int, ...]
    length: int | None
    optional: bool
    required: bool
    default: object
    roles: Role
    flag: str
    aliases: tuple[str, ...] = ()
    switches: Mapping[str, object] = field(default_factory=dict)
    yielding: tuple[str, ...] = ()
    implies: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    synonyms: Mapping[str, str | int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None
    instead_of: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    idle_without: Need | None = None
    package: str | None = None
    resolved: str | None = None
    axis: str | None = None

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
        """Whether it is a length or an interval of the training, for which a huge number means never."""
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

    def takes(self, value: object) -> bool:
        """Whether the field's type allows this value."""
        if value is None:
            return self.optional
        if self.kind is Kind.CHOICE:
            return value in self.choices
        return _KINDS.get(type(value)) is self.kind or (self.is_list and isinstance(value, tuple))

    @property
    def default_text(self) -> str | None:
        """The default as a user writes it; None if there is nothing to write."""
        if self.default in (None, ()):
            return None
        return spoken(self.default)


def spoken(value: object) -> str:
    """A value in words, as messages and docs say it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "the default" if value is None else str(value)


def _unwrap(annotation: object) -> tuple[object, bool]:
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


_KINDS: Mapping[object, Kind] = types.MappingProxyType(
    {int: Kind.INT, float: Kind.FLOAT, str: Kind.TEXT, bool: Kind.BOOL}
)
_LIST_KINDS = types.MappingProxyType(
    {Kind.INT: Kind.INTS, Kind.FLOAT: Kind.FLOATS, Kind.CHOICE: Kind.CHOICES, Kind.TEXT: Kind.TEXTS}
)


def _kind(annotation: object) -> tuple[Kind, tuple[str, ...], int | None]:
    if get_origin(annotation) is Literal:
        return Kind.CHOICE, get_args(annotation), None
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        if items[0] is CurriculumMetric:
            return Kind.METRICS, (), None
        kind, choices, _ = _kind(_unwrap(items[0])[0])
        return _LIST_KINDS[kind], choices, None if items[-1] is Ellipsis else len(items)
    return _KINDS[annotation], (), None


def _field_spec(section: str, model: type[Section], name: str, annotation: object) -> FieldSpec:
    info = model.model_fields[name]
    extra: Any = info.json_schema_extra
    assert isinstance(extra, dict), f"{section}.{name} must be declared with option()"
    bare, optional = _unwrap(annotation)
    kind, choices, length = _kind(bare)
    # The needs and roles of a class are those of the fields that it declares itself, and of no inherited one.
    declared_by = vars(next(base for base in model.__mro__ if name in vars(base).get("__annotations__", ())))
    needs = extra.get("needs", declared_by.get("needs", ()))
    idle, roles = extra.get("idle_without"), extra["roles"]
    for said in (declared_by.get("roles", Role.NONE), model.roles):
        roles |= said & ~RESUME if roles & RESUME else said
    resolved = {
        "roles": roles,
        "flag": extra.get("flag") or ("--no-" if info.default is True else "--") + name.replace("_", "-"),
        "needs": tuple(need.within(section) for need in (needs if isinstance(needs, tuple) else (needs,))),
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
        **{**extra, **resolved},
    )


def section_fields(section: str, model: type[Section]) -> list[FieldSpec]:
    """The fields of a section's class, in its order."""
    hints = get_type_hints(model, include_extras=True)
    return [_field_spec(section, model, name, hints[name]) for name in model.model_fields]


SECTIONS: Mapping[str, type[Section]] = types.MappingProxyType(
    {name: hint for name, hint in get_type_hints(Config).items() if name in Config.model_fields}
)
"""Section name -> its class, in the tree's order."""

FIELDS: tuple[FieldSpec, ...] = tuple(
    spec for section, model in SECTIONS.items() for spec in section_fields(section, model)
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
"""Path -> the paths of fields that express the same in another way."""


def check_needs(of: str, needs: Iterable[Need]) -> None:
    """Check, as soon as they are declared, that the needs of `of` can be met: others would refuse every run.

    Raises:
        ValueError: there is no such field, or it has no such value.
    """
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


for _spec in FIELDS:
    check_needs(_spec.path, [*_spec.needs, *([] if _spec.idle_without is None else [_spec.idle_without])])


class _Paths:
    """A mirror of the tree, or of one section, in which the value of each field is its path."""

    def __init__(self, section: str = "") -> None:
        self._section = section

    def __getattr__(self, name: str) -> _Paths | str:
        if not self._section and name in SECTIONS:
            return _Paths(name)
        if (path := f"{self._section}.{name}") in FIELD_BY_PATH:
            return path
        raise AttributeError(f"`{path}` must be a field of the tree, but there is none; correct its name")


paths = cast(Config, _Paths())
"""The paths of fields, read as fields are: `paths.model.num_layers` is "model.num_layers"."""


def fields_with(role: Role) -> tuple[FieldSpec, ...]:
    """The fields with all roles of `role`, in the tree's order."""
    wanted = role.value
    return tuple(spec for spec in FIELDS if spec.roles.value & wanted == wanted)


def names_with(role: Role, section: str = "model") -> tuple[str, ...]:
    """The names of a section's fields with all roles of `role`, in the tree's order."""
    return tuple(spec.name for spec in fields_with(role) if spec.section == section)


def section_title(section: str) -> str:
    """The section's heading: the first line of its docstring."""
    return (SECTIONS[section].__doc__ or section).splitlines()[0]
