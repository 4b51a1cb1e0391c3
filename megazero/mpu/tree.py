"""Patterns of messages in which no rank hears from all others.

In a tree, rank r has `FAN` children, from r * `FAN` + 1 on, so it hears from at most `FAN` ranks however many
there are. In a job of up to `FAN` + 1 ranks all others are children of the first. In tiers, ranks reduce over
a few small groups, one after the other.
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


def tiers(rank: int, world_size: int) -> list[range]:
    """The groups of `rank` such that reducing over one after the other reduces over all ranks.

    A group has up to `FAN` members, unless the number of ranks has a larger prime factor.
    """
    groups, stride = [], 1
    while stride < world_size:
        left = world_size // stride
        size = next((n for n in range(min(FAN, left), 1, -1) if left % n == 0), left)
        first = rank - rank // stride % size * stride
        groups.append(range(first, first + size * stride, stride))
        stride *= size
    return groups
