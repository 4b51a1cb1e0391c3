"""Attention in plain torch: as its formula reads, and in two ways that suit an accelerator.

SDPA draws its own dropout from a stream that no other layout can replay, so with dropout the probabilities
are computed and masked here instead. Neither returns the log-sum-exp.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.ops.attention.call import AttentionCall, Softcap
from megazero.ops.attention.kernel import AttentionKernel, Results, above_all_scores
from megazero.ops.chunks import compute_dtype
from megazero.ops.dropout import dropout_mask_attention
from megazero.ops.scaled_softmax import masked_scores, may_attend, scaled_softmax


def _formula(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + bias) v per head, where the heads of a group share its keys and values.

    (Vaswani et al. 2017; grouped queries: Ainslie et al. 2023.) The second result is the log of the softmax's
    denominator, [b, n, s], -inf where there is nothing to attend to.
    """
    repeats = q.shape[2] // k.shape[2]
    wide_q, wide_k, wide_v = (x.to(compute_dtype(q.dtype)) for x in (q, k, v))
    wide_k, wide_v = (x.repeat_interleave(repeats, 2) for x in (wide_k, wide_v))
    scores, scale = _biased(torch.einsum("sbnd,tbnd->bnst", wide_q, wide_k), call)
    wide_scores, none_allowed = masked_scores(
        scores, scale, call.causal_alone(len(q), len(k)), call.allowed(q, k)
    )
    lse = torch.logsumexp(wide_scores, -1).masked_fill(none_allowed.squeeze(-1), -torch.inf)
    probs = torch.softmax(wide_scores, -1).masked_fill(none_allowed, 0)
    if call.dropout is not None:
        probs = probs * dropout_mask_attention(call.dropout, *probs.shape) / (1 - call.dropout.p)
    return torch.einsum("bnst,tbnd->sbnd", probs, wide_v), lse


class _Reference(AttentionKernel):
    """The formula, which autograd goes through; backward is for parts of the keys."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse = _formula(q, k, v, self.prepare(q, k, v, call))
        return out.flatten(2).to(q.dtype), lse

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> AttentionCall:
        return call

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, given: AttentionCall, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        out, lse = _formula(q, k, v, given)
        return out.to(dtype).contiguous(), lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, results: Results, given: AttentionCall, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, repeats = compute_dtype(q.dtype), q.shape[2] // k.shape[2]
        q, k, v, out, grad = (x.to(wide) for x in (q, k, v, results.out, results.grad))
        keys, values = (x.repeat_interleave(repeats, 2) for x in (k, v))
        products = torch.einsum("sbnd,tbnd->bnst", q, keys)
        scores, scale = _biased(products, given)
        scores, nothing = masked_scores(
            scores, scale, given.causal_alone(len(q), len(k)), given.allowed(q, k)
        )
        lse = above_all_scores(results.lse).unsqueeze(-1)
        probs = (scores - lse).exp().masked_fill(nothing, 0)
        kept, grad_probs = probs, torch.einsum("sbne,tbne->bnst", grad, values)
        if given.dropout is not None:
            factor = dropout_mask_attention(given.dropout, *probs.shape) / (1 - given.dropout.p)
            kept, grad_probs = probs * factor, grad_probs * factor
        delta = torch.linalg.vecdot(grad, out).permute(1, 2, 0)
        delta = delta if results.grad_lse is None else delta - results.grad_lse
        grad_scores = probs * (grad_probs - delta.unsqueeze(-1)) * given.scale
        if isinstance(given.bias, Softcap):
            grad_scores *= 1 - torch.tanh(products * (given.scale / given.bias.bound)).square()
        grad_q = torch.einsum("bnst,tbnd->sbnd", grad_scores, keys)
        grad_k = torch.einsum("bnst,sbnd->tbnd", grad_scores, q)
        grad_v = torch.einsum("bnst,sbne->tbne", kept, grad)
        grad_k, grad_v = (x.unflatten(2, (-1, repeats)).sum(3) for x in (grad_k, grad_v))
        return grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype)


attention_reference = _Reference()
"""Attention and its log-sum-exp as the formula reads."""


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, None]:
    """Attention without dropout by torch's SDPA, which chooses the kernel."""
    assert call.dropout is None, "SDPA draws dropout masks of its own"
    s, b, n, _ = q.shape
    mask, causal = call.allowed(q, k), call.causal_alone(s, k.shape[0])
    biases = call.biases(s, k.shape[0])
    if biases is not None:  # SDPA takes a mask or a bias, so all restrictions go into the bias.
        allowed = may_attend(s, k.shape[0], q.device) if causal else mask
        bias, causal = biases.to(q.dtype), False
        mask = bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)
    queries, groups = _heads_second(q), k.shape[2]
    # Where all queries see all keys, those of a group are rows of one head: SDPA would repeat keys for them.
    alike = mask is None and not causal and groups != n
    if alike:
        queries = queries.reshape(b, groups, -1, queries.shape[-1])
    out = F.scaled_dot_product_attention(
        queries,
        _heads_second(k),
        _heads_second(v),
        attn_mask=mask,
        is_causal=causal,
        scale=call.scale,
        enable_gqa=groups != n and not alike,
    )
    return out.reshape(b, n, s, -1).permute(2, 0, 1, 3).reshape(s, b, -1), None


def attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, None]:
    """Attention composed of matmuls and our softmax, so that dropout's masks are exact.

    Document ids need no mask [b, 1, s, t] of their own: the softmax compares them.
    """
    s, b, n, _ = q.shape
    ids, t = None, k.shape[0]
    if call.documents is not None and call.part is None and not call.pattern.special:
        ids, call = call.documents.ids.expand(b, t), replace(call, documents=None)
    mask, causal = call.allowed(q, k), call.causal_alone(s, t)
    repeats = n // k.shape[2]
    keys, values = (_heads_second(x).repeat_interleave(repeats, 1) for x in (k, v))
    scores, scale = _biased(_heads_second(q) @ keys.transpose(2, 3), call)
    probs = scaled_softmax(scores, scale, causal, mask, document_ids=ids)
    if call.dropout is not None:
        probs = probs * dropout_mask_attention(call.dropout, b, n, s, t)
        values = values / (1 - call.dropout.p)
    return (probs @ values).permute(2, 0, 1, 3).reshape(s, b, -1), None


def _biased(scores: Tensor, call: AttentionCall) -> tuple[Tensor, float]:
    """Scores with the bias or within their bound, and the scale that is still to be applied."""
    if isinstance(call.bias, Softcap):
        return call.bias.of(scores * call.scale), 1.0
    biases = call.biases(*scores.shape[-2:])
    if biases is None:
        return scores, call.scale
    return scores * call.scale + biases.to(scores.dtype), 1.0


def _heads_second(x: Tensor) -> Tensor:
    """[s, b, n, d] -> [b, n, s, d], a view."""
    return x.permute(1, 2, 0, 3)
