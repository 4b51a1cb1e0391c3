"""Codes and scales against plain arithmetic, and what is at the ends of the grid."""

from __future__ import annotations

import torch

from megazero.quantize.grid import Grid, rounded_inputs
from megazero.quantize.rtn import clipped, nearest, squared_error
from tests.tables import over_table


def literal(weight: list[list[float]], bits: int, group: int) -> tuple[list[list[int]], list[list[float]]]:
    """Codes and scales in Python's floats, which are of 64 bits and round half to even."""
    codes, scales = [], []
    for row in weight:
        codes.append([])
        scales.append([])
        for start in range(0, len(row), group):
            part = row[start : start + group]
            scale = max(map(abs, part)) / ((2**bits - 1) / 2) or 1.0
            scales[-1].append(scale)
            least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
            codes[-1] += [min(most, max(least, round(value / scale))) for value in part]
    return codes, scales


@over_table(("bits", "group"), [(4, 8), (4, 24), (8, None), (8, 6), (4, 1)])
def test_codes_are_those_of_plain_arithmetic(bits, group):
    weight = torch.randn(7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(bits))
    weight[2] = 0.0  # a row of zeros
    weight[3] = weight[3].abs()  # all positive: zero is no end of the grid
    weight[4, 5] = 50.0
    made = nearest(weight, Grid(bits, group, torch.float64))
    codes, scales = literal(weight.tolist(), bits, group or 24)
    assert (made.codes.tolist(), made.scales.tolist(), made.group) == (codes, scales, group or 24)
    assert made.codes.dtype == torch.int8


def test_the_ends_of_the_grid():
    """Of a largest number 15, scaled by 2, -7.5 and 7.5 are halfway to codes; the positive one has no -8."""
    weight = torch.tensor([[15.0, -15.0, 13.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    made = nearest(weight, Grid(4, None))
    assert made.scales.tolist() == [[2.0], [1.0]]
    assert made.codes.tolist() == [[7, -8, 6, 0], [0, 0, 0, 0]]
    assert made.dequantized().tolist() == [[14.0, -16.0, 12.0, 0.0], [0.0] * 4]


def test_codes_are_of_the_scale_as_it_is_stored():
    weight = torch.tensor([[1.0, 0.4, -0.3, 0.07]])
    made = nearest(weight, Grid(8, None, torch.bfloat16))
    scale = torch.tensor(1 / 127.5).bfloat16()
    assert made.scales.item() == scale.item()
    assert made.codes.tolist() == [
        [min(127, round(value / scale.item())) for value in (1.0, 0.4, -0.3, 0.07)]
    ]
    tiny = nearest(weight * 1e-9, Grid(8, None, torch.float16))  # the scale would be 0
    assert (tiny.scales.item(), tiny.codes.abs().max().item()) == (1.0, 0)


def test_inputs_are_rounded_token_by_token():
    x = torch.tensor([[127.5, 1.4, -127.5], [0.0, 0.0, 0.0], [-1275.0, 16.0, 4.0]])
    assert rounded_inputs(x).tolist() == [[127.0, 1.0, -128.0], [0.0, 0.0, 0.0], [-1280.0, 20.0, 0.0]]


def test_cutting_off_helps_where_one_number_spoils_its_group():
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(16, 32, dtype=torch.float64, generator=generator)
    weight[:, ::16] = 6.0
    x = torch.randn(100, 32, dtype=torch.float64, generator=generator)
    x[:, ::16] *= 0.01  # and is hardly ever seen
    gram, grid = x.t() @ x, Grid(4, 16, torch.float64)
    plain, cut = (
        made.dequantized() - weight for made in (nearest(weight, grid), clipped(weight, gram, grid))
    )
    assert squared_error(cut, gram) < 0.6 * squared_error(plain, gram)
    torch.testing.assert_close(squared_error(plain, gram), (x @ plain.t()).square().sum().item())
    scales = clipped(weight, gram, grid).scales / grid.scales(weight)
    assert scales.min() < 0.7
    assert {round(share, 6) for share in scales.flatten().tolist()} <= {
        round(1 - i / 20, 6) for i in range(10)
    }
