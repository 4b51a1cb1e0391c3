"""The kernels that operators of torch, and launches of kernels, stand for: their FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megazero.kernels.library import Argument, tensors_among
from megazero.plan.work import Kernel

# Operators of torch that start no kernel: they allocate, or look at a tensor in another way.
_FREE = frozenset(
    {
        "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "detach", "empty", "empty_like",
        "empty_strided", "lift_fresh", "new_empty", "new_empty_strided", "record_stream", "resize_", "set_",
    }
)  # fmt: skip

_SCALED = frozenset({"_scaled_mm", "_scaled_grouped_mm", "_grouped_mm"})  # whose factors come first
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmm_", "addbmm", *_SCALED})
_ATTENTION = MappingProxyType({"attention_forward": 2, "attention_backward": 5})  # products of all pairs


def kernels_of(func: Callable[..., object], given: object, out: object) -> list[Kernel]:
    """The kernels of an operator of torch: one, or none if it computes nothing.

    Args:
        func: the operator, an overload.
        given: its arguments.
        out: its result.
    """
    name = func.overloadpacket.__name__  # type: ignore[attr-defined]
    if func.is_view or name in _FREE:  # type: ignore[attr-defined]
        return []
    inputs = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    nbytes = _nbytes(inputs) + _nbytes(results)
    matrices = [x for x in inputs if x.dim() >= 2]
    if name in _PRODUCTS and len(matrices) >= 2:
        a, b = matrices[-2:] if name not in _SCALED else matrices[:2]
        batch = prod(a.shape[:-2])
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        return [Kernel(name, nbytes, 2.0 * batch * m * k * n, a.dtype, (m, n, k), batch)]
    largest = max((*inputs, *results), key=lambda x: x.numel(), default=None)
    dtype = torch.float32 if largest is None else largest.dtype
    return [Kernel(name, nbytes, 0, dtype)]


def launched_kernel(name: str, arguments: Sequence[Argument]) -> Kernel:
    """The kernel of a launch by megazero."""
    tensors = list(tensors_among(arguments))
    dtypes = [x for x in arguments if isinstance(x, torch.dtype)]
    dtype = dtypes[0] if dtypes else max(tensors, key=lambda x: x.numel()).dtype
    flops = _attention_flops(name, arguments) if name in _ATTENTION else 0.0
    return Kernel(name, _nbytes(tensors), flops, dtype)


def _attention_flops(name: str, arguments: Sequence[Argument]) -> float:
    numbers = arguments[1]
    assert isinstance(numbers, tuple), "sizes come after the dtype"
    s, t, b, n, _, d, left, right = (int(x) for x in numbers[:8])
    return 2.0 * _ATTENTION[name] * b * n * d * visible_pairs(s, t, left, right)


def visible_pairs(s: int, t: int, left: int, right: int) -> int:
    """The pairs of s queries and t keys, the last of both at one place, that lie within a window.

    A query sees `left` keys before its own place and `right` after it.
    """
    places = np.arange(t - s, t)
    seen = np.clip(places + right + 1, 0, t) - np.clip(places - left, 0, t)
    return int(np.maximum(seen, 0).sum())


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements, of each tensor once; a dimension that is broadcast has one."""
    seen = {(x.untyped_storage()._cdata, x.storage_offset(), x.shape): x for x in tensors}
    return sum(
        x.element_size() * prod(n if stride else 1 for n, stride in zip(x.shape, x.stride(), strict=True))
        for x in seen.values()
    )
