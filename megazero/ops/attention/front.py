"""The public attention, its masks, and its tables of implementations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megazero.ops.attention.composed import attention_sdpa, attention_with_dropout
from megazero.ops.attention.flash_cpu import attention_flash_cpu
from megazero.ops.attention.reference import attention_reference
from megazero.ops.dispatch import Implementation, Operator, choose
from megazero.ops.dropout import Dropout
from megazero.ops.scaled_softmax.reference import may_attend

_CPU = frozenset({"cpu"})
_CPU_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16})
_REFERENCE = Implementation("reference", attention_reference)
_FLASH_CPU = Implementation("flash_cpu", attention_flash_cpu, devices=_CPU, dtypes=_CPU_DTYPES)
# In fp32 torch's own backward is as fast.
_FLASH_CPU_BF16 = Implementation(
    "flash_cpu", attention_flash_cpu, devices=_CPU, dtypes=frozenset({torch.bfloat16})
)

ATTENTION = Operator("attention", (_FLASH_CPU_BF16, Implementation("sdpa", attention_sdpa), _REFERENCE))

ATTENTION_DROPOUT = Operator(
    "attention_dropout",
    (_FLASH_CPU, Implementation("composed", attention_with_dropout), _REFERENCE),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    dropout: Dropout | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T) v, [s, b, n d], for q [s, b, n, d] and k, v [t, b, g, d], g dividing n.

    causal: the last query sees the last key, so with s < t the queries continue a KV cache.
    mask: bool, broadcastable to [b, n, s, t], True = may attend.
    document_ids: int [b, t]; a query attends only to keys of its own document.
    dropout: of the probabilities, by counter, so every layout drops the same ones.
    scale: 1 / sqrt(d) unless given.
    A query that may attend to nothing gives zeros. Raises ValueError where shapes do not fit.
    """
    _check_shapes(q, k, v)
    s, t = q.shape[0], k.shape[0]
    causal = causal and s > 1
    mask = _joined_mask(mask, document_ids, causal, s, t, q.device)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    table = ATTENTION if dropout is None else ATTENTION_DROPOUT
    return choose(table.implementations, q).fn(q, k, v, mask, causal, dropout, scale)


def _joined_mask(
    mask: Tensor | None, document_ids: Tensor | None, causal: bool, s: int, t: int, device: torch.device
) -> Tensor | None:
    """One bool mask [b or 1, n or 1, s, t] of all that forbids, or None where `causal` alone says it."""
    if document_ids is not None:
        own = document_ids[:, None, t - s :, None] == document_ids[:, None, None, :]
        mask = own if mask is None else mask & own
    if mask is None and (not causal or s == t):
        return None
    if causal:
        order = may_attend(s, t, device)
        mask = order if mask is None else mask & order
    return mask.view((1,) * (4 - mask.dim()) + mask.shape).expand(-1, -1, s, t)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if k.shape != v.shape or q.shape[1] != k.shape[1] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "`k` and `v` must be [t, b, g, d] with q's b and d, but q, k, v are "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; project them from one sequence."
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"`k` must have a number of heads that divides q's ({q.shape[2]}), but has {k.shape[2]}; "
            "set the number of query groups to a divisor of the number of heads."
        )
