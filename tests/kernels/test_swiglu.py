"""SwiGLU's kernels: large and extreme gates."""

import torch

from tests.kernels.harness import DTYPES
from tests.kernels.sweep import by_kernels, check, swiglu, with_inputs
from tests.tables import over_table


@over_table("dtype", DTYPES, ids=str)
@over_table(("rows", "width"), [(41, 24), (5, 333)])
def test_large_gates(rows, width, dtype):
    check(swiglu(rows, width, dtype, scale=60.0))


@over_table("dtype", DTYPES, ids=str)
def test_extreme_numbers(dtype):
    gate = torch.tensor([torch.inf, torch.nan, 65504.0, -65504.0, 0.0, 2.0, 2.0], dtype=dtype)
    up = torch.tensor([2, 1, 0.5, 3, torch.inf, torch.inf, torch.nan], dtype=dtype)
    trial = with_inputs(swiglu(1, 7, dtype), torch.stack((gate, up)).unsqueeze(0))
    y, grads = by_kernels(trial, [torch.ones(1, 7, dtype=dtype)])
    expected = torch.tensor(
        [torch.inf, torch.nan, gate[2] / 2, 0, torch.nan, torch.inf, torch.nan], dtype=dtype
    )
    assert torch.allclose(y[0], expected, rtol=0, equal_nan=True)
    assert torch.allclose(grads[0, 1, 2:5], torch.tensor([gate[2], 0, 0], dtype=dtype), rtol=0)
    assert grads[0, 0, 2:4].tolist() == [0.5, 0]
