"""`DelayedUpdates`: updates on the host that run while the next step computes (ZeRO-Offload's DPU)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from megazero.mpu.group import Work
from megazero.mpu.threads import helper_pool
from megazero.zero.bucket import Bucket
from megazero.zero.store.offload import OffloadStore
from megazero.zero.store.store import GRADIENT, WEIGHT, LoadedBucket
from megazero.zero.update import Update

IN_USE = "weight_in_use"
"""The kind of the weights that forward reads, where these are not the rounded masters."""


class DelayedUpdates:
    """Runs each update during the next step's forward and backward (Ren et al. 2021, "ZeRO-Offload").

    Update t starts on another thread when the gradients of step t are complete, and its weights are published
    at the end of step t + 1, so step t + 2 is the first to use them: one step later than usual. A skipped
    step starts and publishes nothing. Buckets are updated in the order in which backward
    completes them, and whatever touches a bucket's state first waits for its update, so no number depends on
    when the update runs.

    Args:
        store: keeps masters, moments and gradient sums in the host's memory.
        after: the number of first updates that are not delayed, while weights change fast (40 in the paper).
    """

    def __init__(self, store: OffloadStore, after: int):
        assert store.placement.updates_on_host, "what moves to the host and back cannot change beside a step"
        self.store = store
        self.after = after
        self._thread: ThreadPoolExecutor | None = None

    def show_in_use(self) -> None:
        """Gather the weights in use again, because they have been written to, as after a resume."""
        for bucket in self.store.buckets:
            if bucket.key.trainable:
                bucket.show_in_use()

    def begin(
        self,
        update: Update,
        buckets: Sequence[Bucket],
        kinds: Sequence[str],
        publish: Callable[[LoadedBucket], Work],
    ) -> None:
        """Publish the previous update, and start this one.

        Args:
            update: the update of these buckets.
            buckets: all buckets that it trains.
            kinds: the kinds of state that it needs besides masters and gradients.
            publish: brings a bucket's masters to the weights.
        """
        loaded_buckets: list[LoadedBucket] = []
        everything = (WEIGHT, GRADIENT, *kinds)
        works = []
        for visited in self.store.stream(everything, buckets, changes=everything):
            works += [publish(loaded) for loaded in visited]
            loaded_buckets += visited  # they are worked on where they are kept, so they outlive the visit
        for work in works:
            work.wait()
        if self._thread is None:
            self._thread = helper_pool(1, "update")
        for loaded in loaded_buckets:
            self.store.updates[loaded.bucket] = self._thread.submit(_apply, update, loaded)


@torch.no_grad()
def _apply(update: Update, loaded: LoadedBucket) -> None:
    update.apply([loaded])
