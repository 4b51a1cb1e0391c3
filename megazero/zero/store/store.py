"""`Store`: holds a rank's weights, masters, moments and gradient sums, and lets a step visit them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megazero.zero.bucket import Bucket, Keeper
from megazero.zero.store.tier import Tier, Traffic

WEIGHT = "weight"
"""The kind of the master weights; moments have the names that the update rule gives them."""

GRADIENT = "gradient"
"""The kind of the gradient sums."""

Sizes = Mapping[str, Mapping[str, int]]
"""Bytes by place (``device``, or the name of a tier) and by what they hold, one of `HELD`."""

HELD = ("weights", "masters", "moments", "gradients", "buffers")
"""The state that is held between steps. Weights that are their own masters are weights; whatever else a rule
remembers of a parameter is a moment. State moves through the host's buffers to and from a disk."""


@dataclass(frozen=True)
class LoadedBucket:
    """A bucket during a visit.

    Attributes:
        bucket: the bucket visited.
        flats: its state by kind: flat tensors over the layout's `state_range`, all on one device, which may
            be the host where the weights are on another.
        weights: a tensor for the model's weights in a visit that moves their masters, see
            `Keeper.open_weights`.
    """

    bucket: Bucket
    flats: Mapping[str, Tensor]
    weights: Tensor | None = None


def add_up(held: Iterable[tuple[str, str, int]]) -> Sizes:
    """The sizes of items (place, what they hold, bytes)."""
    sizes: dict[str, dict[str, int]] = {}
    for place, what, size in held:
        sizes.setdefault(place, dict.fromkeys(HELD, 0))[what] += size
    return sizes


def traffic(store: Store) -> Traffic:
    """The traffic of a store to and from other memory so far."""
    return sum((tier.traffic() for tier in store.tiers), Traffic())


def offloaded_bytes(store: Store) -> Mapping[str, int]:
    """Bytes of state that a store keeps in other memory than the device's, by its name."""
    return {
        place: sum(size for what, size in held.items() if what != "buffers")
        for place, held in store.sizes().items()
        if place != "device" and any(size for what, size in held.items() if what != "buffers")
    }


def held_as(kind: str) -> str:
    """The entry of `HELD` that a kind of state belongs to."""
    return {WEIGHT: "masters", GRADIENT: "gradients"}.get(kind, "moments")


class Store(Keeper, Protocol):
    """Holds the buckets of one rank, and all their state that lasts from step to step.

    Attributes:
        buckets: in the order in which backward completes them.
        tiers: other memory that state is moved to and from; if there is any, the tensors that a visit yields
            are gone after it.
        offloaded: by bucket, the kinds whose `at_rest` is memory of a tier, which is too large to be copied.
    """

    buckets: list[Bucket]
    tiers: tuple[Tier, ...]
    offloaded: Mapping[Bucket, Collection[str]]

    def read_ahead(self, buckets: Sequence[Bucket]) -> None:
        """Start to read the slices that `shard` will be asked for next, and drop others read ahead before."""

    def make_moments(
        self, init_state: Callable[[Bucket, Tensor], dict[str, Tensor]], buckets: Sequence[Bucket]
    ) -> None:
        """Give each of these trained buckets the flat tensors that `init_state` makes of it and its masters.

        The errors of a rule's messages to other replicas may be of another size than the masters.
        """

    def sums(self, bucket: Bucket) -> Tensor:
        """The flat tensor on the device in which gradients are summed until `accumulate`: [padded].

        Called only where the row does not shard gradients.
        """

    def accumulate(self, bucket: Bucket, result: Tensor, *, first: bool) -> None:
        """Take complete sums over `state_range`: the step's first ones, or further ones to add.

        Every trained bucket's sums land in every step, even those that were already complete in `sums`.
        """

    def sizes(self) -> Sizes:
        """Bytes that are held between steps."""

    def at_rest(self, bucket: Bucket) -> Mapping[str, Tensor]:
        """Master weights and moments where they are kept between visits, for saving and loading.

        They are flat tensors over `state_range` by kind, on any device. The next visit sees changes to them.
        """

    def stream(
        self, kinds: Collection[str], buckets: Sequence[Bucket], changes: Collection[str] = ()
    ) -> Iterator[Sequence[LoadedBucket]]:
        """Load state onto the device that works on it, some buckets at a time, and put it back.

        Args:
            kinds: the kinds that are needed; each bucket gives those that it has.
            buckets: the buckets to visit, in this order; a store with little room reads the next ones ahead.
            changes: the kinds that the visitor changes; it leaves the others as they are.

        Yields:
            Buckets whose state is present until the next ones are requested.
        """
