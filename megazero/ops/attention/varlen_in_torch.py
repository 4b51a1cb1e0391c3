"""torch's FlashAttention for rows of any length, and the parameters that it has.

Its import brings torch's compiler, which takes a second. A run that does not use it must not wait for that at
its start, so this module is imported inside functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

VARLEN: Callable[..., Any] | None
try:  # from torch 2.10 on
    from torch.nn.attention.varlen import varlen_attn as VARLEN
except ImportError:
    VARLEN = None
VARLEN_NAMES = frozenset(inspect.signature(VARLEN).parameters) if VARLEN else frozenset[str]()
