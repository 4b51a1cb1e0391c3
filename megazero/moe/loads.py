"""`RouterLoads`: how often each expert was chosen in a step, and the biases that balance the choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from megazero.moe.router import Router
from megazero.mpu.context import ParallelContext
from megazero.mpu.messages import gather_values


class RouterLoads:
    """Updates each router's load, and its bias if it has one, once a step.

    The bias of an expert with fewer choices than the mean rises by `bias_rate`; with more choices, it falls
    by as much (Wang et al. 2024, arXiv:2408.15664). Steps whose update the optimizer skips count, evaluations
    do not.

    Args:
        routers: the routers of this stage, in order of layer.
        experts: whether any stage of the model has experts.
    """

    def __init__(self, routers: Sequence[Router], context: ParallelContext, *, experts: bool):
        self.routers = tuple(routers)
        self.context, self.experts = context, experts
        for router in self.routers:
            router.load = torch.full((router.experts,), 1.0 / router.experts, device=context.device)
            if router.spec.expert_bias:
                router.bias = torch.zeros(router.experts, device=context.device)

    def update(self, tallies: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Update loads and biases by the choices of one step.

        Args:
            tallies: name of a tally -> float32 [E], this rank's counts, for each router that the step ran.

        Returns:
            The tallies of the whole global batch, the same on every rank of the stage.
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
            if router.tally in tallies:  # else the step skipped this layer, and its load stays
                _load(router).copy_(chosen / chosen.sum().clamp_min(1))
            if router.bias is not None:
                # E times the difference to the mean, so that equal loads give exactly 0.
                missing = chosen.sum() - router.experts * chosen
                router.bias.add_(missing.sign(), alpha=router.spec.bias_rate)
        return dict(zip(names, parts, strict=True))

    def report(self, tokens: Mapping[str, Tensor]) -> list[dict[str, object]] | None:
        """Gather the choices of each expert from all stages; None without experts. Every rank calls this.

        Args:
            tokens: the result of `update`.

        Returns:
            For each layer with experts, in order, its number (``layer``) and the counts (``tokens``).
        """
        if not self.experts:
            return None
        own = [
            {"layer": router.layer, "tokens": [round(count) for count in tokens[name].tolist()]}
            for router, name in zip(self.routers, tokens, strict=True)
        ]
        stages = gather_values(self.context.pp, own, self.context.device)
        return sorted((layer for stage in stages for layer in stage), key=itemgetter("layer"))

    def state(self) -> dict[str, Tensor]:
        """Global name -> load or bias, for a checkpoint; the same on all ranks of the stage."""
        state = {}
        for router in self.routers:
            state[f"{router.name}.load"] = _load(router)
            if router.bias is not None:
                state[f"{router.name}.bias"] = router.bias
        return state


def _load(router: Router) -> Tensor:
    assert router.load is not None, "`RouterLoads` gives every router a load"
    return router.load
