"""What sleeps on disk is read before it is asked for, in order, and slices of weights never for longer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megazero.mpu.context import solo_context
from megazero.zero import gather
from megazero.zero.policy import ZeroPolicy
from megazero.zero.store.device import DeviceStore
from megazero.zero.store.disk import DiskTier
from megazero.zero.store.offload import OffloadStore, StatePlacement
from tests.zero.harness import Trainer, in_threads
from tests.zero.models import Zoo, zoo_loss
from tests.zero.policies import make_policy
from tests.zero.test_store import assert_equal, policy

LAYERS = 6


class NotedTier(DiskTier):
    """Says what it was asked for, and what of it had been read ahead."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.said: list[tuple[str, int]] = []
        self.most = 0

    def prefetch(self, slot):
        if slot not in self._reading:
            self.said.append(("read", slot.start // 4096))
        super().prefetch(slot)
        self.most = max(self.most, len(self._reading))

    def fetch(self, slot):
        self.said.append(("here" if slot in self._reading else "waits", slot.start // 4096))
        return super().fetch(slot)

    @property
    def ahead(self) -> int:
        """Slots that have been read and not been asked for."""
        return len(self._reading)


def trainer(
    folder: Path, tiers: list[NotedTier], kept: tuple[str, ...] = ("parameters",), **changes
) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(LAYERS)))
    settings = {"bucket_size": 16, "prefetch": 0, "max_live": 0, "persistence_threshold": 0, **changes}

    def kind(policy: ZeroPolicy) -> OffloadStore:
        tiers.append(NotedTier(folder))
        return OffloadStore(policy, StatePlacement(**dict.fromkeys(kept, tiers[-1])))

    def loss(model, step, sample):
        return model(torch.ones(2, 4) * (sample + 1)).square().sum() * 1e-6

    return Trainer(model, loss, make_policy(3, shard_alone=True, **settings), solo_context(), kind=kind)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_two_are_read_before_they_are_asked_for_from_the_first_step_on(tmp_path, overlap):
    """Layer 5 is in slot 0: buckets are in backward's order."""
    tiers: list[NotedTier] = []
    made = trainer(tmp_path, tiers, overlap_gather=overlap)
    (tier,) = tiers
    passes = [[5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]]
    for step in range(2):
        tier.said.clear()
        made.accumulate(step, 12)  # a sample each
        asked = [number for what, number in tier.said if what != "read"]
        assert asked == [*passes[0], *passes[1]] * 12
        assert sorted(n for what, n in tier.said if what == "read") == sorted(asked)  # none for nothing
        assert tier.ahead == 0
        assert tier.most <= 1 + gather.SLICES_AHEAD
        unread = list(tier.said)
        for order in passes * 12:
            for number, before in zip(order[2:], order, strict=False):
                begun, needed = unread.index(("read", number)), unread.index(("here", before))
                assert begun < needed  # while the one before the last is still to be taken
            for number in order:
                unread.remove(("read", number))
                unread.remove(("here", number))


@pytest.mark.parametrize("with_sums", [False, True])
def test_an_update_finds_the_first_two_buckets_read_and_gradients_are_added_without_waiting(
    tmp_path, with_sums
):
    tiers: list[NotedTier] = []
    kept = ("state", "gradients") if with_sums else ("state",)
    made = trainer(tmp_path, tiers, kept)
    (tier,) = tiers
    held = tier.nbytes // (16 * 4)
    for step in range(2):
        tier.said.clear()
        made.accumulate(step, 2)
        assert tier.ahead == 2 * 3  # masters and two moments of layers 5 and 4
        reads, asked = ([n for what, n in tier.said if (what == "read") == read] for read in (True, False))
        assert len(reads) == 2 * 3 + (LAYERS if with_sums else 0)
        assert len(asked) == (LAYERS if with_sums else 0)  # the second samples'
        for number, before in zip(asked[1:], asked, strict=False):
            assert tier.said.index(("read", number)) < tier.said.index(("here", before))
        tier.said.clear()
        made.optimizer.step(1e-2, 0.1)
        assert tier.said.count(("here", 0)) == 1
        assert not [n for what, n in tier.said if what == "waits"]
        # All that it holds is read once, and sums once more for their norm.
        assert len([n for what, n in tier.said if what == "read"]) == held + LAYERS * with_sums - 2 * 3
        assert tier.ahead == 0


def test_what_was_read_for_nothing_is_let_go_of(tmp_path):
    tiers: list[NotedTier] = []
    made = trainer(tmp_path, tiers)
    (tier,) = tiers
    made.parallel.gather(0)
    assert tier.ahead == gather.SLICES_AHEAD + 1  # there is no room to gather the first, so it is read too
    made.parallel.release(0)
    assert tier.ahead == 0
    made.parallel.gather(0)
    made.parallel.start(1)
    assert tier.ahead == 0
    assert len(tier._buffers) == 0


def test_numbers_do_not_depend_on_it(tmp_path, monkeypatch):
    def train(context, kind):
        return Trainer(Zoo(), zoo_loss, policy(3), context, kind=kind).train(3, 2)

    def on_disk(policy):
        tier = DiskTier(tmp_path)
        return OffloadStore(policy, StatePlacement(tier, tier, tier))

    wanted = in_threads(2, lambda c: train(c, DeviceStore))
    for ahead in (0, 1, 2, 100):
        monkeypatch.setattr(gather, "SLICES_AHEAD", ahead)
        assert_equal(in_threads(2, lambda c: train(c, on_disk)), wanted)
