"""Laws of the small operators that the sweep's reference cannot prove of itself."""

from __future__ import annotations

import pytest
import torch

from megazero.ops import native
from megazero.ops.layer_norm import add_layer_norm, layer_norm
from megazero.ops.rms_norm import add_rms_norm, rms_norm
from megazero.ops.rotary import ROTARY, apply_rotary, rotary_table
from megazero.ops.scaled_softmax import scaled_softmax
from tests.tables import over_table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_sums_parameter_gradients_in_fp32(dtype: torch.dtype) -> None:
    """torch's CPU kernel sums in bf16: at 8,192 tokens the bias's gradient was 40% wrong."""
    torch.manual_seed(0)
    x, grad = torch.randn(8192, 1, 16).to(dtype), (torch.randn(8192, 1, 16) + 0.2).to(dtype)
    grads = {}
    for each in (dtype, torch.float64):
        leaves = [x.to(each), torch.ones(16, dtype=each), torch.zeros(16, dtype=each)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        grads[each] = torch.autograd.grad(layer_norm(*leaves, 1e-5), leaves, grad.to(each))
    for ours, true in zip(grads[dtype], grads[torch.float64], strict=True):
        assert ((ours.double() - true).norm() / true.norm()).item() < 5e-3


def test_norms_by_hand() -> None:
    x = torch.tensor([[[3.0, -3.0, 3.0, -3.0]]])
    assert layer_norm(x + 100, torch.full((4,), 2.0), torch.ones(4), 0.0)[0, 0].tolist() == [3, -1, 3, -1]
    assert rms_norm(x, torch.full((4,), 2.0), 0.0)[0, 0].tolist() == pytest.approx([2, -2, 2, -2])


def test_a_norm_of_a_sum_by_hand() -> None:
    x, residual = torch.tensor([[1.0, -1.0, 2.0, -2.0]]), torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    y, total = add_layer_norm(x, residual, torch.full((4,), 2.0), torch.ones(4), 0.0)
    assert (y.tolist(), total.tolist()) == ([[3, -1, 3, -1]], [[3, -3, 3, -3]])
    y, total = add_rms_norm(x, residual, torch.full((4,), 2.0), 0.0)
    assert (y[0].tolist(), total.tolist()) == (pytest.approx([2, -2, 2, -2]), [[3, -3, 3, -3]])


@over_table("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_norm_of_a_sum_is_an_add_and_a_norm_bit_for_bit(dtype: torch.dtype) -> None:
    """Where a layer takes one for the other, no number changes on CPU."""
    torch.manual_seed(0)
    x, residual, grad, grad_total = (torch.randn(5, 3, 48).to(dtype) for _ in range(4))
    parameters = [torch.randn(48).to(dtype).requires_grad_() for _ in range(2)]
    for fused, plain, own in (
        (add_layer_norm, layer_norm, parameters),
        (add_rms_norm, rms_norm, parameters[:1]),
    ):
        results = []
        for apart in (False, True):
            leaves = [each.clone().requires_grad_() for each in (x, residual)]
            total = leaves[0] + leaves[1]
            y, total = (plain(total, *own, 1e-5), total) if apart else fused(*leaves, *own, 1e-5)
            grads = torch.autograd.grad((y, total), [*leaves, *own], (grad, grad_total))
            results.append((y, total, *grads))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


def test_a_norm_of_a_sum_refuses_a_residual_of_another_shape_or_dtype() -> None:
    x, weight = torch.zeros(2, 4), torch.ones(4)
    with pytest.raises(ValueError, match=r"`residual` must have the shape and dtype of `x`, \[2, 4\] of"):
        add_rms_norm(x, x[:1], weight, 0.0)
    with pytest.raises(ValueError, match=r"but is \[2, 4\] of torch.float64"):
        add_layer_norm(x, x.double(), weight, weight, 0.0)


def test_rotary_turns_pairs_by_their_angle() -> None:
    """Channel 0 pairs with channel 2; position 1 turns the first pair by 1 and the second by 1/100."""
    cos, sin = rotary_table(torch.tensor([0, 1]), 4, 10000.0)
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).view(1, 1, 1, 4).expand(2, 1, 1, 4)
    turned = apply_rotary(x, cos, sin)[:, 0, 0]
    assert turned[0].tolist() == [1, 1, 0, 0]
    assert turned[1].tolist() == pytest.approx([0.5403023, 0.99995, 0.8414710, 0.0099998], rel=1e-5)


def test_rotary_scores_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8)
    scores = []
    for shift in (0, 17):
        tables = [rotary_table(torch.tensor([shift + at]), 8, 10000.0) for at in (5, 2)]
        turned = [apply_rotary(x, *table) for x, table in zip((q, k), tables, strict=True)]
        scores.append((turned[0] * turned[1]).sum().item())
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


def test_rotary_table_per_sample_equals_shared() -> None:
    positions = torch.arange(5)
    shared = rotary_table(positions, 6, 1e4)
    own = rotary_table(positions.unsqueeze(1).expand(5, 3), 6, 1e4)
    for one, many in zip(shared, own, strict=True):
        assert torch.equal(one.expand(5, 3, 1, 3), many)


def test_rotary_refuses_odd_dims_and_other_ranks() -> None:
    with pytest.raises(ValueError, match="`dim` must be even, but is 5"):
        rotary_table(torch.arange(3), 5, 1e4)
    with pytest.raises(ValueError, match=r"`positions` must be \[s\] or \[s, b\]"):
        rotary_table(torch.zeros(1, 1, 1, dtype=torch.int64), 4, 1e4)


def test_softmax_of_a_kv_cache_is_aligned_to_the_end() -> None:
    probs = scaled_softmax(torch.zeros(1, 1, 2, 4), 1.0, True, None)
    assert probs[0, 0].tolist() == [pytest.approx([1 / 3, 1 / 3, 1 / 3, 0]), [0.25] * 4]


def test_softmax_rows_with_nothing_to_attend_are_zero() -> None:
    probs = scaled_softmax(torch.randn(1, 1, 3, 1), 1.0, True, None)
    assert probs.flatten().tolist() == [0, 0, 1]


@pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_rotary_of_slices_of_a_projection(dtype: torch.dtype) -> None:
    """Rows with gaps between heads, of any number and size, both ways; -1 undoes 1."""
    compiled, reference = ROTARY.implementations[0], ROTARY.reference
    assert compiled.name == "native_cpu"
    for rows, size in ((0, 4), (1, 2), (1023, 2), *((1 + size % 4, size) for size in range(2, 71))):
        whole = torch.randn(rows, 2, 3, 2, size).to(dtype)
        table = rotary_table(torch.arange(rows) + 7, size // 2 * 2, 1e4)
        x = whole[:, :, :, 1].requires_grad_()
        turned, true = compiled.fn(x, *table), reference(x.double(), *(each.double() for each in table))
        bound = 1e-6 if dtype == torch.float32 else 2**-8
        assert torch.allclose(turned.double(), true, atol=4 * bound, rtol=bound)
        (back,) = torch.autograd.grad(turned, x, turned.detach())
        assert torch.allclose(back.double(), x.double(), atol=8 * bound, rtol=2 * bound)
