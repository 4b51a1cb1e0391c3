"""Host memory between a run that continues and a checkpoint that is being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megazero.checkpoint.part import Part


class Staging:
    """Host memory that parts are copied to, kept from one checkpoint to the next."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def take(self, parts: Sequence[Part]) -> tuple[list[Part], Callable[[], None]]:
        """Parts on the host, and a function that fills them; originals must not change until it returns.

        Copies from an accelerator go to page-locked memory and are queued here, after the work that is
        already queued; the function waits for them. It copies other memory itself, on any thread.
        """
        alike = len(parts) == len(self._copies) and all(
            (p.tensor.shape, p.tensor.dtype) == (c.shape, c.dtype)
            for p, c in zip(parts, self._copies, strict=True)
        )
        if not alike:
            self._copies = [
                torch.empty(p.tensor.shape, dtype=p.tensor.dtype, pin_memory=p.tensor.is_cuda) for p in parts
            ]
        pairs = [(copy, part.tensor) for part, copy in zip(parts, self._copies, strict=True)]
        arrived = _queue([(copy, tensor) for copy, tensor in pairs if tensor.is_cuda])

        def fill() -> None:
            for copy, tensor in pairs:
                if not tensor.is_cuda:
                    copy.copy_(tensor)
            arrived()

        return [replace(part, tensor=copy) for part, (copy, _) in zip(parts, pairs, strict=True)], fill


def _queue(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """Queue copies from a CUDA device; returns a function that waits for them."""
    if not pairs:
        return lambda: None
    for copy, tensor in pairs:
        copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(pairs[0][1].device))
    return event.synchronize
