"""Which tokens a layer sees: the reference's choice, bit for bit."""

import torch

from megazero.ops.kept_columns import kept_columns_cuda, kept_columns_reference
from tests.kernels.harness import in_every_order, watched
from tests.tables import over_table


def check(keys, length, kept):
    (by_key,) = in_every_order(lambda kernels: [kept_columns_cuda(keys, length, kept, kernels).t()])
    assert by_key.t().equal(kept_columns_reference(keys, length, kept)), (length, kept)


def keys_of(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=g)


def test_every_length():
    for length in (*range(1, 36), 63, 64, 65, 127, 129, 255, 257):
        check(keys_of(2, length), length, 1 + length * 5 // 8 % length)


@over_table(("length", "kept"), [(1000, 1), (1024, 999), (1025, 512), (2200, 1300)])
def test_several_warps_and_several_tiles(length, kept):
    check(keys_of(1, length), length, kept)


@over_table("kept", [1, 63, 64])
def test_one_almost_all_and_all(kept):
    keys = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    check(keys, 64, kept)
    check(keys.repeat_interleave(2)[::2], 64, kept)


def test_no_samples_and_no_tokens():
    assert kept_columns_cuda(keys_of(0), 64, 3, watched()).shape == (3, 0)
    assert kept_columns_cuda(keys_of(2), 64, 0, watched()).shape == (0, 2)
