"""GPTQ against the algorithm written plainly: column by column, with everything behind it updated at once."""

from __future__ import annotations

import pytest
import torch

from megazero.errors import NumericsError
from megazero.quantize.gptq import Gptq
from megazero.quantize.grid import Grid
from megazero.quantize.rtn import nearest, squared_error
from tests.tables import over_table


def layer(rows: int, columns: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and the products of inputs that go together and differ in size; float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    mixing = torch.randn(columns, columns, dtype=torch.float64, generator=generator)
    x = torch.randn(3 * columns, columns, dtype=torch.float64, generator=generator) @ mixing
    x *= torch.rand(columns, dtype=torch.float64, generator=generator) * 3
    return weight, x.t() @ x


def plain(weight, gram, bits, group, *, by_activity=False):
    """Codes by Frantar et al.'s algorithm without its blocks."""
    weight, columns = weight.clone(), weight.shape[1]
    order = list(range(columns))
    if by_activity:
        order.sort(key=lambda column: -float(gram[column, column]))
    original = weight.clone()
    gram = gram[order][:, order] + 0.01 * gram.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(gram), upper=True)
    weight = weight[:, order]
    codes = torch.zeros_like(weight)
    scale_of = {}
    for i, column in enumerate(order):
        number = column // group
        if number not in scale_of:
            start = number * group
            now = original if by_activity or group == columns else weight
            scale_of[number] = now[:, start : start + group].abs().amax(1) / ((2**bits - 1) / 2)
        scale = scale_of[number]
        code = (weight[:, i] / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        error = (weight[:, i] - code * scale) / upper[i, i]
        weight[:, i:] -= torch.outer(error, upper[i, i:])
        codes[:, column] = code
    return codes, torch.stack([scale_of[number] for number in range(columns // group)], 1)


@over_table(
    ("bits", "group", "columns", "by_activity"),
    [
        (4, 16, 48, False),
        (4, 48, 192, False),  # groups that do not divide blocks of 128
        (4, 128, 384, False),
        (3, 256, 512, False),  # a group longer than a block
        (8, None, 300, False),
        (4, None, 130, True),
        (4, 16, 160, True),
    ],
)
def test_codes_are_those_of_the_plain_algorithm(bits, group, columns, by_activity):
    weight, gram = layer(9, columns)
    made = Gptq(by_activity=by_activity)("w", weight, gram, Grid(bits, group, torch.float64))
    codes, scales = plain(weight, gram, bits, group or columns, by_activity=by_activity)
    torch.testing.assert_close(made.scales, scales, rtol=1e-9, atol=0)
    assert torch.equal(made.codes.double(), codes)
    wrong, rounded = (
        m.dequantized() - weight for m in (made, nearest(weight, Grid(bits, group, torch.float64)))
    )
    assert squared_error(wrong, gram) < 0.8 * squared_error(rounded, gram)


def test_codes_are_those_of_optimal_brain_quantization_in_order():
    """By the definition that GPTQ solves faster (Frantar & Alistarh 2022): no Cholesky factor anywhere.

    After each column, those left take the change that keeps the outputs nearest, by the inverse of their own
    products.
    """
    weight, gram = layer(6, 40, seed=4)
    made = Gptq()("w", weight, gram, Grid(4, None, torch.float64))
    scale = weight.abs().amax(1) / 7.5
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(40, dtype=torch.float64)
    left, codes = weight.clone(), []
    for i in range(40):
        inverse = torch.linalg.inv(damped[i:, i:])
        codes.append((left[:, i] / scale).round().clamp(-8, 7))
        wrong = left[:, i] - codes[-1] * scale
        left[:, i:] -= torch.outer(wrong / inverse[0, 0], inverse[0])
    assert torch.equal(made.codes.double(), torch.stack(codes, 1))


def test_a_factor_of_the_products_changes_nothing():
    weight, gram = layer(5, 32)
    first, second = (Gptq()("w", weight, gram * factor, Grid(4, 8)) for factor in (1.0, 2.0**-20))
    assert torch.equal(first.codes, second.codes)


def test_inputs_that_are_always_0_have_weights_of_0():
    weight, gram = layer(5, 16)
    gram[3], gram[:, 3] = 0.0, 0.0
    made = Gptq()("w", weight, gram, Grid(4, 8))
    assert made.codes[:, 3].tolist() == [0] * 5
    assert made.codes[:, 2].abs().sum() > 0


def test_the_damping_grows_until_there_is_an_inverse():
    weight, _ = layer(5, 16)
    x = torch.ones(4, 16, dtype=torch.float64) * 1e8
    made = Gptq(damping=1e-17)("w", weight, x.t() @ x, Grid(4, 8))
    assert made.dequantized().isfinite().all()
    with pytest.raises(NumericsError, match="the inputs of `w` must have finite products"):
        Gptq()("w", weight, torch.full((16, 16), torch.nan, dtype=torch.float64), Grid(4, 8))
