from __future__ import annotations

import math

import pytest
import torch

from megazero.errors import NumericsError
from megazero.optim.grad_norm import clip_coefficient, local_square_sum
from tests.tables import over_table


def test_sums_over_tensors_of_any_shape():
    tensors = [torch.tensor([3.0, 4.0]), torch.full((2, 3), 2.0), torch.tensor(1.0), torch.zeros(0)]
    assert local_square_sum(tensors) == 50.0
    assert local_square_sum(tensors).dtype == torch.float64


def test_tensors_of_an_iterator_may_be_overwritten_when_the_next_is_asked_for():
    """As those from disk are, whose buffers are used again."""

    def pieces():
        buffer = torch.empty(3)
        for value in (1.0, 2.0, 3.0):
            yield buffer.fill_(value)

    assert local_square_sum(pieces()).item() == 3 * (1 + 4 + 9)


def test_nothing_sums_to_zero():
    assert local_square_sum([]) == 0.0
    assert local_square_sum([]).shape == ()
    assert local_square_sum([], torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_squares_do_not_overflow(dtype):
    assert local_square_sum([torch.full((1000,), 1024.0, dtype=dtype)]) == 1000 * 1024.0**2


def test_fp32_squares_do_not_overflow():
    assert local_square_sum([torch.tensor([1e30, 1e30])]).item() == pytest.approx(2e60, rel=1e-6)


def test_a_long_flat_tensor_keeps_its_small_terms():
    """A single fp32 accumulator stops at 2^24 ones."""
    assert local_square_sum([torch.ones(2**24 + 3000)]) == 2**24 + 3000


# What an fp32 sum of one block is off by depends on the order in which the processor's library adds.
NEAR = 5e-7


def test_cutting_and_striding_change_nothing():
    tensor = torch.randn(200_003, generator=torch.Generator().manual_seed(1))
    exact = (tensor.double() ** 2).sum().item()
    assert local_square_sum([tensor]).item() == pytest.approx(exact, rel=NEAR)
    assert local_square_sum(tensor.split(777)).item() == pytest.approx(exact, rel=NEAR)
    assert local_square_sum([tensor[: 2 * 10**5].view(500, 400).t()]).item() == pytest.approx(
        (tensor[: 2 * 10**5].double() ** 2).sum().item(), rel=NEAR
    )


@over_table("value", [math.inf, -math.inf, math.nan])
@over_table("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_elements_show(value, dtype):
    tensor = torch.zeros(100_000, dtype=dtype)
    tensor[77_777] = value
    assert not torch.isfinite(local_square_sum([torch.ones(3), tensor]))


def test_parameters_that_require_gradients_are_read_without_a_graph():
    assert not local_square_sum([torch.ones(3, requires_grad=True)]).requires_grad


def test_clip_brings_the_norm_to_the_maximum():
    assert clip_coefficient(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_coefficient(4.0, 1.0) == 1.0 / (4.0 + 1e-6)


@over_table(("norm", "maximum"), [(0.5, 1.0), (0.0, 1.0), (1e9, 0.0)])
def test_small_norms_and_no_maximum_leave_gradients_alone(norm, maximum):
    assert clip_coefficient(norm, maximum) == 1.0


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_non_finite_norm_cannot_clip(norm):
    with pytest.raises(NumericsError, match="skip the step"):
        clip_coefficient(norm, 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype):
    tensor = torch.full((300_001,), 1024.0, dtype=dtype, device="cuda")
    result = local_square_sum([tensor])
    assert result.device.type == "cuda"
    assert result.item() == pytest.approx(300_001 * 1024.0**2, rel=1e-6)


@over_table("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_beside_the_cpu_every_dtype_is_taken(dtype):
    """A norm that LAMB gives in place of a tensor is fp64, which was refused there, on meta tensors too."""
    assert local_square_sum([torch.ones(3, dtype=dtype, device="meta")]).dtype == torch.float64
