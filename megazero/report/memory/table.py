"""What memory holds, by rank, place and kind: from a file of metrics, as a table and as sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.errors import DataError
from megazero.report.metrics_file import read_metrics
from megazero.train.memory import KINDS

KEY = "memory"
"""The key of a step's metrics that holds it: a mapping place -> kind -> bytes per rank."""

PLACES = ("device", "cpu", "nvme")
COLUMNS = ("rank", "where", *KINDS, "sum")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class RankMemory:
    """What one rank, or several that are alike, hold.

    Attributes:
        ranks: their numbers.
        places: bytes by place and kind.
    """

    ranks: tuple[int, ...]
    places: Mapping[str, Mapping[str, int]]

    @property
    def name(self) -> str:
        """The ranks' numbers, runs of them as ``0-3``."""
        runs: list[list[int]] = []
        for rank in self.ranks:
            if runs and rank == runs[-1][-1] + 1:
                runs[-1][1:] = [rank]
            else:
                runs.append([rank])
        return ", ".join("-".join(map(str, run)) for run in runs)

    def total(self, place: str) -> int:
        """All bytes of a place."""
        return sum(self.places.get(place, {}).values())


def read_memory(path: Path) -> list[RankMemory]:
    """The latest measurement in a file of metrics, a rank each.

    Raises:
        DataError: it cannot be read, is no file of metrics, or has none.
    """
    found = read_metrics(path, "METRICS", "an `iteration`", _measured)
    found = [record for record in found if record is not None]
    if not found:
        raise DataError(
            f"`METRICS` must have a step with `{KEY}`, but {path} has none; train with a version that writes "
            "it, from the first step on"
        )
    return [RankMemory((number,), places) for number, places in enumerate(found[-1])]


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
    """Those of ranks that hold the same, as one."""
    found: dict[str, RankMemory] = {}
    for each in memories:
        key = repr([(p, sorted(k.items())) for p, k in sorted(each.places.items())])
        known = found.get(key)
        found[key] = RankMemory((*(known.ranks if known else ()), *each.ranks), each.places)
    return list(found.values())


def rows(memories: Sequence[RankMemory]) -> list[tuple[str, ...]]:
    """A row per rank and place, of the cells that `COLUMNS` names."""
    found = []
    for each in memories:
        for number, place in enumerate(place for place in PLACES if each.places.get(place)):
            kinds = each.places[place]
            cells = (shown(kinds[kind]) if kind in kinds else "-" for kind in KINDS)
            found.append((each.name if number == 0 else "", place, *cells, shown(each.total(place))))
    return found


def verdict(memories: Sequence[RankMemory]) -> str:
    """A line that names the fullest device and what most of it is."""
    fullest = max(memories, key=lambda each: each.total("device"))
    kinds = fullest.places.get("device", {})
    if not kinds:
        return "no rank holds anything on the device"
    largest = max(kinds, key=kinds.__getitem__)
    share = kinds[largest] / fullest.total("device")
    return (
        f"the fullest device is that of rank {fullest.ranks[0]}: {shown(fullest.total('device'))}, of which "
        f"{share:.0%} are {largest}"
    )


def shown(size: float) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    unit = 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"
