"""Numbers that come to the host."""

from __future__ import annotations

import torch

from megazero.mpu.host import read_values


def test_values_are_floats_in_order():
    assert read_values(torch.tensor([[1, 2], [3, 4]])) == [1.0, 2.0, 3.0, 4.0]
    assert read_values(torch.tensor(0.5, dtype=torch.float64)) == [0.5]
    assert all(isinstance(value, float) for value in read_values(torch.tensor([1, 2])))


def test_meta_tensors_have_none():
    assert read_values(torch.zeros(2, device="meta")) is None
