"""`LinkedGroup`: a pipeline's stages, with two communicators for the links between neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.mpu.group import DONE, Group, Transfer, Work
from megazero.mpu.wrapping_group import WrappingGroup


class LinkedGroup(WrappingGroup):
    """Uses two groups alternately for the links between neighbours of a line of ranks, and one for the rest.

    A group runs one call after another, so with two of them a message to one neighbour need not wait for a
    message from the other. All messages between two ranks use the same group and stay in order.

    Args:
        inner: carries the link between the first two ranks, and every other one from there.
        odd: a second group over the same ranks, which carries the rest.
    """

    def __init__(self, inner: Group, odd: Group):
        super().__init__(inner)
        assert odd.ranks == inner.ranks, "two groups of one line of ranks"
        self.groups = (inner, odd)

    def exchange(self, transfers: Sequence[Transfer]) -> list[Work]:
        works: list[Work] = [DONE] * len(transfers)
        for parity, group in enumerate(self.groups):
            mine = [i for i, transfer in enumerate(transfers) if self._link(transfer.peer) % 2 == parity]
            started = group.exchange([transfers[i] for i in mine])
            for i, work in zip(mine, started, strict=True):
                works[i] = work
        return works

    def close(self) -> None:
        """Close both groups."""
        super().close()
        WrappingGroup(self.groups[1]).close()

    def _link(self, peer: int) -> int:
        """The number of a link: that of its first rank, or the last one for the link that closes the ring."""
        first, second = sorted((self.rank, peer))
        return first if second == first + 1 else second
