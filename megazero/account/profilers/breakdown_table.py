"""The table of the times of phases and waits, over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.config.tree.logging import LoggingConfig
from megazero.mpu.group import Group


@dataclass(frozen=True)
class RankStatistics:
    """The numbers of this rank, and the least and the greatest over all ranks.

    Attributes:
        own: this rank's numbers, float64 [rows].
        least, most: the extremes over ranks, float64 [rows].
        fastest, slowest: the first rank with each extreme, [rows].
        everyone: all ranks' numbers, float64 [ranks, rows]; None unless asked for.
    """

    own: Tensor
    least: Tensor
    most: Tensor
    fastest: Sequence[int]
    slowest: Sequence[int]
    everyone: Tensor | None = None

    @classmethod
    def of_all(cls, own: Tensor, everyone: Tensor) -> RankStatistics:
        """The statistics of numbers that this rank has gathered."""
        least, most = everyone.min(0), everyone.max(0)
        return cls(own, least.values, most.values, least.indices.tolist(), most.indices.tolist(), everyone)

    @classmethod
    def over(cls, own: Tensor, group: Group) -> RankStatistics:
        """The statistics over a group, by two reductions; every member calls this."""
        ends = torch.cat([own, -own])
        group.all_reduce(ends, "max").wait()
        most, least = ends[: len(own)], -ends[len(own) :]
        far = group.ranks[-1] + 1
        holders = torch.cat([torch.where(own == end, group.ranks[group.rank], far) for end in (most, least)])
        group.all_reduce(holders, "min").wait()
        slowest, fastest = holders.view(2, -1).tolist()
        return cls(own, least, most, fastest, slowest)


def breakdown_table(
    rows: Sequence[str | tuple[str, str]],
    spread: RankStatistics,
    iterations: tuple[int, int],
    settings: LoggingConfig,
    clock: str,
) -> list[str]:
    """Format the table as lines of text, in ms per step.

    Args:
        rows: phases, waits as (group, operation), and last the whole step.
        spread: the seconds of each row.
        iterations: the first and the last iteration.
        settings: the ranks to show.
        clock: whose clock it is, the host's or the device's.
    """
    heads = ["", "rank 0", "share"]
    if spread.everyone is not None:
        heads += [f"rank {rank}" for rank in range(1, len(spread.everyone))]
    else:
        heads += ["least (rank)"] if settings.timing_log_option == "minmax" else []
        heads += ["most (rank)"]
    lines = [
        f" time per iteration (ms) of iterations {iterations[0]} to {iterations[1]}, by the {clock}'s clock",
        _line(heads),
    ]
    whole = float(spread.own[-1]) or 1.0
    phases = [at for at, row in enumerate(rows[:-1]) if isinstance(row, str)]
    waits = [at for at, row in enumerate(rows) if isinstance(row, tuple) and float(spread.most[at]) > 0]
    # A phase that no rank has spent time on gets no row.
    shown = [at for at in phases if float(spread.most[at]) > 0]
    for at in (*shown, *waits, len(rows) - 1):
        cells = [_name(rows[at]), _ms(spread.own[at]), f"{100 * float(spread.own[at]) / whole:.1f}%"]
        if spread.everyone is not None:
            cells += [_ms(times[at]) for times in spread.everyone[1:]]
        else:
            if settings.timing_log_option == "minmax":
                cells.append(f"{_ms(spread.least[at])} ({spread.fastest[at]})")
            cells.append(f"{_ms(spread.most[at])} ({spread.slowest[at]})")
        lines.append(_line(cells))
    exposed = float(sum((spread.own[at] for at in waits), torch.zeros(())))
    lines.append(
        f" exposed communication of rank 0: {1e3 * exposed:.1f} ms, {100 * exposed / whole:.1f}% of a step"
    )
    return lines


def _name(row: str | tuple[str, str]) -> str:
    if isinstance(row, str):
        return row
    group, operation = row
    return "waits for communication" if not group else f"waits: {group} {operation}"


def _line(cells: Sequence[str]) -> str:
    first, *others = cells
    return (f"  {first:<32}" + "".join(f"{cell:>16}" for cell in others)).rstrip()


def _ms(seconds: Tensor) -> str:
    return f"{1e3 * float(seconds):.2f}"
