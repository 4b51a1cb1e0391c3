"""`Peak`: the largest number that layers note in a step, on whichever rank and micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megazero.layers.inputs import Attends
from megazero.mpu.group import Group
from megazero.ops.attention import AttentionCall, largest_score
from megazero.train.step.engine import Engine


class Peak:
    """The largest number noted since it was last read; a sum over ranks or micro-batches would be no figure.

    To note a number twice, as backward does that computes a layer again, makes no difference.

    Args:
        device: the device of what is noted, which nothing waits for.
    """

    def __init__(self, device: torch.device):
        self._value = torch.full((), -torch.inf, device=device)

    def note(self, number: Tensor) -> None:
        """Note a number, a scalar; NaN is the largest."""
        torch.maximum(self._value, number.detach().to(self._value.dtype), out=self._value)

    def take(self, group: Group) -> float | None:
        """The largest number on all ranks of `group`, which all call this; None if none was noted."""
        group.all_reduce(self._value, "max").wait()
        value = self._value.item()
        self._value.fill_(-torch.inf)
        return None if value == -torch.inf else value


def attention_peak(engine: Engine) -> Peak:
    """The peak in which all attention of this rank's stage notes its largest logit, before any bias."""
    peak = Peak(engine.context.device)

    def note(q: Tensor, k: Tensor, call: AttentionCall) -> None:
        peak.note(largest_score(q, k, call))

    for chunk in engine.executor.chunks.values():
        model = getattr(chunk, "student", chunk)
        for layer in model.modules() if isinstance(model, nn.Module) else ():
            attention: Any = layer
            if isinstance(attends := getattr(attention, "attends", None), Attends):
                attention.attends = replace(attends, watch=note)
    return peak
