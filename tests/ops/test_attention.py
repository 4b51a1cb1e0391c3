"""The front of attention: documents, KV cache, sharded heads under dropout, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megazero.ops.attention import attention
from megazero.ops.dropout import AttentionDropout


def _qkv(s: int = 9, b: int = 2, n: int = 4, g: int = 2, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(s, b, n, d), torch.randn(s, b, g, d), torch.randn(s, b, g, d)


def test_uniform_attention_averages_the_values_so_far() -> None:
    """With equal keys, position i gives the mean of values 0..i."""
    values = torch.arange(4.0).view(4, 1, 1, 1)
    out = attention(torch.zeros(4, 1, 1, 1), torch.zeros(4, 1, 1, 1), values, causal=True)
    assert out.flatten().tolist() == pytest.approx([0.0, 0.5, 1.0, 1.5])


@pytest.mark.parametrize("cached", [1, 4, 8])
def test_a_kv_cache_continues_where_the_whole_would(cached: int) -> None:
    q, k, v = _qkv()
    whole = attention(q, k, v, causal=True)
    assert torch.allclose(attention(q[cached:], k, v, causal=True), whole[cached:], atol=1e-6)


def test_documents_attend_only_to_themselves() -> None:
    q, k, v = _qkv()
    ids = torch.tensor([[0] * 4 + [1] * 5, [7] * 6 + [8] * 3])
    whole = attention(q, k, v, causal=True, document_ids=ids)
    for sample, cut in ((0, 4), (1, 6)):
        own = (slice(None), slice(sample, sample + 1))
        for part in (slice(0, cut), slice(cut, 9)):
            alone = attention(*(each[own][part] for each in (q, k, v)), causal=True)
            assert torch.allclose(whole[part, sample : sample + 1], alone, atol=1e-6)


def test_one_sample_alone_equals_it_in_a_batch_to_the_bit_of_its_gradient() -> None:
    leaves = [each.requires_grad_() for each in _qkv(s=40)]
    out = attention(*leaves, causal=True)
    grads = torch.autograd.grad(out[:, 1].sum(), leaves)
    alone = [each[:, 1:].detach().requires_grad_() for each in leaves]
    alone_grads = torch.autograd.grad(attention(*alone, causal=True).sum(), alone)
    for whole, part in zip(grads, alone_grads, strict=True):
        assert torch.allclose(whole[:, 1:], part, atol=1e-6)
        assert not whole[:, 0].any()


def test_heads_of_a_tensor_parallel_rank_drop_what_the_whole_drops() -> None:
    q, k, v = _qkv()
    keys = torch.tensor([3, 9])
    dropout = AttentionDropout(0.3, keys, range(9), range(9))
    whole = attention(q, k, v, causal=True, dropout=dropout)
    of_rank = replace(dropout, head_offset=2)
    second = attention(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], causal=True, dropout=of_rank)
    assert torch.allclose(second, whole.view(9, 2, 4, 8)[:, :, 2:].reshape(9, 2, 16), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_some_queries_and_shuffled_keys_drop_what_all_drop(dtype: torch.dtype) -> None:
    """As on a context-parallel rank: a zigzag half of the queries, keys in the order in which they arrive.

    fp32 takes the blocks with the kernel, fp64 without, fp16 the composition.
    """
    q, k, v = (each.to(dtype) for each in _qkv(s=40))
    rows, arrived = torch.tensor([*range(10), *range(30, 40)]), torch.randperm(40)
    keys = torch.tensor([3, 9])
    whole = attention(q, k, v, causal=True, dropout=AttentionDropout(0.3, keys, range(40), range(40)))
    by_sample = torch.stack((arrived, arrived), 1)
    for key_positions in (arrived, by_sample):
        some = attention(
            q[rows],
            k[arrived],
            v[arrived],
            causal=False,
            mask=rows[:, None] >= arrived,
            dropout=AttentionDropout(0.3, keys, rows, key_positions),
        )
        assert torch.allclose(some, whole[rows], atol=2e-3 if dtype == torch.float16 else 1e-6)


def test_views_of_a_fused_projection_need_not_be_contiguous() -> None:
    fused = torch.randn(9, 2, 4, 3, 8)
    q, k, v = fused.unbind(3)
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.allclose(attention(q, k, v, causal=True), expected, atol=1e-6)


@pytest.mark.parametrize("dropout", [None, AttentionDropout(0.1, torch.arange(2), range(200), range(200))])
def test_bf16_gradients_are_near_those_of_fp64(dropout: AttentionDropout | None) -> None:
    """Scores of order ten, where a bf16 score would be off by 4%: relative error by norm stays 1%."""
    torch.manual_seed(0)
    tensors = [torch.randn(200, 2, 4, 32) * scale for scale in (3.0, 1.0, 1.0)]
    grads = {}
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [each.bfloat16().to(dtype).requires_grad_() for each in tensors]
        out = attention(*leaves, causal=True, dropout=dropout)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        grads[dtype] = torch.autograd.grad(out, leaves, weights.to(dtype))
    for ours, true in zip(grads[torch.bfloat16], grads[torch.float64], strict=True):
        assert ((ours.double() - true).norm() / true.norm()).item() < 0.01


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = _qkv()
    with pytest.raises(ValueError, match="number of heads that divides q's"):
        attention(q[:, :, :3], k, v, causal=True)
    with pytest.raises(ValueError, match="`k` and `v` must be"):
        attention(q, k, v[:5], causal=True)
