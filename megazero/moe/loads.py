"""`RouterLoads`: how often each expert was chosen in a step, and the biases that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from megazero.moe.router import Router
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import gather_values


class RouterLoads:
    """Keeps each router's load, and its bias if it has one, and moves them once a step.

    The bias of an expert with fewer choices than the mean rises by `bias_rate`, and the
    bias of one with more falls by it (Wang et al. 2024, arXiv:2408.15664). Steps count whether or not the
    optimizer skips their update, and evaluation does not count.

    Args:
        routers: the routers of this stage, in order of layer.
        context: this rank's groups and device.
        experts: whether the model has experts, on some stage.
    """

    def __init__(self, routers: Sequence[Router], context: ParallelContext, *, experts: bool):
        self.routers = tuple(routers)
        self.context, self.experts = context, experts
        for router in self.routers:
            router.load = torch.full((router.experts,), 1.0 / router.experts, device=context.device)
            if router.spec.expert_bias:
                router.bias = torch.zeros(router.experts, device=context.device)

    def update(self, tallies: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take in the choices of this rank's micro-batches of a step.

        Args:
            tallies: float32 [E] by name, of all routers here that the step ran.

        Returns:
            The tallies of the whole global batch, on every rank of the stage.
        """
        if not self.routers:
            return {}
        names = [router.tally for router in self.routers]
        counts = torch.cat(
            [tallies.get(router.tally, torch.zeros_like(_load(router))) for router in self.routers]
        )
        self.context.groups["stage"].all_reduce(counts).wait()
        parts = counts.split([router.experts for router in self.routers])
        for router, chosen in zip(self.routers, parts, strict=True):
            if router.tally in tallies:  # else the load stays what it was
                _load(router).copy_(chosen / chosen.sum().clamp_min(1))
            if router.bias is not None:
                # E times the distance to the mean, so that equal loads give exactly 0.
                missing = chosen.sum() - router.experts * chosen
                router.bias.add_(missing.sign(), alpha=router.spec.bias_rate)
        return dict(zip(names, parts, strict=True))

    def report(self, tokens: Mapping[str, Tensor]) -> list[dict[str, Any]] | None:
        """Count the choices of each expert of all stages; None without experts. Every rank calls this.

        Args:
            tokens: the result of `update`.

        Returns:
            For each layer with experts, in order, its number as ``layer`` and the numbers as ``tokens``.
        """
        if not self.experts:
            return None
        mine = [
            {"layer": router.layer, "tokens": [round(count) for count in tokens[name].tolist()]}
            for router, name in zip(self.routers, tokens, strict=True)
        ]
        stages = gather_values(self.context.pp, mine, self.context.device)
        return sorted((layer for stage in stages for layer in stage), key=itemgetter("layer"))

    def state(self) -> dict[str, Tensor]:
        """The loads and biases for a checkpoint, by global name; the same on all ranks of the stage."""
        state = {}
        for router in self.routers:
            state[f"{router.name}.load"] = _load(router)
            if router.bias is not None:
                state[f"{router.name}.bias"] = router.bias
        return state


def _load(router: Router) -> Tensor:
    assert router.load is not None, "every router was given a load"
    return router.load
