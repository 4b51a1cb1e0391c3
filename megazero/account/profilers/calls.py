"""Calls between the ranks of a group, with rates as in nccl-tests (doc/PERFORMANCE.md there)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class CollectiveCall:
    """A call between the ranks of a group.

    Attributes:
        group: the group's name.
        operation: the name of the method of `Group`; ``send`` or ``recv`` for a message.
        nbytes: bytes of the larger of input and output.
        ranks: the members' world ranks, or the two of a message.
        later: whether the call is asynchronous, with a later wait for the result.
        number: in a run, the number of the call in its group, from 0, the same on all members except for
            messages; in a planned step, the number among all calls, the same for messages in one exchange.
    """

    group: str
    operation: str
    nbytes: int
    ranks: Sequence[int]
    later: bool = False
    number: int = 0


# Operation -> bytes that each link carries per byte of the call, divided by (n - 1) / n for n members.
_LINK_SHARE: Mapping[str, float] = MappingProxyType(
    {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
)


def bus_factor(operation: str, members: int) -> float:
    """Return the bytes that each link carries per byte of the larger of input and output.

    An all-reduce of n members sends each byte 2 (n - 1) / n times; gathers, reduce-scatters and all-to-alls
    (n - 1) / n times; broadcasts and messages once.
    """
    share = _LINK_SHARE.get(operation)
    return 1.0 if share is None else share * (members - 1) / members


def rates(operation: str, nbytes: int, seconds: float, members: int) -> tuple[float, float]:
    """Return (algorithm bandwidth, bus bandwidth) of a call in bytes per second; links bound the second.

    Args:
        operation: the name of the method of `Group`.
        nbytes: bytes of the larger of input and output.
        seconds: the time that the call took.
        members: the size of the group, not of the world.
    """
    algorithm = nbytes / max(seconds, 1e-9)
    return algorithm, algorithm * bus_factor(operation, members)
