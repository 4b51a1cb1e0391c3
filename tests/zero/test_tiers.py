"""Tiers: what is put is fetched, errors name the folder, and nothing is left."""

from __future__ import annotations

import errno
import os
import time

import pytest
import torch

from megazero.errors import OffloadError
from megazero.zero.store import disk, host
from megazero.zero.store.disk import PAGE, DiskSettings, DiskTier
from megazero.zero.store.host import HostTier
from megazero.zero.store.tier import ALIGNMENT, Traffic
from tests.tables import over_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SETTINGS = {
    "unbuffered": DiskSettings(block=PAGE),
    "buffered": DiskSettings(block=2 * PAGE, depth=1, direct=False),
}


def tiers(folder):
    return [HostTier(), *(DiskTier(folder, settings) for settings in SETTINGS.values())]


@over_table("which", range(3), ids=["host", *SETTINGS])
def test_what_is_put_is_fetched(tmp_path, which):
    """Slots of all sizes around blocks and pages, in turns, with the lead of their first element."""
    tier, held = tiers(tmp_path)[which], []
    for number, numel in enumerate((1, 7, 1023, 1024, 1025, 2048, 5000)):
        dtype = DTYPES[number % 3]
        lead = number * dtype.itemsize
        slot = tier.make(numel, dtype, lead)
        assert tier.fetch(slot).count_nonzero() == 0
        tier.drop(slot, tier.fetch(slot) if tier.in_place else tier._view(slot))
        held.append((slot, torch.randn(numel).to(dtype)))
    for slot, content in held:
        there = tier.blank(slot)
        assert (there.numel(), there.dtype, there.data_ptr() % ALIGNMENT) == (
            slot.numel,
            slot.dtype,
            slot.lead % ALIGNMENT,
        )
        there.copy_(content)
        tier.put(slot, there)
    for slot, content in reversed(held):
        tier.prefetch(slot)
        tier.prefetch(slot)
        there = tier.fetch(slot)
        assert there.equal(content)
        there.mul_(2)
        tier.put(slot, there)
    for slot, content in held:
        assert tier.at_rest(slot).equal(content * 2)
        tier.at_rest(slot).fill_(3)
    for slot, _ in held:
        there = tier.fetch(slot)
        assert set(there.tolist()) == {3.0}
        tier.drop(slot, there)
    assert tier.nbytes == sum(slot.nbytes for slot, _ in held)
    assert list(tmp_path.iterdir()) == []


def test_a_slot_that_was_read_ahead_for_nothing_can_be_filled(tmp_path):
    tier = DiskTier(tmp_path)
    slot = tier.make(10, torch.float32)
    tier.prefetch(slot)
    there = tier.blank(slot)
    there.fill_(2)
    tier.put(slot, there)
    assert tier.at_rest(slot).tolist() == [2.0] * 10


def test_what_was_read_ahead_for_nothing_is_not_taken_for_what_is_written_at_rest(tmp_path):
    tier = DiskTier(tmp_path)
    slot = tier.make(10, torch.float32)
    tier.prefetch(slot)
    tier.at_rest(slot).fill_(4)
    assert tier.fetch(slot).tolist() == [4.0] * 10


