"""Attention whose rows are runs of documents, by torch's FlashAttention for rows of any length.

It computes nothing between documents, and needs no mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from megazero.ops.attention.call import AttentionCall

try:  # from torch 2.10 on
    from torch.nn.attention import varlen
except ImportError:
    varlen = None  # type: ignore[assignment]


@cache
def _parameters() -> frozenset[str]:
    """The names of the parameters of torch's function; none if this torch has no such function."""
    return frozenset() if varlen is None else frozenset(inspect.signature(varlen.varlen_attn).parameters)


def varlen_knows(*, grouped: bool, scaled: bool = True) -> bool:
    """Whether this torch computes attention by documents, with a scale, and for heads in groups if `grouped`.

    torch 2.10 has the function, with `is_causal` instead of `window_size`; later ones take a scale and
    groups.
    """
    names = _parameters()
    asked = {name for name, wanted in (("scale", scaled), ("enable_gqa", grouped)) if wanted}
    return bool({"is_causal", "window_size"} & names) and asked <= names


def varlen_arguments(call: AttentionCall, grouped: bool) -> dict[str, Any]:
    """What this torch's function is given besides tensors and lengths."""
    names, (left, right) = _parameters(), call.sides
    given: dict[str, Any] = {"scale": call.scale}
    if "window_size" in names:
        given["window_size"] = (left, right)
    else:
        given["is_causal"] = call.causal
    if grouped:
        given["enable_gqa"] = True
    return given


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, attend: Callable[..., Any] | None = None
) -> tuple[Tensor, None]:
    """Attention by documents whose runs are known; `attend` stands for torch's function in tests."""
    runs, (s, b, n, _) = None if call.documents is None else call.documents.runs, q.shape
    assert runs is not None, "the table asks for runs"
    attend = varlen.varlen_attn if attend is None else attend
    one_by_one = (x.transpose(0, 1).reshape(b * s, *x.shape[2:]) for x in (q, k, v))
    given = varlen_arguments(call, k.shape[2] != n)
    out = attend(*one_by_one, runs.ends, runs.ends, runs.longest, runs.longest, **given)
    return out.view(b, s, -1).transpose(0, 1), None
