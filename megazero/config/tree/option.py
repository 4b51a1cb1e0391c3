"""`option`, which declares a field of the tree, and the field types that pydantic does not have."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt

from megazero.config.condition import Need
from megazero.config.tree.roles import Role


def option(default: object, help: str | None = None, roles: Role = Role.NONE, **facets: object) -> Any:
    """Declare one field of a section.

    Args:
        default: the value if neither a file nor a flag sets it; ``...`` makes the field required.
        help: one sentence for `--help` and the docs; default: the text below the declaration.
        roles: the field's roles, besides those of its class.
        facets: further attributes of its `FieldSpec`.
    """
    extra: Any = {"roles": roles, **facets}
    return Field(default, description=help, json_schema_extra=extra)


def of_model(default: object, help: str | None = None, roles: Role = Role.NONE, **facets: object) -> Any:
    """Declare a field that a checkpoint's model must share: another value makes another model."""
    return option(default, help, roles | Role.MODEL, **facets)


def of_training(default: object, help: str | None = None, roles: Role = Role.NONE, **facets: object) -> Any:
    """Declare a field of the section `model` that a checkpoint's model need not share."""
    return option(default, help, roles | Role.FREE, **facets)


def _split_proportions(text: str) -> str:
    plain = text.strip().strip("'\"").strip()
    try:
        shares = [float(part) for part in plain.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    sound = all(0 <= share < float("inf") for share in shares) and sum(shares) > 0
    if not sound or not 1 <= len(shares) <= 3:
        raise ValueError("must be one to three proportions such as 969,30,1, none negative and not all zero")
    return plain


Probability = Annotated[float, Field(ge=0, lt=1)]
"""A dropout rate, a decay of a running mean, a share of the schedule: in [0, 1)."""


def listed(value: object) -> object:
    """Make a list of one number."""
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


def _none_if_zero(value: object) -> object:
    return None if value == 0 and not isinstance(value, bool) else value


Interval = Annotated[PositiveInt | None, BeforeValidator(_none_if_zero)]
"""An interval in iterations; None, and 0 as in both Megatrons, for never."""

Duration = Annotated[PositiveFloat | None, BeforeValidator(_none_if_zero)]
"""A time after which something happens; None and 0 for never."""

Scale = Annotated[PositiveFloat | None, BeforeValidator(_none_if_zero)]
"""A static factor; None, and 0 as in both Megatrons, for a dynamic one."""

Patience = Annotated[float, Field(gt=0, le=10_000_000)]
"""Minutes to wait: more than 0, and at most 19 years, which clocks can count."""

Proportions = Annotated[str, AfterValidator(_split_proportions)]
"""Train, validation and test proportions, separated by commas or slashes; those left out are 0.

Quotes around them, which a script may pass on, are taken off.
"""


class Section(BaseModel):
    """Base of all sections and of their parts: frozen, and strict about unknown keys.

    Attributes:
        needs: the needs of the fields that this very class declares without needs of their own.
        roles: further roles of all fields that this very class declares. A role of resume (`RESUME`) is only
            for fields without one; fields that still have none get that of the whole section's class.
    """

    needs: ClassVar[Need | tuple[Need, ...]] = ()
    roles: ClassVar[Role] = Role.TOLD

    # Most classes are parts of others and validate nothing: none builds its validator before its first use.
    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False, defer_build=True
    )

    @classmethod
    def implied(cls, values: dict[str, object]) -> dict[str, object]:
        """Add the values of other fields that these values imply."""
        return values


SkipPattern = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(listed), Field(min_length=1)]
"""The interval between layers that differ from the others, as one number, or a 0 or 1 for each layer."""


def is_interval(pattern: tuple[int, ...]) -> bool:
    """Whether a pattern is an interval. An interval of 1 would leave no layer, so a single 1 is a list."""
    return len(pattern) == 1 and pattern[0] > 1
