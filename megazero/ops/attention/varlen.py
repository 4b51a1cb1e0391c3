"""Attention whose rows are runs of documents, by torch's FlashAttention for rows of any length.

It computes nothing between documents, and needs no mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megazero.ops.attention.call import AttentionCall

CHANNELS = 8  # FlashAttention takes heads of multiples of these


def varlen_knows(grouped: bool, names: frozenset[str] | None = None) -> bool:
    """Whether torch's function is there, and takes heads in groups if they are `grouped`.

    `names` are those of its parameters, none if there is no function: torch 2.10 has `is_causal`, later ones
    `window_size` and `scale` instead, those from 2.12 on `enable_gqa`.
    """
    from megazero.ops.attention.varlen_in_torch import VARLEN_NAMES

    names = VARLEN_NAMES if names is None else names
    return bool({"is_causal", "window_size"} & names) and not (grouped and "enable_gqa" not in names)


def varlen_arguments(call: AttentionCall, grouped: bool, names: frozenset[str]) -> dict[str, object]:
    """The arguments of torch's function besides tensors and lengths; without `scale` it is 1 / sqrt(d)."""
    given: dict[str, object] = {"scale": call.scale} if "scale" in names else {}
    given |= {"window_size": call.sides} if "window_size" in names else {"is_causal": call.causal}
    return {**given, "enable_gqa": True} if grouped else given


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    attend: Callable[..., Any] | None = None,
    names: frozenset[str] | None = None,
) -> tuple[Tensor, None]:
    """Attention by documents whose runs are known; `attend` and its `names` stand for torch's in tests."""
    from megazero.ops.attention.varlen_in_torch import VARLEN, VARLEN_NAMES

    attend, names = attend or VARLEN, VARLEN_NAMES if names is None else names
    runs, (s, b, n, d) = None if call.documents is None else call.documents.runs, q.shape
    assert attend is not None, "the table asks whether there is one"
    assert runs is not None, "the table asks for runs"
    short = -d % CHANNELS  # channels of zeros change neither scores nor results
    given, missing = varlen_arguments(call, k.shape[2] != n, names), call.scale * math.sqrt(d + short)
    if "scale" not in given and not math.isclose(missing, 1):
        q = q * missing
    q, k, v = (x.transpose(0, 1).reshape(b * s, *x.shape[2:]) for x in (q, k, v))
    if short:
        q, k, v = (F.pad(x, (0, short)) for x in (q, k, v))
    out: Tensor = attend(q, k, v, runs.ends, runs.ends, runs.longest, runs.longest, **given)
    return out[..., :d].reshape(b, s, -1).transpose(0, 1), None
