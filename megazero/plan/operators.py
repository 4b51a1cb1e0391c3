"""The kernels that run for an operator of torch, or for a launch by megazero: their FLOPs and bytes."""

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

# Operators of torch that start no kernel: they allocate, or make views.
_FREE = frozenset(
    {
        "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "detach", "empty", "empty_like",
        "empty_strided", "lift_fresh", "new_empty", "new_empty_strided", "record_stream", "resize_", "set_",
    }
)  # fmt: skip

_SCALED = frozenset({"_scaled_mm", "_scaled_grouped_mm", "_grouped_mm"})  # the factors are the first matrices
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmm_", "addbmm", *_SCALED})
_ATTENTION = MappingProxyType({"attention_forward": 2, "attention_backward": 5})  # matrix products


def kernels_of(func: Callable[..., object], arguments: object, out: object) -> list[Kernel]:
    """The kernels of an operator of torch: one, or none if it computes nothing.

    Args:
        func: the operator, an overload.
        arguments: the call's arguments.
        out: the call's result.
    """
    name = func.overloadpacket.__name__  # type: ignore[attr-defined]
    if func.is_view or name in _FREE:  # type: ignore[attr-defined]
        return []
    inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
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
    """The kernel of a launch by `KernelLibrary.launch`."""
    tensors = list(tensors_among(arguments))
    dtypes = [x for x in arguments if isinstance(x, torch.dtype)]
    dtype = dtypes[0] if dtypes else max(tensors, key=lambda x: x.numel()).dtype
    flops = 0.0
    if name in _ATTENTION:
        sizes = arguments[1]
        assert isinstance(sizes, tuple), "an attention's sizes follow its dtype"
        s, t, b, n, _, d, left, right = (int(x) for x in sizes[:8])
        flops = 2.0 * _ATTENTION[name] * b * n * d * visible_pairs(s, t, left, right)
    return Kernel(name, _nbytes(tensors), flops, dtype)


def visible_pairs(s: int, t: int, left: int, right: int) -> int:
    """Count the pairs of s queries and t keys in a window of `left` keys before and `right` after a query.

    The last query and the last key have the same position.
    """
    places = np.arange(t - s, t)
    seen = np.clip(places + right + 1, 0, t) - np.clip(places - left, 0, t)
    return int(np.maximum(seen, 0).sum())


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements in memory, counting equal views once and broadcast dimensions as one element."""
    seen = {(x.untyped_storage()._cdata, x.storage_offset(), x.shape): x for x in tensors}
    return sum(
        x.element_size() * prod(n if stride else 1 for n, stride in zip(x.shape, x.stride(), strict=True))
        for x in seen.values()
    )
