"""The tree over the ranks of a job, along which they hear from each other where all need not hear from all.

Rank r has `FAN` children, from r * `FAN` + 1 on: so it hears from a fixed number of ranks, however many there
are. In a job of up to `FAN` + 1 ranks all others are children of the first.
"""

from __future__ import annotations

FAN = 64


def children(rank: int, world_size: int) -> range:
    """The ranks that `rank` hears from."""
    return range(min(rank * FAN + 1, world_size), min((rank + 1) * FAN + 1, world_size))


def parent(rank: int) -> int | None:
    """The rank that hears from `rank`; None for the first one."""
    return (rank - 1) // FAN if rank else None


def pause_of(seconds: float, world_size: int, most: float) -> float:
    """A pause of at least `seconds` with which all ranks together ask at most `most` times a second."""
    return max(seconds, world_size / most)
