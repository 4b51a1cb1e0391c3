"""Parts of a layer that backward computes again (selective recompute, Korthikanti et al. 2022)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

_Result = TypeVar("_Result")


def computed_again(wanted: bool, function: Callable[..., _Result], *args: object) -> _Result:
    """Return `function(*args)`; if `wanted`, keep only the arguments and compute it again in backward."""
    if not (wanted and torch.is_grad_enabled()):
        return function(*args)
    result: _Result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result


def saved_as(wanted: bool, x: Tensor, again: Callable[[], Tensor]) -> AbstractContextManager[object]:
    """A context in which operators that save x, or a view of it, keep `again` instead, if `wanted`.

    So x is freed after its use, and backward computes it again. A checkpoint around the function that makes x
    would not free it, since the next operator saves it.

    Args:
        wanted: whether to do so.
        x: contiguous.
        again: computes x from tensors that are kept anyway; must not refer to x.
    """
    if not (wanted and torch.is_grad_enabled()):
        return nullcontext()

    forgotten = weakref.ref(x)  # autograd keeps both functions until backward

    def packed(saved: Tensor) -> Tensor | tuple[Callable[[], Tensor], torch.Size]:
        x, base = forgotten(), saved._base
        if (
            x is not None
            and (saved is x or (base is x and saved.is_contiguous()))
            and saved.numel() == x.numel()
        ):
            return again, saved.shape
        return saved

    def unpacked(kept: Tensor | tuple[Callable[[], Tensor], torch.Size]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0]().view(kept[1])

    return saved_tensors_hooks(packed, unpacked)
