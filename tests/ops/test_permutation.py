"""What the sweep does not say of permutation: the sort of choices, bit for bit, and sums of two at a time."""

import pytest
import torch

from megazero.ops.gathered_sum import gathered_sum, gathered_sum_reference
from megazero.ops.permute import permute
from megazero.ops.sort_by_expert import SORT_BY_EXPERT, sort_by_expert, sort_by_expert_reference
from tests.tables import over_table

CHOSEN = torch.tensor([[2, 0], [0, 2], [2, 1], [0, 5]])
KEPT = torch.tensor([[True, True], [True, False], [True, True], [False, True]])


def test_rows_by_expert_and_in_the_choices_order():
    choice, slots, counts = sort_by_expert(CHOSEN, None, 3)
    assert choice.tolist() == [1, 2, 6, 5, 0, 3, 4, 7], "5 is no expert of three: its row is the last"
    assert slots.tolist() == [[4, 0], [1, 5], [6, 3], [2, 7]]
    assert counts.tolist() == [3, 1, 3]


def test_a_choice_that_finds_no_room_has_no_row():
    choice, slots, counts = sort_by_expert(CHOSEN, KEPT, 3, 1)
    assert choice.tolist() == [1, 5, 0]
    assert slots.tolist() == [[2, 0], [3, 3], [3, 1], [3, 3]]
    assert counts.tolist() == [1, 1, 1]


@over_table("room", [None, 0, 9])
@over_table(("n", "k", "experts"), [(0, 2, 3), (1, 1, 1), (50, 2, 7), (37, 3, 2000), (5, 2, 0)])
def test_every_sort_is_the_stable_one(n, k, experts, room):
    g = torch.Generator().manual_seed(n)
    chosen = torch.randint(-1, experts + 2, (k, n), generator=g).t()
    for kept in (None, torch.rand(k, n, generator=g).t() < 0.7):
        truth = sort_by_expert_reference(chosen, kept, experts, room)
        for each in SORT_BY_EXPERT.implementations:
            if each.name == "cuda":
                continue
            for ours, true in zip(each.fn(chosen, kept, experts, room), truth, strict=True):
                assert ours.dtype == torch.int64
                assert ours.equal(true), each.name


def test_blank_rows_are_zeros_whatever_lay_there():
    x = torch.full((2, 3), torch.inf)
    choice, slots, _ = sort_by_expert(torch.tensor([[1], [1]]), None, 2, 2)
    assert permute(x, slots, choice).tolist() == [[0.0] * 3] * 2 + [[torch.inf] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradients_of_a_choice_have_the_same_bits_whoever_is_beside_it(dtype):
    """Backward takes two choices of a token at a time if both have a row."""
    for width in (1, 2, 7, 31, 32, 33, 64, 67, 130):
        g = torch.Generator().manual_seed(width)
        rows = torch.randn(6, width, generator=g).to(dtype)
        grad, weights = torch.randn(2, width, generator=g).to(dtype), torch.rand(2, 3, generator=g)
        slots, choice = torch.tensor([[4, 0, 2], [1, 5, 3]]), torch.tensor([1, 3, 2, 5, 0, 4])

        def gradients(slots, choice, rows=rows, weights=weights, grad=grad, fn=gathered_sum):
            leaves = rows.clone().requires_grad_(), weights.clone().requires_grad_()
            fn(leaves[0], slots, choice, leaves[1], whole=bool((choice >= 0).all())).backward(grad)
            return leaves[0].grad, leaves[1].grad

        of_rows, of_weights = gradients(slots, choice)
        inputs = (each.double() for each in (rows, weights, grad))
        wide = gradients(slots, choice, *inputs, gathered_sum_reference)
        assert torch.allclose(of_weights.double(), wide[1], rtol=1e-5, atol=1e-5)
        for missing in ([0], [1], [0, 2]):
            fewer, kept = slots.clone(), choice.clone()
            fewer[:, missing] = 6
            kept[slots[:, missing].flatten()] = -1
            found = gradients(fewer, kept)
            for j in set(range(3)) - set(missing):
                assert found[0][slots[:, j]].equal(of_rows[slots[:, j]])
                assert found[1][:, j].equal(of_weights[:, j]), width