def test_buffers_are_used_again(tmp_path):
    """Visiting many slots in turn takes no more memory than those in use at a time."""
    tier = DiskTier(tmp_path, DiskSettings(block=PAGE))
    slots = [tier.make(3 * PAGE // 4, torch.float32) for _ in range(20)]
    for _ in range(2):
        for number, slot in enumerate(slots):
            for other in slots[number : number + 2]:
                tier.prefetch(other)
            there = tier.fetch(slot)
            tier.put(slot, there.add_(1))
            while not tier._writing[slot].done():
                time.sleep(1e-4)
    assert tier.buffer_bytes <= 3 * 3 * PAGE
    tier.settle()
    traffic = tier.traffic()
    assert (traffic.read, traffic.written) == (40 * 3 * PAGE, 40 * 3 * PAGE)
    assert traffic - Traffic(traffic.read, 0, 0.0) == Traffic(0, traffic.written, traffic.waited)


def test_a_slow_disk_takes_no_more_buffers(tmp_path, monkeypatch):
    """Writes that are not done hold buffers; then new ones are waited for instead of made."""
    real = os.pwritev
    monkeypatch.setattr(disk.os, "pwritev", lambda *a: (time.sleep(0.002), real(*a))[1])
    tier = DiskTier(tmp_path)
    slots = [tier.make(PAGE * (1 + number % 3), torch.float32) for number in range(40)]
    for slot in slots:
        there = tier.blank(slot)
        there.fill_(slot.start)
        tier.put(slot, there)
    assert tier.buffer_bytes <= 6 * 3 * 4 * PAGE
    assert all(set(tier.at_rest(slot).tolist()) == {float(slot.start)} for slot in slots)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(OffloadError, match=r"must be made in `.*nowhere`, but: No such file"):
        DiskTier(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match="Not a directory"):
        DiskTier(tmp_path / "file")


def test_a_full_disk_is_found_when_room_is_set_aside(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk.os, "posix_fallocate", full)
    with pytest.raises(
        OffloadError,
        match=r"grow by 0\.0 MiB, after 0\.0 MiB, in `.*`, but: No space left on device; free some room",
    ):
        tier.make(10, torch.float32)


@pytest.mark.parametrize(("call", "number"), [("preadv", errno.EIO), ("pwritev", errno.EIO)])
def test_an_error_in_the_middle_names_the_folder(tmp_path, monkeypatch, call, number):
    tier = DiskTier(tmp_path, DiskSettings(block=PAGE))
    slot = tier.make(4 * PAGE, torch.float32)
    there = tier.fetch(slot)
    tier.put(slot, there)
    tier.settle()
    real, seen = getattr(os, call), []

    def broken(*arguments):
        seen.append(arguments)
        if len(seen) == 3:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    def work():
        tier.put(slot, tier.fetch(slot))
        tier.settle()

    monkeypatch.setattr(disk.os, call, broken)
    with pytest.raises(OffloadError, match=f"{tmp_path.name}`, but: Input/output error; look after the disk"):
        work()


def test_short_reads_and_writes_go_on(tmp_path, monkeypatch):
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(disk.os, name, lambda f, parts, at, real=real: real(f, [parts[0][:PAGE]], at))
    tier = DiskTier(tmp_path, DiskSettings(block=4 * PAGE))
    slot = tier.make(10_000, torch.float32)
    there = tier.blank(slot)
    there.copy_(torch.arange(10_000))
    tier.put(slot, there)
    assert tier.fetch(slot).equal(torch.arange(10_000.0))


def test_a_file_that_was_cut_is_an_error(tmp_path):
    tier = DiskTier(tmp_path)
    slot = tier.make(10_000, torch.float32)
    os.ftruncate(tier._file._file, PAGE)
    with pytest.raises(OffloadError, match="shorter than what was written"):
        tier.fetch(slot)


def test_without_unbuffered_requests_the_cache_is_used(tmp_path, monkeypatch):
    """As on a file system that opens a file for them, and refuses them then."""
    tier = DiskTier(tmp_path, DiskSettings(block=PAGE))
    direct, real = tier._file._direct, os.pwritev

    def refuse(file, *rest):
        if file == direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, *rest)

    monkeypatch.setattr(disk.os, "pwritev", refuse)
    slot = tier.make(3000, torch.float32)
    there = tier.blank(slot)
    there.fill_(5)
    tier.put(slot, there)
    assert tier.at_rest(slot).sum() == 15_000


def test_too_little_memory_is_said_with_numbers(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 3 << 30)
    tier = HostTier()
    tier.make(1 << 10, torch.float32)
    with pytest.raises(OffloadError, match=r"another 4\.00 GiB .* beyond the 0\.00 GiB .* but has 3\.00 GiB"):
        tier.make(1 << 30, torch.float32)


def test_available_memory_is_within_that_of_the_host():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < host.available_memory() <= total
