"""Families of models whose layers can be sliced: rows of a table, ``families.csv``."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from megazero.errors import ConfigError

TABLE = Path(__file__).with_name("families.csv")

Role = Literal[
    "query", "key_value", "output", "up", "down", "fused", "halves", "experts", "tables", "whole", "shared"
]
"""The part of a module in its block.

- query: a linear layer whose outputs are query heads.
- key_value: one whose outputs are key-value heads.
- output: one whose inputs are query heads; its products are summed.
- up: one whose outputs are features of an MLP.
- down: one whose inputs are features of an MLP; its products are summed.
- fused: one of queries, keys and values, ``name=layout``. Layouts: ``thirds`` (all queries, all keys, all
  values), ``heads`` (each group's queries, keys and values together), ``by_config`` (thirds with multi-query
  attention, else heads).
- halves: one of two of an MLP's weights, one after the other.
- experts: a module of stacked experts, `gate_up_proj` [e, 2f, h] and `down_proj` [e, h, f].
- tables: an embedding with a column for each head.
- whole: a linear layer that each rank keeps whole.
- shared: a module whose weights are used for each head, so that each rank has a part of the gradient.
"""


@dataclass(frozen=True)
class Family:
    """How the blocks of a family are sliced. Modules are named by the end of their path within a block.

    Attributes:
        family: its name.
        types: the `model_type` of its configurations.
        names: the modules by role, see `Role`.
        attributes: numbers of an attention module that depend on its heads, ``name=meaning``, see
            `Heads.value`.
        bias: arguments of the attention's forward with a row for each head.
    """

    family: str
    types: tuple[str, ...]
    names: Mapping[Role, tuple[str, ...]]
    attributes: tuple[str, ...]
    bias: tuple[str, ...]

    def role(self, path: str) -> Role | None:
        """The part of a module of a block; None if the row does not name it. The longest name decides."""
        best: tuple[int, Role | None] = (0, None)
        for role, entries in self.names.items():
            for entry in entries:
                name = entry.partition("=")[0]
                if (path == name or path.endswith(f".{name}")) and len(name) > best[0]:
                    best = len(name), role
        return best[1]

    def layout(self, path: str, config: Any) -> str:
        """How a fused layer lies: ``thirds`` or ``heads``."""
        layouts = dict(entry.split("=") for entry in self.names["fused"])
        layout = next(layout for name, layout in layouts.items() if f".{path}".endswith(f".{name}"))
        if layout != "by_config":
            return layout
        multi = getattr(config, "multi_query", False) and not getattr(
            config, "new_decoder_architecture", False
        )
        return "thirds" if multi else "heads"


def read_families() -> tuple[Family, ...]:
    """The rows of the table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    roles: tuple[Role, ...] = get_args(Role)
    return tuple(
        Family(
            row["family"],
            tuple(row["types"].split()),
            {role: tuple(row[role].split()) for role in roles},
            tuple(row["attributes"].split()),
            tuple(row["bias"].split()),
        )
        for row in rows
    )


def family_of(config: Any) -> Family | None:
    """The family of a Hugging Face configuration; None if it is in no row."""
    kind = getattr(config, "model_type", None)
    return next((family for family in read_families() if kind in family.types), None)


def unknown_family(model: Any) -> ConfigError:
    """The refusal of a model whose layers no rule names."""
    kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    known = ", ".join(sorted(kind for family in read_families() for kind in family.types))
    return ConfigError(
        f"`model` must be of a family whose layers can be sliced, but is {kind}; known are {known}. For "
        "others give `injection_policy` (the layers whose outputs are summed) or `partition_config`"
    )
