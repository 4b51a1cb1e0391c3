"""Values over a group: one member's, the first that there is, and all folded into one."""

from __future__ import annotations

import hashlib

import pytest

from megazero.mpu.messages import broadcast_value, first_value, fold_values, name_ranks, same_on_all
from megazero.mpu.solo_group import SoloGroup
from megazero.mpu.thread_group import ThreadWorld
from tests.tables import over_table


def on_ranks(size: int, work) -> list:
    world = ThreadWorld(size, timeout=30)
    return world.run(lambda rank: work(world.group("world", rank, range(size))))


@pytest.mark.parametrize("source", [0, 2])
def test_one_members_value_comes_to_all(source):
    values = on_ranks(3, lambda group: broadcast_value(group, {"rank": group.rank}, source=source))
    assert values == [{"rank": source}] * 3


def test_the_first_value_that_there_is():
    late = on_ranks(4, lambda group: first_value(group, ["late"] * group.rank if group.rank > 1 else None))
    assert late == [(2, ["late", "late"])] * 4
    assert on_ranks(3, lambda group: first_value(group, None)) == [None] * 3
    assert first_value(SoloGroup(), "alone") == (0, "alone")


@over_table("odd", [None, 0, 3])
def test_whether_all_have_the_same(odd):
    def digest(rank: int) -> bytes:
        return hashlib.blake2b(b"odd" if rank == odd else b"even", digest_size=16).digest()

    assert on_ranks(4, lambda group: same_on_all(group, digest(group.rank))) == [odd is None] * 4


@over_table("digest", [bytes(16), b"\xff" * 16, bytes(15) + b"\x01"])
def test_digests_of_extreme_numbers(digest):
    assert on_ranks(2, lambda group: same_on_all(group, digest)) == [True] * 2
    assert (
        on_ranks(2, lambda group: same_on_all(group, digest if group.rank else b"\x80" * 16)) == [False] * 2
    )


@over_table("size", [1, 2, 7, 8, 9, 20, 70])
def test_values_are_folded_in_group_order(size):
    folded = on_ranks(size, lambda group: fold_values(group, [group.rank], lambda a, b: a + b))
    assert folded == [list(range(size)), *[None] * (size - 1)]


def test_ranks_in_words():
    assert name_ranks(range(16384)) == "ranks 0-16383"
    assert name_ranks((0, 1, 4)) == "ranks 0-1, 4"
