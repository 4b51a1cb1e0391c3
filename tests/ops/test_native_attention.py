"""Compiled attention on CPU: every instruction set, ragged sizes, masks, threads, what is not finite."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from megazero.ops import native
from megazero.ops.attention import native_cpu
from megazero.ops.attention.call import AttentionCall
from megazero.ops.attention.native_cpu import attention_native_cpu
from megazero.ops.attention.pattern import ALL, CAUSAL
from megazero.ops.attention.reference import attention_reference
from megazero.ops.dropout import AttentionDropout, dropout_mask_attention
from tests.tables import over_table

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled kernels are not built")

SETS = ("BASELINE", "AVX2", "AVX512")


def _inputs(s: int, t: int, b: int, n: int, g: int, d: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(s + 100 * t)
    shapes = ((s, b, n, d), (t, b, g, d), (t, b, g, d), (s, b, n * d))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _all(attend, inputs: list[Tensor], causal: bool, dropout=None, lse: bool = False) -> list[Tensor]:
    """Result, log-sum-exp and gradients; with `lse`, the gradients of both."""
    *leaves, grad = (each.clone() for each in inputs)
    for leaf in leaves:
        leaf.requires_grad_()
    s, b, n, _ = leaves[0].shape
    out, sums = attend(*leaves, AttentionCall(0.3, pattern=ALL.causally(causal), dropout=dropout))
    of, grads = (out, sums.nan_to_num(neginf=0.0)) if lse else (out,), (grad, torch.ones(b, n, s).to(grad))
    return [out.detach(), sums.detach(), *torch.autograd.grad(of, leaves, grads[: len(of)])]


def _agree(inputs: list[Tensor], causal: bool, dropout=None, bound: float = 1e-5, lse: bool = False) -> None:
    ours = _all(attention_native_cpu, inputs, causal, dropout, lse)
    true = _all(attention_reference, [each.double() for each in inputs], causal, dropout, lse)
    for one, other in zip(ours, true, strict=True):
        assert torch.equal(one.isinf(), other.isinf())
        found, expected = one.double().nan_to_num(neginf=0.0), other.nan_to_num(neginf=0.0)
        assert torch.allclose(found, expected, atol=bound * max(1.0, expected.abs().amax().item()), rtol=0)


@over_table("name", SETS)
@over_table("lse", [False, True])
def test_every_instruction_set_that_there_is(name: str, lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the processor lacks falls back to the best that it has."""
    most = getattr(native.NATIVE.InstructionSet, name)
    monkeypatch.setattr(native_cpu, "_shape", partial(native_cpu._shape, most=most))
    for sizes in ((130, 130, 2, 4, 2, 20), (65, 200, 1, 1, 1, 64), (9, 9, 1, 3, 3, 1)):
        dropout = AttentionDropout(0.3, torch.arange(sizes[2]), range(sizes[0]), range(sizes[1]))
        for causal in (False, True):
            _agree(_inputs(*sizes), causal, lse=lse)
            _agree(_inputs(*sizes), causal, dropout, lse=lse)


def test_ragged_sizes() -> None:
    for size in range(1, 71):
        _agree(_inputs(size, size, 1, 2, 1, 3 + size % 7), causal=size % 2 == 0)
        _agree(_inputs(2, 71 - size, 1, 1, 1, size), causal=size % 3 == 0)
    for keys in (1023, 1024, 1025, 4097):
        _agree(_inputs(3, keys, 1, 1, 1, 5), causal=True)
        _agree(_inputs(keys, 3, 1, 1, 1, 5), causal=False)


@over_table(
    "sizes", [(0, 5, 1, 2, 1, 4), (5, 0, 1, 2, 1, 4), (5, 5, 0, 2, 1, 4), (4, 4, 1, 2, 2, 0)], ids=str
)
def test_nothing_gives_zeros(sizes: tuple[int, ...]) -> None:
    out, lse, *grads = _all(attention_native_cpu, _inputs(*sizes), causal=False)
    assert not out.any()
    assert sizes[1] or bool((lse == -torch.inf).all())
    assert not any(grad.any() for grad in grads)


def test_the_mask_is_that_of_counter_random_bit_for_bit() -> None:
    """Values that are the rows of the identity let each probability through by itself."""
    q, k, _, _ = _inputs(70, 70, 2, 3, 3, 70)
    keys, head_offset = torch.tensor([3, -8]), 5
    dropout = AttentionDropout(0.4, keys, range(9, 79), torch.arange(140).view(70, 2), head_offset)
    values = torch.eye(70).view(70, 1, 1, 70).expand(-1, 2, 3, -1)
    out, _ = attention_native_cpu(q, k, values, AttentionCall(0.1, dropout=dropout))
    kept = out.view(70, 2, 3, 70).permute(1, 2, 0, 3) != 0
    assert torch.equal(kept, dropout_mask_attention(dropout, 2, 3, 70, 70))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    inputs = [each.to(dtype) for each in _inputs(90, 90, 2, 6, 3, 16)]
    dropout = AttentionDropout(0.2, torch.arange(2), range(90), range(90))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(_all(attention_native_cpu, inputs, True, dropout))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_slices_of_one_projection_need_no_copy() -> None:
    """As layers have them: queries, keys and values of a head beside each other."""
    together = torch.randn(33, 2, 4, 3, 8)
    parts = [each.squeeze(3) for each in together.split(1, dim=3)]
    grad = torch.randn(33, 2, 32)
    ours = _all(attention_native_cpu, [*parts, grad], True)
    apart = _all(attention_native_cpu, [*(each.contiguous() for each in parts), grad], True)
    assert all(torch.equal(one, two) for one, two in zip(ours, apart, strict=True))
    turned = torch.randn(33, 2, 8, 4).transpose(2, 3)  # channels are not neighbors
    _agree([turned, *parts[1:], grad], causal=True)


@over_table("bad", [torch.inf, -torch.inf, torch.nan])
@over_table("which", [0, 1, 2])
def test_what_is_not_finite_stays_visible(bad: float, which: int) -> None:
    """Where the reference's result is NaN or infinite, so is ours, and nowhere else."""
    for s, t in ((1, 1), (70, 70)):
        inputs = _inputs(s, t, 1, 2, 2, 4)
        inputs[which][s // 2, 0, 1, 2] = bad
        ours, _ = attention_native_cpu(*inputs[:3], AttentionCall(0.5, pattern=CAUSAL))
        true, _ = attention_reference(*inputs[:3], AttentionCall(0.5, pattern=CAUSAL))
        assert torch.equal(ours.isfinite(), true.isfinite())


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="groups must divide heads"):
        native.NATIVE.AttentionShape(1, 1, 1, 3, 2, 4, 1, 1.0, False, False)
