"""Parts of a layer that backward computes again (selective recompute, Korthikanti et al. 2022)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

_Result = TypeVar("_Result")


def computed_again(wanted: bool, function: Callable[..., _Result], *args: Any) -> _Result:
    """`function(*args)`, of which backward keeps the arguments alone if it is `wanted`."""
    if not (wanted and torch.is_grad_enabled()):
        return function(*args)
    result: _Result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result


def saved_as(wanted: bool, x: Tensor, again: Callable[[], Tensor]) -> AbstractContextManager[object]:
    """A context in which what saves x, or a view of it, keeps `again` in its place, if it is `wanted`.

    So a result is forgotten once it has been used, and backward computes it by itself; a checkpoint around
    the function would keep it, since what comes after it saves it.

    Args:
        wanted: whether to.
        x: contiguous.
        again: computes x from what is kept anyway, and does not hold it.
    """
    if not (wanted and torch.is_grad_enabled()):
        return nullcontext()

    forgotten = weakref.ref(x)  # autograd keeps both functions until backward

    def packed(saved: Tensor) -> Any:
        x, base = forgotten(), saved._base
        if (
            x is not None
            and (saved is x or (base is x and saved.is_contiguous()))
            and saved.numel() == x.numel()
        ):
            return again, saved.shape
        return saved

    def unpacked(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0]().view(kept[1])

    return saved_tensors_hooks(packed, unpacked)
