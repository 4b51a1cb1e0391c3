"""The balance of experts as a table: the busiest, the idlest and the dead experts of each layer."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.commands.moe_report.loads import LayerLoad, LoadRecord
from megazero.plan.words import runs

_BARS = "▁▂▃▄▅▆▇█"
_DEAD = "·"
COLUMNS = ("layer", "load of each expert", "experts", "busiest", "idlest", "dead")


@dataclass(frozen=True)
class DeadExpert:
    """An expert whose share of the tokens is below the threshold."""

    layer: int
    expert: int
    share: float


def dead_experts(record: LoadRecord, threshold: float) -> list[DeadExpert]:
    """The experts that get less than `threshold` times an even share, by layer and number."""
    return [
        DeadExpert(load.layer, expert, share)
        for load in record.layers
        for expert, share in enumerate(load.shares)
        if share < threshold
    ]


def bars(load: LayerLoad, threshold: float) -> str:
    """A character per expert: half a bar is an even share, a full one twice that or more, a dot is dead."""
    highest = len(_BARS) - 1
    return "".join(
        _DEAD if share < threshold else _BARS[min(highest, int(share / 2 * highest + 0.5))]
        for share in load.shares
    )


def rows(record: LoadRecord, threshold: float) -> list[tuple[object, ...]]:
    """The cells of a table with a row per layer, and the columns of `COLUMNS`."""
    dead = dead_experts(record, threshold)
    table: list[tuple[object, ...]] = []
    for load in record.layers:
        shares = load.shares
        busiest, idlest = (shares.index(extreme(shares)) for extreme in (max, min))
        table.append(
            (
                load.layer,
                bars(load, threshold),
                len(shares),
                f"{busiest} ({shares[busiest]:.2f})",
                f"{idlest} ({shares[idlest]:.2f})",
                sum(expert.layer == load.layer for expert in dead),
            )
        )
    return table


def verdict(record: LoadRecord, threshold: float) -> str:
    """Say how many experts are dead, with a line for each layer that has dead experts."""
    dead, count = dead_experts(record, threshold), sum(len(load.tokens) for load in record.layers)
    if not dead:
        return f"none of the {count} experts gets less than {threshold:g} of an even share"
    by_layer: dict[int, list[int]] = {}
    for expert in dead:
        by_layer.setdefault(expert.layer, []).append(expert.expert)
    named = (f"  layers.{layer}.mlp.experts {runs(numbers)}" for layer, numbers in by_layer.items())
    head = f"{len(dead)} of the {count} experts get less than {threshold:g} of an even share:"
    return "\n".join([head, *named])
