"""`GatherOrder`: whether all ranks gathered the same layers in the same order."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megazero.errors import CommunicationError
from megazero.mpu.context import ParallelContext
from megazero.mpu.host import read_values
from megazero.mpu.messages import gather_values, name_ranks
from megazero.zero.bucket import Bucket

_FACTOR, _PRIME = 1_000_003, (1 << 31) - 1


class GatherOrder:
    """Notes the buckets that are gathered, and compares them over the replicas when it is asked.

    A gather is matched with those of other ranks by its place in the order of calls alone. If ranks run
    different layers of one size, each would get weights that are pieces of both, without any error.

    Args:
        numbers: a number for each bucket, the same on every rank.
        context: the groups; only buckets of dense parameters are compared.
    """

    def __init__(self, numbers: Mapping[Bucket, int], context: ParallelContext):
        self._numbers = {bucket: n for bucket, n in numbers.items() if bucket.key.replicas == "replica"}
        self._names = {n: bucket.layout.specs[0].name for bucket, n in self._numbers.items()}
        self._group, self._device = context.replica, context.device
        self._gathered: list[int] = []
        self._print = 0

    def note(self, bucket: Bucket) -> None:
        """Note that a bucket is being gathered."""
        number = self._numbers.get(bucket)
        if number is not None:
            self._gathered.append(number)
            self._print = (self._print * _FACTOR + number + 1) % _PRIME

    def check(self) -> None:
        """Compare what was gathered since the last check; every replica calls this.

        Raises:
            CommunicationError: on all of them: they gathered different layers.
        """
        if self._group.size == 1:
            return
        bounds = torch.tensor([self._print, -self._print], dtype=torch.int64, device=self._device)
        self._group.all_reduce(bounds, "max").wait()
        greatest, least = read_values(bounds) or (0.0, 0.0)
        mine, self._gathered, self._print = self._gathered, [], 0
        if greatest != -least:
            raise CommunicationError(self._difference(mine))

    def _difference(self, mine: list[int]) -> str:
        everyone = gather_values(self._group, mine, self._device)
        shortest = min(map(len, everyone))
        place = next((i for i in range(shortest) if len({theirs[i] for theirs in everyone}) > 1), shortest)
        ranks: dict[str, list[int]] = {}
        for rank, theirs in zip(self._group.ranks, everyone, strict=True):
            layer = f"`{self._names[theirs[place]]}`" if place < len(theirs) else "nothing more"
            ranks.setdefault(layer, []).append(rank)
        layers = ", ".join(f"{layer} on {name_ranks(where)}" for layer, where in ranks.items())
        return (
            "all ranks must run the same layers in the same order at ZeRO stage 3, but gathered "
            f"{layers}, so the results since the last step are wrong; call "
            "`set_z3_leaf_modules(model, [TheirClass])` "
            "before `initialize` for the module that chooses among them, or use stage 2"
        )
