"""The sum of squares: every implementation for the CPU by hand and in fp64."""

import torch

from megazero.ops.dispatch import CallFacts
from megazero.ops.square_sum import SQUARE_SUM, square_sum
from tests.tables import over_table


def test_tensors_of_several_dtypes_have_one_sum():
    tensors = [torch.tensor([3.0]), torch.tensor([[4.0]]).bfloat16(), torch.tensor(5.0), torch.zeros(0)]
    assert square_sum(tensors).tolist() == 50.0
    assert square_sum(tensors).dtype == torch.float64


@over_table("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@over_table("implementation", SQUARE_SUM.implementations, ids=lambda each: each.name)
def test_equals_the_formula(implementation, dtype):
    if implementation.name != "norms" and not implementation.serves(CallFacts("cpu", dtype)):
        return
    tensors = [
        torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (0, 1, 777, 70_001)
    ]
    wanted = sum((tensor.double() ** 2).sum() for tensor in tensors)
    found = implementation.fn(tensors)
    assert (found.shape, found.dtype) == ((), torch.float64)
    # The norms are for GPUs, which add up as a tree; on a CPU torch is less exact.
    near = 1e-5 if implementation.name == "norms" else 1e-6
    torch.testing.assert_close(found, wanted, rtol=near, atol=0.0)
