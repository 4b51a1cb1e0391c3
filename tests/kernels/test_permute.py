"""The rows that experts get of tokens: copies, bit for bit, and sums in the choices' order for backward."""

import torch

from megazero.ops.permute import permute_cuda
from tests.kernels.harness import DTYPES, in_every_order
from tests.kernels.sweep import check, permute
from tests.tables import over_table


@over_table("dtype", DTYPES, ids=str)
@over_table("shape", [(0, 2, 3, 0), (3, 1, 0, 0), (3, 2, 5, 0), (90, 2, 64, 64), (70, 3, 210, 210)])
def test_numbers_of_tokens_and_rows(shape, dtype):
    check(permute(shape, 8, dtype))
    check(permute(shape, 3, dtype))


@over_table("dtype", DTYPES, ids=str)
def test_every_bit_pattern_is_copied(dtype):
    """Infinities, denormal numbers and every kind of NaN: nothing is computed with."""
    numbers = torch.int16 if dtype.itemsize == 2 else torch.int32
    special = [0x7C01, -0x8000, -1, 1, 0x7F81, -0x0080, 0x7BFF, 0x7FFF]
    if dtype.itemsize == 4:
        special = [each * 65536 + 1 for each in special]
    x = torch.tensor(special, dtype=numbers).view(1, 8).view(dtype)
    slots, choice = torch.tensor([[2, 0]]), torch.tensor([1, -1, 0])
    (out,) = in_every_order(lambda kernels: [permute_cuda(x, slots, choice, False, kernels)])
    assert out.view(numbers).tolist() == [special, [0] * 8, special]


def test_a_foreign_number_is_none():
    x, slots, choice = torch.ones(2, 4), torch.tensor([[1, -1], [2**62, -7]]), torch.tensor([-1, 0])
    (out,) = in_every_order(lambda kernels: [permute_cuda(x, slots, choice, False, kernels)])
    assert out.tolist() == [[0.0] * 4, [1.0] * 4]


def test_tokens_and_places_with_gaps_in_memory():
    x = torch.arange(24.0).view(3, 8)[:, ::2]
    slots = torch.tensor([[2, 9, 1], [0, 9, 3], [5, 9, 4]])[:, ::2]
    (out,) = in_every_order(
        lambda kernels: [permute_cuda(x, slots, torch.tensor([2, 1, 0, 3, 5, 4]), True, kernels)]
    )
    assert out.equal(x[[1, 0, 0, 1, 2, 2]])
