"""The kernels of both norms, with and without a residual: sums, missing gradients, extreme rows."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.harness import DTYPES, same_bits
from tests.kernels.sweep import (
    EPS,
    add_layer_norm,
    add_rms_norm,
    by_kernels,
    check,
    gradients_for,
    layer_norm,
    rms_norm,
    with_inputs,
)

ADDED = pytest.mark.parametrize("added", [add_layer_norm, add_rms_norm], ids=["layer_norm", "rms_norm"])


@ADDED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 8200), (9, 33), (21, 24), (0, 8), (3, 1000)])
def test_the_sum_is_what_is_normalized(added, rows, width, dtype):
    """Far from zero, where the mean of squares less the squared mean would have no digit left."""
    trial = added(rows, width, dtype, offset=200.0 if added is add_layer_norm else 0.0)
    _, total, grad_x, grad_residual, *_ = check(trial)
    assert same_bits(total, trial.inputs[0] + trial.inputs[1])
    assert same_bits(grad_x, grad_residual)


def test_a_wide_row_that_is_in_no_packs():
    check(add_layer_norm(1, 8195, torch.float32, offset=2000.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(9, 8193), (3, 16391), (41, 24), (0, 8)])
def test_rows_that_groups_take_in_turns(rows, width, dtype):
    check(rms_norm(rows, width, dtype))


@ADDED
@pytest.mark.parametrize("missing", [0, 1])
def test_a_gradient_that_does_not_arrive_is_zero(added, missing):
    trial = added(3, 40, torch.float32)
    grads = gradients_for(trial)
    check(trial, [None if number == missing else grad for number, grad in enumerate(grads)])


def extreme(make, dtype):
    """A trial whose first rows hold infinities and NaN, and the last constants and denormals."""
    trial = make(6, 40, dtype)
    x = trial.inputs[0].clone()
    x[0, 3], x[1, 4], x[2, 5] = torch.inf, -torch.inf, torch.nan
    x[3], x[4] = 65504.0, x[4] * 2.0**-23 if dtype == torch.float16 else x[4] * 1e-39
    return with_inputs(trial, x, *trial.inputs[1:]), with_inputs(trial, x[3:], *trial.inputs[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_rows_of_layer_norm(dtype):
    """One element that is not finite spoils its row and no other; constants and denormals are ordinary."""
    whole, good = extreme(layer_norm, dtype)
    (grad,) = gradients_for(whole)
    y, grad_x, *_ = by_kernels(whole, [grad])
    assert y[:3].isnan().all()
    assert grad_x[:3].isnan().all()
    results = check(good, [grad[3:]])
    assert same_bits(y[3:], results[0])
    assert same_bits(grad_x[3:], results[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_rows_of_rms_norm(dtype):
    """x / inf is 0, but for the element that is infinite."""
    whole, good = extreme(rms_norm, dtype)
    (grad,) = gradients_for(whole)
    y, grad_x, _ = by_kernels(whole, [grad])
    assert torch.equal(y[:2].isnan(), whole.inputs[0][:2].isinf())
    assert y[2].isnan().all()
    assert grad_x[:3].isnan().any(-1).all()
    assert y[3:].isfinite().all()
    check(good, [grad[3:]])


def test_parameters_keep_their_dtypes():
    trial = layer_norm(3, 16, torch.bfloat16)
    x, weight, bias = trial.inputs
    trial = with_inputs(trial, x, weight.bfloat16(), bias.double())
    *_, grad_weight, grad_bias = by_kernels(trial, gradients_for(trial))
    assert (grad_weight.dtype, grad_bias.dtype) == (torch.bfloat16, torch.float64)


@pytest.mark.parametrize(
    "make", [layer_norm, rms_norm, add_layer_norm, add_rms_norm], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(5, 24), (9, 33), (3, 8200), (0, 8)])
def test_parameters_in_the_dtype_of_x_are_read_as_they_are(make, dtype, rows, width):
    """Bit for bit as if they had been widened, and their gradients rounded: four launches less."""
    trial = make(rows, width, dtype)
    matrices = 2 if make in (add_layer_norm, add_rms_norm) else 1
    narrow = [x.to(dtype) for x in trial.inputs[matrices:]]
    narrow_trial = with_inputs(trial, *trial.inputs[:matrices], *narrow)
    wide_trial = with_inputs(trial, *trial.inputs[:matrices], *(x.float() for x in narrow))
    grads = gradients_for(trial)
    ours, theirs = by_kernels(narrow_trial, grads), by_kernels(wide_trial, grads)
    parameters = len(narrow)
    assert [x.dtype for x in ours[-parameters:]] == [dtype] * parameters
    for a, b in zip(ours, theirs, strict=True):
        assert same_bits(a, b.to(dtype))


@ADDED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("missing", [None, 0, 1])
def test_without_a_residual_the_sum_is_x(added, dtype, missing):
    """The pair of a norm and its argument, whose two gradients the kernel adds up, as of x + 0."""
    whole = added(7, 40, dtype)
    x, _, *parameters = whole.inputs
    zeros = with_inputs(whole, x, torch.zeros_like(x), *parameters)
    alone = replace(whole, call=lambda f, x, *rest, **more: f(x, None, *rest, EPS, **more))
    alone = with_inputs(alone, x, *parameters)
    grads = [None if number == missing else grad for number, grad in enumerate(gradients_for(whole))]
    y, total, grad_x, *rest = by_kernels(alone, grads)
    expected = by_kernels(zeros, grads)
    del expected[3]  # the gradient of the zeros
    for ours, theirs in zip((y, total, grad_x, *rest), expected, strict=True):
        assert same_bits(ours, theirs)
    assert same_bits(total, x)
