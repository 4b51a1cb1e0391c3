"""Signs as bits."""

from __future__ import annotations

import torch

from megazero.optim.compressed.signs import pack_signs, packed_size, unpack_signs
from tests.tables import over_table


def test_the_first_number_is_the_lowest_bit_and_both_zeros_are_positive():
    numbers = torch.tensor([[1.0, -1.0, 0.0, -0.0, -2.0, -3.0, -4.0, 5.0, 6.0, -7.0]])
    assert pack_signs(numbers).tolist() == [[0b10001101, 0b00000001]]


@over_table("numel", [0, 1, 7, 8, 9, 1001])
def test_what_is_packed_comes_back(numel):
    numbers = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel))
    packed = pack_signs(numbers)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, packed_size(numel))
    assert unpack_signs(packed, numel).equal(numbers >= 0)
