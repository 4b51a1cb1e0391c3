from __future__ import annotations

import pytest

from megazero.data.splits import SplitReading, parse_split, split_ranges
from megazero.errors import DataError
from tests.tables import over_table

CORE, MDS = SplitReading.MEGATRON_CORE, SplitReading.MEGATRON_DEEPSPEED


def bounds(split: str, count: int, reading: SplitReading) -> list[int]:
    ranges = split_ranges(split, count, reading)
    assert [r.start for r in ranges[1:]] == [r.stop for r in ranges[:-1]]
    return [ranges[0].start, *(r.stop for r in ranges)]


@over_table(
    ("split", "count", "core", "mds"),
    [
        ("1,1,1", 2, [0, 1, 1, 2], [0, 0, 1, 2]),
        ("969, 30, 1", 1000, [0, 969, 999, 1000], [0, 969, 999, 1000]),
        ("969,30,1", 10, [0, 10, 10, 10], [0, 10, 10, 10]),
        ("98,2,0", 100, [0, 98, 100, 100], [0, 98, 100, 100]),
        ("100", 7, [0, 7, 7, 7], [0, 7, 7, 7]),
        ("9/1", 10, [0, 9, 10, 10], [0, 9, 10, 10]),
        ("1,1,0", 5, [0, 2, 5, 5], [0, 3, 5, 5]),
        ("0,1,0", 3, [0, 0, 3, 3], [0, 0, 3, 3]),
        (".5 .25 .25", 8, [0, 4, 6, 8], [0, 4, 6, 8]),
        ("969,30,1", 0, [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_both_readings(split, count, core, mds):
    assert bounds(split, count, CORE) == core
    assert bounds(split, count, MDS) == mds


def test_every_sequence_goes_somewhere_and_once():
    for count in range(60):
        for split in ("969,30,1", "1,1,1", "5,3,2", "1,0,1", "33,33,34"):
            ranges = split_ranges(split, count)
            assert [i for r in ranges for i in r] == list(range(count))


def test_weights_are_normalized():
    assert parse_split("3,1") == (0.75, 0.25, 0.0)


@over_table("split", ["", " , ", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan", "inf,1", "90%", "1;2"])
def test_what_is_no_split(split):
    with pytest.raises(DataError, match="`split` must"):
        parse_split(split)
