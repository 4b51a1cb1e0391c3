"""Each collective's backward is the transpose of its forward."""

from __future__ import annotations

import pytest
import torch

from megazero.layers import collectives
from megazero.mpu.thread_group import ThreadWorld

# function, each rank's input shape, whether inputs (outputs) are equal on all ranks
CASES = {
    "reduce_from_slices": ((3, 2), False, True),
    "reduce_scatter_sequence": ((6, 2), False, False),
    "gather_features": ((3, 2), False, True),
}


@pytest.mark.parametrize("name", CASES)
def test_backward_is_the_transpose(name):
    """<f(x), y> over all ranks equals <x, f'(y)>: a value held by all ranks counts once."""
    shape, same_in, same_out = CASES[name]
    world, ranks = ThreadWorld(2), (0, 1)

    def work(rank: int):
        group = world.group("tp", rank, ranks)
        torch_rng = torch.Generator().manual_seed(1 if same_in else 10 + rank)
        x = torch.randn(shape, generator=torch_rng, dtype=torch.float64).requires_grad_()
        out = getattr(collectives, name)(x, group)
        torch_rng = torch.Generator().manual_seed(2 if same_out else 20 + rank)
        y = torch.randn(out.shape, generator=torch_rng, dtype=torch.float64)
        out.backward(y)
        return float((out.detach() * y).sum()), float((x.detach() * x.grad).sum())

    left, right = zip(*world.run(work), strict=True)
    outputs = left[0] if same_out else sum(left)
    inputs = right[0] if same_in else sum(right)
    assert outputs == pytest.approx(inputs, rel=1e-12)


def test_a_group_of_one_is_the_identity():
    from megazero.mpu.solo_group import SoloGroup

    x = torch.randn(2, 2)
    assert all(getattr(collectives, name)(x, SoloGroup()) is x for name in CASES)
