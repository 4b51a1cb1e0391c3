"""The triangle of batch sizes agrees with its definition, tried out."""

from __future__ import annotations

import itertools

import pytest

from megazero.config.deepspeed.batch import BatchTriangle, resolve_batch
from megazero.errors import ConfigError
from tests.tables import over_table


def by_definition(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> list[BatchTriangle]:
    """All triangles that agree with what is known; one size alone means one accumulation step."""
    if train is None and micro is None:
        return []
    if accumulation is None and None in (train, micro):
        accumulation = 1
    wanted = (train, micro, accumulation)
    return [
        BatchTriangle(m * a * ranks, m, a)
        for m, a in itertools.product(range(1, 13), repeat=2)
        if all(w is None or w == is_ for w, is_ in zip(wanted, (m * a * ranks, m, a), strict=True))
    ]


def test_the_sweep() -> None:
    sizes = (None, 1, 2, 3, 4, 6, 12)
    resolved = 0
    for train, micro, accumulation, ranks in itertools.product(sizes, sizes, sizes, (1, 2, 3, 4)):
        expected = by_definition(train, micro, accumulation, ranks)
        if expected:
            assert [resolve_batch(train, micro, accumulation, ranks)] == expected
            resolved += 1
        else:
            with pytest.raises(ConfigError):
                resolve_batch(train, micro, accumulation, ranks)
    assert resolved > 250


@over_table(
    ("sizes", "says"),
    [
        (
            (512, 4, 1, 8),
            "`train_batch_size` must be micro-batch size x accumulation steps x data-parallel ranks, but 512 "
            "is not 4 x 1 x 8 = 32; leave one of the three out.",
        ),
        (
            (100, 8, None, 4),
            "`train_batch_size` must be a multiple of 8 samples of a micro-batch x 4 data-parallel ranks = "
            "32, but is 100; change one of the batch sizes or the number of ranks.",
        ),
        (
            (100, None, 3, 4),
            "`train_batch_size` must be a multiple of 3 accumulation steps x 4 data-parallel ranks = 12, but "
            "is 100; change one of the batch sizes or the number of ranks.",
        ),
        (
            (None, None, 3, 4),
            "`train_batch_size` or `train_micro_batch_size_per_gpu` must be given, but neither is.",
        ),
        ((8, 0, None, 1), "`train_micro_batch_size_per_gpu` must be a positive integer, but is 0."),
    ],
)
def test_the_numbers_are_named(sizes: tuple[int | None, ...], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_batch(*sizes)
    assert caught.value.violations == [says]
