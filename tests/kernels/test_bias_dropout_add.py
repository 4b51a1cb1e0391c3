"""The kernels of bias + dropout + residual: masks bit for bit, and residuals of other types."""

import pytest
import torch

from megazero.ops.bias_dropout_add import bias_dropout_add_reference
from megazero.ops.dropout import Dropout, dropout_mask_hidden
from tests.kernels.harness import DTYPES, Bound
from tests.kernels.sweep import BIAS_DROPOUT_ADD, Trial, bias_dropout_add, by_kernels, check
from tests.tables import over_table


@over_table("dtype", DTYPES, ids=str)
@over_table("wide", [False, True])
@over_table("biased", [False, True])
@over_table("p", [None, 0.0, 0.9])
def test_residuals_in_fp32_and_without_dropout_or_bias(dtype, wide, biased, p):
    """Without dropout, bias and a change of dtype, backward has nothing to launch, but forward has."""
    trial = bias_dropout_add((3, 2), 24, dtype, p, biased, wide, torch.arange(6).view(3, 2) * 3)
    out, grad_x, *_ = check(trial)
    assert (out.dtype, grad_x.dtype) == (trial.inputs[-1].dtype, dtype)


@pytest.mark.parametrize("shape", [(23, 2, 8), (9, 1, 8193), (2, 0, 8), (0, 1, 8193)])
def test_rows_that_groups_take_in_turns(shape):
    check(bias_dropout_add(shape[:2], shape[2], torch.float32, p=0.5))


def plain(x, residual, dropout) -> Trial:
    """A call without a bias."""
    call = lambda f, x, residual: f(x, None, residual, dropout)  # noqa: E731
    return Trial(BIAS_DROPOUT_ADD, call, (x, residual), lambda *_: ())


@over_table("p", [0.0, 2.0**-32, 0.1, 0.5, 1 - 2.0**-32])
@over_table("width", [37, 72])
def test_masks_are_those_of_the_reference(p, width):
    """Bit for bit, forward and backward, at the ends of the range of p and for any keys."""
    shape = (4, 3, width)
    keys = torch.tensor([-1, 2**63 - 1, -(2**63)])
    dropout = Dropout(p, keys, torch.tensor([0, 1, 2**31, 2**62]))
    kept = dropout_mask_hidden(dropout, *shape)
    out, grad_x, _ = by_kernels(plain(torch.ones(shape), torch.zeros(shape), dropout), [torch.ones(shape)])
    assert torch.equal(out != 0, kept)
    assert torch.equal(grad_x != 0, kept)


@over_table("site", [None, 0, -1, 2**62 + 1])
@over_table("by_row", [False, True])
@over_table(
    "positions",
    [
        range(7, 12),
        range(40, 0, -8),
        torch.tensor([3, 1, 2**40, 0, -5]),
        torch.arange(15).view(3, 5).t() * 2**33,
    ],
    ids=["range", "steps", "of rows", "of elements"],
)
def test_keys_of_rows_are_derived_as_the_reference_does(site, by_row, positions):
    """From the keys of sequences or rows, a place in the model, and positions of every form."""
    shape = (5, 3, 24)
    keys = torch.tensor([[-1, 2**63 - 1, 17]]) + (torch.arange(5).view(5, 1) * 3 if by_row else 0)
    dropout = Dropout(0.5, keys if by_row else keys[0], positions, site)
    kept = dropout_mask_hidden(dropout, *shape)
    assert 0.3 < kept.float().mean() < 0.7
    out, grad_x, _ = by_kernels(plain(torch.ones(shape), torch.zeros(shape), dropout), [torch.ones(shape)])
    assert torch.equal(out != 0, kept)
    assert torch.equal(grad_x != 0, kept)


def test_extreme_values_and_a_residual_of_another_type():
    """Of what is dropped, infinity and NaN are NaN, as in the reference: no overflow goes unnoticed."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40, 65504, 0, 3, 4]).repeat(3, 2, 1)
    residual = torch.ones(3, 2, 8).half()
    dropout = Dropout(0.5, torch.arange(2) * 7 - 3, range(5, 8))
    out, grad_x, _ = by_kernels(plain(x, residual, dropout), [residual])
    exact = bias_dropout_add_reference(x.double(), None, residual.double(), dropout)
    assert (out.dtype, grad_x.dtype) == (torch.float16, torch.float32)
    assert Bound(1).holds(out, exact)
