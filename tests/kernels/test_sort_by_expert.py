"""The counting sort of choices: the reference's stable sort, bit for bit."""

import pytest
import torch

from megazero.ops.sort_by_expert import BLOCK, MOST_EXPERTS, sort_by_expert_cuda, sort_by_expert_reference
from tests.kernels.harness import in_every_order, watched
from tests.tables import over_table


def choices(n, k, experts, share=None):
    """Choices of `experts`, and whether each is kept, if a share of them is."""
    g = torch.Generator().manual_seed(n + experts)
    chosen = torch.randint(experts, (n, k), generator=g)
    return chosen, None if share is None else torch.rand(n, k, generator=g) < share


def check(chosen, kept, experts, room):
    found = in_every_order(lambda kernels: sort_by_expert_cuda(chosen, kept, experts, room, kernels))
    for ours, true in zip(found, sort_by_expert_reference(chosen, kept, experts, room), strict=True):
        assert ours.dtype == torch.int64
        assert torch.equal(ours, true), (chosen.shape, experts, room)


@over_table("room", [None, 0, 5])
@over_table("share", [None, 0.6, 0.0], ids=["all", "some", "none"])
def test_numbers_of_choices_and_experts(share, room):
    """Both sides of a warp and of a warp's share, and numbers of cells on both sides of a power of two."""
    for n, k, experts in ((0, 2, 3), (1, 1, 1), (31, 1, 2), (33, 1, 7), (16, 8, 8), (43, 3, 31), (70, 2, 33)):
        check(*choices(n, k, experts, share), experts, room)


@over_table(
    ("count", "experts", "room"),
    [(BLOCK - 1, 4, None), (BLOCK, 4, 400), (BLOCK + 1, 5, None), (3 * BLOCK + 7, 3, 900)],
)
def test_several_blocks(count, experts, room):
    check(*choices(count, 1, experts, 0.8), experts, room)


def test_more_blocks_than_segments():
    check(*choices(18 * BLOCK + 1, 1, 2), 2, None)


@pytest.mark.parametrize("room", [None, 1])
def test_as_many_experts_as_there_may_be(room):
    check(*choices(50, 2, MOST_EXPERTS, 0.9), MOST_EXPERTS, room)
    with pytest.raises(RuntimeError, match="invalid"):
        sort_by_expert_cuda(*choices(5, 2, 3), MOST_EXPERTS + 1, room, watched())


@pytest.mark.parametrize("room", [None, 2])
def test_a_number_that_no_expert_has_is_not_kept(room):
    chosen = torch.tensor([[1, -1], [2**62, 1], [3, 0], [-(2**63), 2]])
    check(chosen, None, 3, room)
    check(chosen, torch.tensor([[True, True], [True, False], [True, True], [True, True]]), 3, room)


def test_choices_with_gaps_in_memory():
    chosen, kept = choices(40, 4, 5, 0.5)
    check(chosen.t(), kept.t(), 5, None)
    check(chosen[:, ::2], kept[:, ::2], 5, 7)
