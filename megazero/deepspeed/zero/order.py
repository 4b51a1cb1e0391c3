"""`GatherOrder`: check that all ranks gather the same layers in the same order."""

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
    """Records the buckets that are gathered, and compares the records of all replicas.

    Ranks' gathers are matched by the order of calls alone. If ranks run different layers of the same size,
    each gets weights that mix slices of both, without any error.

    Args:
        numbers: the number of each bucket, the same on every rank.
        context: this rank's groups; only buckets of dense parameters are compared.
    """

    def __init__(self, numbers: Mapping[Bucket, int], context: ParallelContext):
        self._numbers = {bucket: n for bucket, n in numbers.items() if bucket.key.replicas == "replica"}
        self._names = {n: bucket.layout.specs[0].name for bucket, n in self._numbers.items()}
        self._group, self._device = context.replica, context.device
        self._gathered: list[int] = []
        self._hash = 0
        self._checks = 0

    def note(self, bucket: Bucket) -> None:
        """Record that a bucket is gathered."""
        number = self._numbers.get(bucket)
        if number is not None and self._group.size > 1:
            self._gathered.append(number)
            self._hash = (self._hash * _FACTOR + number + 1) % _PRIME

    def check(self) -> None:
        """Compare the gathers since the last check; every replica calls this.

        Raises:
            CommunicationError: on all replicas, if they gathered different layers.
        """
        if self._group.size == 1:
            return
        bounds = torch.tensor([self._hash, -self._hash], dtype=torch.int64, device=self._device)
        with self.explaining():
            self._group.all_reduce(bounds, "max").wait()
        greatest, least = read_values(bounds) or (0.0, 0.0)
        own, self._gathered, self._hash = self._gathered, [], 0
        self._checks += 1
        if greatest != -least:
            raise CommunicationError(self._difference(gather_values(self._group, own, self._device)))

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Context that explains a failed collective if the cause is that ranks run different layers.

        A rank that gathers more layers than another waits in a collective that the other never calls. After
        the timeout, the ranks compare their gathers through the world's store.

        Raises:
            CommunicationError: the gathers differ. The collective's own error propagates if they are equal,
                or if a rank does not answer.
        """
        try:
            yield
        except CommunicationError as error:
            alone = self._group.size == 1 or joined_world() is None
            everyone = [] if alone else self._exchange()
            if all(gathered == everyone[0] for gathered in everyone):
                raise
            raise CommunicationError(self._difference(everyone)) from error

    def _exchange(self) -> list[list[int]]:
        """Each rank's gathers since the last check, through the store; empty if a rank does not answer."""
        name, deadline = f"gathered/{self._checks}", time.monotonic() + _PATIENCE
        try:
            notes = StoreJobNotes.of_world()
            everyone = self._share(notes, name, self._gathered, deadline)
        except CommunicationError:
            return []  # the process with the store has ended
        with suppress(CommunicationError):  # the process with the store must not end before all have read
            self._share(notes, f"{name}/read", [], deadline)
        return everyone

    def _share(self, notes: StoreJobNotes, name: str, own: list[int], deadline: float) -> list[list[int]]:
        """All ranks' lists; empty if one is missing at the deadline."""
        keys = [f"{name}/{rank}" for rank in self._group.ranks]
        notes.post(keys[self._group.rank], json.dumps(own))
        while None in (texts := notes.read_all(keys)):
            if time.monotonic() > deadline:
                return []
            time.sleep(0.05)
        return [json.loads(text or "") for text in texts]

    def _difference(self, everyone: list[list[int]]) -> str:
        shortest = min(map(len, everyone))
        first = next((i for i in range(shortest) if len({own[i] for own in everyone}) > 1), shortest)
        ranks: dict[str, list[int]] = {}
        for rank, own in zip(self._group.ranks, everyone, strict=True):
            layer = f"`{self._names[own[first]]}`" if first < len(own) else "nothing more"
            ranks.setdefault(layer, []).append(rank)
        layers = ", ".join(f"{layer} on {name_ranks(numbers)}" for layer, numbers in ranks.items())
        return (
            "all ranks must run the same layers in the same order at ZeRO stage 3, but gathered "
            f"{layers}, so the results since the last step are wrong; call "
            "`set_z3_leaf_modules(model, [TheirClass])` "
            "before `initialize` for the module that chooses among them, or use stage 2"
        )
