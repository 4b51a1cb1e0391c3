"""Counts the bytes of the tensors that stay alive, among those that operators made within a `with` block."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Knows each storage made on this thread, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                storage = tensor.untyped_storage()
                self._sizes[storage] = storage.nbytes()
        return out

    @property
    def total(self) -> int:
        """Bytes that are alive now."""
        return sum(self._sizes.values())
