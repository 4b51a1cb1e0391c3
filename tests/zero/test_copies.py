"""Copies that are not equal: found, named and made equal, wherever they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megazero.errors import CommunicationError
from megazero.mpu.context import thread_context
from megazero.mpu.grid import ProcessGrid
from megazero.mpu.thread_group import ThreadWorld
from megazero.zero import copies
from megazero.zero.copies import CopyCheck, _Compared
from megazero.zero.fingerprint import Fingerprints, rows_at_once
from tests.tables import over_table

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def test_any_single_change_changes_a_fingerprint():
    torch.manual_seed(1)
    prints = Fingerprints()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8):
        whole = (torch.randn(1000) * 50).to(dtype)
        before = int(prints.of(whole))
        assert int(prints.of(whole.clone())) == before
        for place in (0, 1, 498, 999):
            changed = whole.clone()
            bits = changed.view(
                {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            )
            bits[place] ^= 1
            assert int(prints.of(changed)) != before, (dtype, place)


def test_order_counts():
    prints = Fingerprints()
    a, b = torch.arange(6.0), torch.tensor([1.0, 0.0, 2.0, 3.0, 4.0, 5.0])
    assert int(prints.of(a)) != int(prints.of(b))
    big = torch.zeros(1 << 20)
    big[0] = 1.0
    assert int(prints.of(big)) != int(prints.of(big.roll(1 << 18)))  # the same place in another chunk


@over_table("rows", [None, 1, 2, 3, 64])
def test_how_much_is_worked_on_at_once_does_not_count(rows):
    """A GPU takes 64 MiB at a time, and its fingerprint is the CPU's."""
    prints = Fingerprints(rows=rows)
    assert int(prints.of(torch.arange(5))) == 8848014673809938244
    assert int(prints.of(torch.arange(300_000))) == -1900847923795555746  # 2.3 rows
    assert int(prints.of(torch.arange(7 << 17))) == int(Fingerprints().of(torch.arange(7 << 17)))
    halves = torch.arange(2_000_003, dtype=torch.int32).to(torch.bfloat16)  # 3.8 rows, and 6 bytes
    assert int(prints.of(halves)) == 3496924271574518306


def test_a_gpu_takes_64_mib_at_a_time():
    assert [rows_at_once(torch.device(name)) for name in ("cpu", "cuda:3")] == [1, 64]
    sizes = []

    class Seen(torch.Tensor):
        def split(self, size):
            sizes.append(8 * size >> 20)
            return super().split(size)

    for rows in (1, 64):
        Fingerprints(rows=rows).of(torch.zeros(8).as_subclass(Seen))
    assert sizes == [1, 1, 64, 64]


@over_table("offset", [0, 1, 2, 3])
def test_where_a_tensor_begins_does_not_count(offset):
    prints, flat = Fingerprints(), torch.arange(64, dtype=torch.bfloat16)
    shifted = torch.cat([torch.zeros(offset, dtype=torch.bfloat16), flat])[offset:]
    assert int(prints.of(shifted)) == int(prints.of(flat))


def test_nothing_has_a_fingerprint():
    assert int(Fingerprints().of(torch.empty(0))) == 0


def test_a_piece_that_a_member_lacks_is_named_instead_of_waited_for():
    """Two stages once compared 8 with 6 pieces of a tied embedding: over Gloo both waited for ever."""
    world = ThreadWorld(2)

    def agree(rank: int) -> str:
        check = CopyCheck.__new__(CopyCheck)
        check.context = thread_context(world, ProcessGrid(dp=2), rank)
        check._shared = ["replica"]
        held = [("embedding.word.weight", "master weights"), ("embedding.word.weight", "exp_avg")]
        prints = {piece: torch.zeros(()) for piece in held[: 2 - rank]}
        with pytest.raises(CommunicationError) as error:
            check._agree_on_pieces({"replica": _Compared(check.context.groups["replica"], prints)})
        return str(error.value)

    first, second = world.run(agree)
    assert first == second
    assert "`embedding.word.weight` (exp_avg) must be held by all of ranks 0-1" in first
    assert "held by rank 0 and not by rank 1" in first


def test_a_piece_that_is_offloaded_is_taken_over_through_the_device(monkeypatch):
    """NCCL takes no tensor of the host's."""
    world, sent = ThreadWorld(2), []
    monkeypatch.setattr(copies, "on_device", lambda tensor, device: sent.append(tensor.clone()) or sent[-1])

    def repair(rank: int) -> list[float]:
        check, held = CopyCheck.__new__(CopyCheck), torch.tensor([1.0 + rank, 2.0])
        check.context = thread_context(world, ProcessGrid(dp=2), rank)
        check._shared, check._kinds = ["replica"], ()
        check._store = SimpleNamespace(buckets=(), stream=lambda *args, changes: [[None]])
        check._pieces = lambda loaded: [copies._HeldPiece("norm", "exp_avg", held, {"replica"})]
        check.optimizer = SimpleNamespace(publish=lambda: None)
        check.repair([copies.TakeOver("replica", ("norm", "exp_avg"), 1)])
        return held.tolist()

    assert world.run(repair) == [[2.0, 2.0], [2.0, 2.0]]
    assert len(sent) == 2
