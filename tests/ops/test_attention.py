"""The front of attention: documents, KV cache, sharded heads under dropout, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megazero.ops.attention import attention
from megazero.ops.dropout import AttentionDropout
from tests.ops.lse import attention_with_lse
from tests.tables import over_table


def _qkv(s: int = 9, b: int = 2, n: int = 4, g: int = 2, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(s, b, n, d), torch.randn(s, b, g, d), torch.randn(s, b, g, d)


def test_uniform_attention_averages_the_values_so_far() -> None:
    """With equal keys, position i gives the mean of values 0..i."""
    values = torch.arange(4.0).view(4, 1, 1, 1)
    out = attention(torch.zeros(4, 1, 1, 1), torch.zeros(4, 1, 1, 1), values, causal=True)
    assert out.flatten().tolist() == pytest.approx([0.0, 0.5, 1.0, 1.5])


@over_table("cached", [1, 4, 8])
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


@over_table("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
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


def _formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(d) + bias) v and its log-sum-exp, in plain torch."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) / q.shape[-1] ** 0.5
    scores = (scores if bias is None else scores + bias).masked_fill(~allowed, -torch.inf)
    return torch.einsum("bnst,tbne->sbne", scores.softmax(-1), v).flatten(2), scores.logsumexp(-1)


@over_table("dtype", [torch.float32, torch.bfloat16], ids=str)
@over_table(
    ("e", "bias_shape", "causal"),
    [
        (8, (2, 4, 9, 9), True),
        (8, (4, 9, 9), False),
        (12, None, True),
        (5, (1, 4, 9, 9), True),
        (5, None, False),
    ],
)
def test_a_bias_and_values_of_another_width_follow_the_formula(dtype, e, bias_shape, causal) -> None:
    """Results, log-sum-exp and all gradients, with a mask and documents, as T5 and latent attention ask."""
    q, k, _ = _qkv()
    leaves = [q, k, torch.randn(9, 2, 2, e)] + ([] if bias_shape is None else [2 * torch.randn(bias_shape)])
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    mask = (torch.rand(2, 1, 9, 9) > 0.3) | torch.eye(9, dtype=torch.bool)
    ids = torch.tensor([[0] * 4 + [1] * 5, [7] * 6 + [8] * 3])
    allowed = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    allowed = allowed.tril() if causal else allowed
    given = {
        "bias": leaves[3] if len(leaves) > 3 else None,
        "mask": mask,
        "document_ids": ids,
        "causal": causal,
    }
    true_out, true_lse = _formula(*wide[:3], wide[3] if len(wide) > 3 else None, allowed)
    true_grads = torch.autograd.grad(true_out.sin().sum(), wide, retain_graph=True)
    true_both = torch.autograd.grad(true_out.sin().sum() + true_lse.sum(), wide)
    alone = attention(*leaves[:3], **given)
    out, lse = attention_with_lse(*leaves[:3], **given)
    bound = 3e-6 if dtype == torch.float32 else 4e-2
    pairs = [(alone, true_out), (out, true_out), (lse, true_lse)]
    pairs += zip(torch.autograd.grad(alone.sin().sum(), leaves), true_grads, strict=True)
    pairs += zip(torch.autograd.grad(out.sin().sum() + lse.sum(), leaves), true_both, strict=True)
    for ours, true in pairs:
        assert ours.shape == true.shape
        assert (ours.double() - true).abs().max() <= bound * max(1.0, true.abs().max().item())


def test_dropout_drops_the_same_under_a_bias() -> None:
    """A bias of zeros, and values that are padded with zeros, change nothing."""
    q, k, v = _qkv()
    dropout = AttentionDropout(0.3, torch.tensor([3, 9]), range(9), range(9))
    plain = attention(q, k, v, causal=True, dropout=dropout)
    biased = attention(q, k, v, causal=True, dropout=dropout, bias=torch.zeros(9, 9))
    padded = torch.cat([v, torch.zeros(9, 2, 2, 3)], -1)
    wider = attention(q, k, padded, causal=True, dropout=dropout).view(9, 2, 4, 11)
    assert torch.allclose(biased, plain, atol=1e-6)
    assert torch.allclose(wider[..., :8].flatten(2), plain, atol=1e-6)
    assert not wider[..., 8:].any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = _qkv()
    with pytest.raises(ValueError, match="number of heads that divides q's"):
        attention(q[:, :, :3], k, v, causal=True)
    with pytest.raises(ValueError, match="`k` and `v` must be"):
        attention(q, k, v[:5], causal=True)
