"""`GatherOrder`: whether all ranks gathered the same layers in the same order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from megazero.errors import CommunicationError
from megazero.mpu.context import ParallelContext
from megazero.mpu.host import read_values
from megazero.mpu.messages import gather_values, name_ranks
from megazero.mpu.torch_group import joined_world
from megazero.mpu.watch.job_notes import StoreJobNotes
from megazero.zero.bucket import Bucket

_FACTOR, _PRIME = 1_000_003, (1 << 31) - 1
_PATIENCE = 10.0  # seconds; all ranks reach their timeouts at about the same time


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
        self._checks = 0

    def note(self, bucket: Bucket) -> None:
        """Note that a bucket is being gathered."""
        number = self._numbers.get(bucket)
        if number is not None and self._group.size > 1:
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
        with self.explaining():
            self._group.all_reduce(bounds, "max").wait()
        greatest, least = read_values(bounds) or (0.0, 0.0)
        mine, self._gathered, self._print = self._gathered, [], 0
        self._checks += 1
        if greatest != -least:
            raise CommunicationError(self._difference(gather_values(self._group, mine, self._device)))

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Name what is behind a failure of a call between the ranks in the block: they run different layers.

        Where one rank gathers more layers than another, each waits in a call that the other does not make.
        When the calls have failed, the ranks compare what they gathered through the world's store.

        Raises:
            CommunicationError: they differ. Without an answer from each rank, the call's own error goes on.
        """
        try:
            yield
        except CommunicationError as error:
            alone = self._group.size == 1 or joined_world() is None
            everyone = [] if alone else self._exchange()
            if all(theirs == everyone[0] for theirs in everyone):
                raise
            raise CommunicationError(self._difference(everyone)) from error

    def _exchange(self) -> list[list[int]]:
        """The numbers that each rank has gathered since the last check, by the store; none if one is mute."""
        name, deadline = f"gathered/{self._checks}", time.monotonic() + _PATIENCE
        try:
            notes = StoreJobNotes.of_world()
            everyone = self._share(notes, name, self._gathered, deadline)
        except CommunicationError:
            return []  # the process that keeps the store has ended
        with suppress(CommunicationError):  # it stays until all have read
            self._share(notes, f"{name}/read", [], deadline)
        return everyone

    def _share(self, notes: StoreJobNotes, name: str, mine: list[int], deadline: float) -> list[list[int]]:
        """The lists of all ranks; none, when one's is not there by the deadline."""
        keys = [f"{name}/{rank}" for rank in self._group.ranks]
        notes.post(keys[self._group.rank], json.dumps(mine))
        while None in (texts := notes.read_all(keys)):
            if time.monotonic() > deadline:
                return []
            time.sleep(0.05)
        return [json.loads(text or "") for text in texts]

    def _difference(self, everyone: list[list[int]]) -> str:
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
