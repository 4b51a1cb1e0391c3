"""The memory of ranks by place and kind: read from a file of metrics, and shown as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.account.memory import KINDS
from megazero.commands.metrics_file import read_metrics
from megazero.errors import DataError
from megazero.plan.words import runs, shown

KEY = "memory"
"""The key of a step's metrics with the memory of each rank, place -> kind -> bytes."""

PLACES = ("device", "cpu", "nvme")
COLUMNS = ("rank", "where", *KINDS, "sum")


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank, or of several ranks that hold the same.

    Attributes:
        ranks: the ranks.
        places: the bytes of each, by place and kind.
    """

    ranks: tuple[int, ...]
    places: Mapping[str, Mapping[str, int]]

    @property
    def name(self) -> str:
        """The ranks as text, with neighbours as ``0-3``."""
        return runs(self.ranks)

    def total(self, place: str) -> int:
        """The bytes held in a place."""
        return sum(self.places.get(place, {}).values())


def read_memory(path: Path) -> list[RankMemory]:
    """Read the latest measurement in a file of metrics, one entry per rank.

    Raises:
        DataError: the file cannot be read, is no file of metrics, or has no measurement.
    """
    steps = read_metrics(path, "METRICS", "an `iteration`", _measured)
    latest = next((ranks for ranks in reversed(steps) if ranks is not None), None)
    if latest is None:
        raise DataError(
            f"`METRICS` must have a step with `{KEY}`, but {path} has none; train with a version that writes "
            "it, from the first step on"
        )
    return [RankMemory((number,), places) for number, places in enumerate(latest)]


def _measured(record: Mapping[str, Any]) -> list[dict[str, dict[str, int]]] | None:
    int(record["iteration"])
    if KEY not in record:
        return None
    return [
        {
            place: {kind: int(places[place][kind]) for kind in KINDS if kind in places[place]}
            for place in PLACES
            if place in places
        }
        for places in record[KEY]
    ]


def merge_alike(memories: Sequence[RankMemory]) -> list[RankMemory]:
    """Merge the entries of ranks that hold the same."""
    merged: dict[str, RankMemory] = {}
    for memory in memories:
        key = repr([(p, sorted(k.items())) for p, k in sorted(memory.places.items())])
        known = merged.get(key)
        merged[key] = RankMemory((*(known.ranks if known else ()), *memory.ranks), memory.places)
    return list(merged.values())


def rows(memories: Sequence[RankMemory]) -> list[tuple[str, ...]]:
    """The cells of a table with a row per rank and place, and the columns of `COLUMNS`."""
    table = []
    for memory in memories:
        for number, place in enumerate(place for place in PLACES if memory.places.get(place)):
            kinds = memory.places[place]
            cells = (shown(kinds[kind]) if kind in kinds else "-" for kind in KINDS)
            table.append((memory.name if number == 0 else "", place, *cells, shown(memory.total(place))))
    return table


def verdict(memories: Sequence[RankMemory]) -> str:
    """A line that names the fullest device, and the kind that takes most of it."""
    fullest = max(memories, key=lambda memory: memory.total("device"))
    kinds = fullest.places.get("device", {})
    if not kinds:
        return "no rank holds anything on the device"
    largest = max(kinds, key=kinds.__getitem__)
    share = kinds[largest] / fullest.total("device")
    return (
        f"the fullest device is that of rank {fullest.ranks[0]}: {shown(fullest.total('device'))}, of which "
        f"{share:.0%} are {largest}"
    )
