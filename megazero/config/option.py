"""How a field of the tree is declared, and the field types that the tree needs beyond pydantic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def option(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    aliases: tuple[str, ...] = (),
    switches: Mapping[str, Any] | None = None,
    yielding: tuple[str, ...] = (),
    unit: str | None = None,
) -> Any:
    """Declare one field of a section.

    Args:
        default: the value if neither a file nor a flag sets it; ``...`` makes the field required.
        help: one sentence for `--help` and the docs.
        flag: the flag's name, if it is not ``--field-name``. For a boolean whose default is true, this is
            the flag that turns it off (Megatron's ``store_false`` flags).
        aliases: other spellings of the same flag, such as an older name.
        switches: valueless flags that set this field to a constant, name -> constant.
        yielding: the switches that give way to any other flag of this field, as they do in
            Megatron scripts: `--no-position-embedding` beside `--use-rotary-position-embeddings` is rotary.
        unit: what the number counts.
    """
    extra = {
        "flag": flag,
        "aliases": list(aliases),
        "switches": dict(switches or {}),
        "yielding": list(yielding),
        "unit": unit,
    }
    return Field(default, description=help, json_schema_extra=extra)


def _split_proportions(text: str) -> str:
    parts = text.replace("/", ",").split(",")
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        shares = []
    if len(shares) != 3 or not all(0 <= share < float("inf") for share in shares) or sum(shares) <= 0:
        raise ValueError("must be three proportions such as 969,30,1, none negative and not all zero")
    return text


Probability = Annotated[float, Field(ge=0, lt=1)]
"""A dropout rate, a decay of a running mean, a share of the schedule: in [0, 1)."""

Proportions = Annotated[str, AfterValidator(_split_proportions)]
"""Train, validation and test proportions, separated by commas (or slashes, as Megatron also reads)."""


class Section(BaseModel):
    """Base of all sections: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
