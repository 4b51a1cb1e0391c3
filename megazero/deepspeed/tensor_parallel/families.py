"""The families of models that can be sliced: the rows of ``families.csv``."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import nn

from megazero.deepspeed.tensor_parallel.heads import is_multi_query
from megazero.errors import ConfigError

TABLE = Path(__file__).with_name("families.csv")

Role = Literal[
    "query", "key_value", "output", "up", "down", "fused", "halves", "experts", "tables", "whole", "shared"
]
"""The role of a module in its block.

- query: a linear layer whose outputs are query heads.
- key_value: a linear layer whose outputs are key-value heads.
- output: a linear layer whose inputs are query heads; the ranks' products are summed.
- up: a linear layer whose outputs are features of an MLP.
- down: a linear layer whose inputs are features of an MLP; the ranks' products are summed.
- fused: a linear layer for queries, keys and values, ``name=layout``. Layouts: ``thirds`` (all queries, all
  keys, all values), ``heads`` (each group's queries, keys and values together), ``by_config`` (``thirds``
  with multi-query attention, else ``heads``).
- halves: a linear layer of two concatenated MLP weights.
- experts: a module of stacked experts, `gate_up_proj` [e, 2f, h] and `down_proj` [e, h, f].
- tables: an embedding with a column for each head.
- whole: a linear layer that each rank keeps whole.
- shared: a module whose weights all heads share, so that each rank has a part of the gradient.
"""


@dataclass(frozen=True)
class ModelFamily:
    """How the blocks of a family are sliced. Modules are named by the end of their path in a block.

    Attributes:
        family: the name of the family.
        types: the `model_type` of the family's configurations.
        names: role -> the modules of that role.
        attributes: attributes of attention modules that depend on the number of heads, ``name=meaning``, see
            `Heads.value`.
        bias: arguments of the attention's forward that have a row for each head.
    """

    family: str
    types: tuple[str, ...]
    names: Mapping[Role, tuple[str, ...]]
    attributes: tuple[str, ...]
    bias: tuple[str, ...]

    def role(self, path: str) -> Role | None:
        """Return the role of a module of a block by the longest matching name; None without a match."""
        best: tuple[int, Role | None] = (0, None)
        for role, entries in self.names.items():
            for entry in entries:
                name = entry.partition("=")[0]
                if (path == name or path.endswith(f".{name}")) and len(name) > best[0]:
                    best = len(name), role
        return best[1]

    def layout(self, path: str, config: object) -> str:
        """Return the layout of a fused layer, ``thirds`` or ``heads``; see `Role`."""
        layouts = dict(entry.split("=") for entry in self.names["fused"])
        layout = next(layout for name, layout in layouts.items() if f".{path}".endswith(f".{name}"))
        if layout != "by_config":
            return layout
        return "thirds" if is_multi_query(config) else "heads"


def read_families() -> tuple[ModelFamily, ...]:
    """Read the table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    roles: tuple[Role, ...] = get_args(Role)
    return tuple(
        ModelFamily(
            row["family"],
            tuple(row["types"].split()),
            {role: tuple(row[role].split()) for role in roles},
            tuple(row["attributes"].split()),
            tuple(row["bias"].split()),
        )
        for row in rows
    )


def family_of(config: object) -> ModelFamily | None:
    """Return the family of a Hugging Face configuration; None if it is unknown."""
    kind = getattr(config, "model_type", None)
    return next((family for family in read_families() if kind in family.types), None)


def unknown_family(model: nn.Module) -> ConfigError:
    """Return the error for a model of unknown family without rules."""
    kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    known = ", ".join(sorted(kind for family in read_families() for kind in family.types))
    return ConfigError(
        f"`model` must be of a known family ({known}), but is {kind}; give `injection_policy` (the layers "
        "whose outputs are summed) or `partition_config`"
    )
