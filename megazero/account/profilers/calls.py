"""Calls between the ranks of a group, and their rates by NVIDIA's nccl-tests (doc/PERFORMANCE.md there)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class CollectiveCall:
    """A call between the ranks of a group.

    Attributes:
        group: the group's name.
        operation: the method of `Group`; ``send`` and ``recv`` for messages.
        nbytes: bytes of its larger side: of a gather's output, of a reduce-scatter's input.
        ranks: the members' world ranks, or the two of a message.
        later: whether the caller goes on, and waits for the result later.
        number: which call it is, from 0: of its group in a run, the same on all members but for messages; of
            all calls of a planned step, in which messages that are exchanged at once share theirs.
    """

    group: str
    operation: str
    nbytes: int
    ranks: Sequence[int]
    later: bool = False
    number: int = 0


# Operation -> the bytes that each link carries for a byte of the call, times n / (n - 1) for n members.
_LINK_SHARE: Mapping[str, float] = MappingProxyType(
    {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
)


def bus_factor(operation: str, members: int) -> float:
    """Return the bytes that each link carries for each byte of a call's larger side.

    An all-reduce of n members sends each byte 2 (n - 1) / n times, the other collectives that cut the tensor
    (n - 1) / n times; broadcasts and messages send it once.
    """
    share = _LINK_SHARE.get(operation)
    return 1.0 if share is None else share * (members - 1) / members


def rates(operation: str, nbytes: int, seconds: float, members: int) -> tuple[float, float]:
    """Return bytes per second of a call: algorithm bandwidth, and bus bandwidth, which a link's rate bounds.

    Args:
        operation: the method of `Group`.
        nbytes: the bytes of the larger side.
        seconds: the time that the call took.
        members: the size of the group, not of the world.
    """
    algorithm = nbytes / max(seconds, 1e-9)
    return algorithm, algorithm * bus_factor(operation, members)
