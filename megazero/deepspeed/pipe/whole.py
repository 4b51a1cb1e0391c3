"""The whole model's state from its stages."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import gather_values


def whole_state(mine: Mapping[str, Tensor], context: ParallelContext) -> dict[str, Tensor]:
    """The states of all stages together, on the CPU; every rank calls this.

    Of what several stages hold, the first one's counts.
    """
    if context.pp.size == 1:
        return dict(mine)
    described = [(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in mine.items()]
    state: dict[str, Tensor] = {}
    for stage, items in enumerate(gather_values(context.pp, described, context.device)):
        for name, shape, dtype in items:
            if stage == context.pp.rank:
                tensor = mine[name].to(context.device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=context.device)
            context.pp.broadcast(tensor, stage).wait()
            state.setdefault(name, tensor.cpu())
    return state
