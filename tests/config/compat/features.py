"""The features that refused flags ask for and that do not exist here, as the tables of flags name them."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from megazero.config.compat.foreign import arity
from megazero.config.tables import blocks, rows


def _features() -> Iterator[tuple[str, str]]:
    for head, flags in blocks("absent.txt"):
        for flag in flags:
            yield arity(flag)[0], head.partition(": ")[0]
    for row in rows("conditional.csv"):
        if row["feature"]:
            yield arity(row["flag"])[0], row["feature"]


FEATURES = MappingProxyType(dict(_features()))
